"""Adapters, frozen layers in fewer bits, experts and teachers on a CUDA device, or on that of the recorder."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from learner.config import LearnerSettings
from learner.evaluation.chunks import Chunks
from learner.model.adapter import apply_adapter
from learner.model.base_file import write_base
from learner.model.base_precision import Nf4Embedding, Nf4Linear
from learner.model.device import choose_precision
from learner.model.growing.parts import parts_in
from learner.model.task import Classification
from learner.model.trained_set import base_state, decide_trained_set, trained_state
from learner.sections.adapter import AdapterSettings
from learner.state_dir.bases import Bases
from learner.strategies.base import Strategy
from learner.strategies.registry import STRATEGIES
from learner.teacher.module import ModuleTeacher
from learner.training.trainer import Trainer
from tests.learner.learner_bench import CPU, LearnerBench
from tests.support.cuda_recorder import CudaRecorder
from tests.support.gpu import rtol
from tests.support.strategies import extended, small_strategy

EXACT: dict[str, Any] = {"precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.1}}
pytestmark = pytest.mark.usefixtures("packages_of_pretrained")
PRECISIONS = ["fp32", "bf16", "nf4"]


def adapted(precision: str) -> nn.Module:
    pytest.importorskip("peft")
    if precision == "nf4":
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    settings = {"rank": 2, "train": ["4"], "base_precision": precision}
    model = apply_adapter(model, AdapterSettings.model_validate(settings))
    decide_trained_set(model)
    return model


@pytest.mark.parametrize("rows", [1, 3, 40], ids=["one", "few", "many"])
@pytest.mark.parametrize("shape", [(32, 64), (8, 300), (64, 64)], ids=str)
def test_kernels_of_four_bits_compute_on_a_device_what_they_do_on_the_cpu(
    cuda: torch.device, shape: tuple[int, int], rows: int
) -> None:
    """With gradients, which multiplies by the unpacked weights, and without, for which there are other kernels."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer, x = Nf4Linear(nn.Linear(shape[1], shape[0]).requires_grad_(False)), torch.randn(rows, shape[1])
    moved = copy.deepcopy(layer).to(cuda)
    torch.testing.assert_close(moved.weight.cpu(), layer.weight, rtol=1e-6, atol=0)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            inputs = [x.clone().to(device).requires_grad_(grad) for device in (CPU, cuda)]
            expected, found = layer(inputs[0]), moved(inputs[1])
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    expected.square().sum().backward()
    found.square().sum().backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    torch.testing.assert_close(inputs[1].grad.cpu(), inputs[0].grad, rtol=1e-4, atol=1e-3)
    half = moved(x.to(cuda, torch.bfloat16))
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.float().cpu(), expected.detach(), rtol=0.05, atol=0.05)


def test_an_embedding_of_four_bits_returns_the_same_rows(cuda: torch.device) -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    words = Nf4Embedding(nn.Embedding(50, 128))
    tokens = torch.randint(0, 50, (3, 7))
    found = copy.deepcopy(words).to(cuda)(tokens.to(cuda)).cpu()
    torch.testing.assert_close(found, words(tokens), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_learner_trains_adapters_on_a_device_as_on_the_cpu(
    schema: Schema, tmp_path: Path, cuda: torch.device, precision: str
) -> None:
    """And its base is the same file, wherever it is trained."""
    steps, trained, bases = 5, [], []
    for name, device in (("cpu", CPU), ("cuda", cuda)):
        (tmp_path / name).mkdir()
        bench = LearnerBench(tmp_path / name, schema, adapted(precision), steps, device=device, learner=EXACT)
        bench.run()
        bench.finish()
        model = bench.trainer.model
        trained.append({key: value.cpu() for key, value in trained_state(model).items()})
        bases.append(write_base(Bases(tmp_path / name), model))
        assert {value.device.type for value in base_state(model).values()} <= {device.type, "cpu"}
        bench.close()
    assert bases[0] == bases[1]
    within = 1e-3 if precision == "bf16" else 10 * rtol(torch.float32, steps)
    torch.testing.assert_close(trained[1], trained[0], rtol=within, atol=within)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_learner_with_adapters_goes_on_from_its_checkpoint_on_a_device(
    schema: Schema, tmp_path: Path, cuda: torch.device, precision: str
) -> None:
    first = LearnerBench(tmp_path, schema, adapted(precision), 4, device=cuda, learner=EXACT)
    first.run()
    first.finish()
    state = {name: value.cpu() for name, value in first.trainer.model.state_dict().items()}
    first.close()
    second = LearnerBench(tmp_path, schema, adapted(precision), 6, device=cuda, learner=EXACT)
    second.resume()
    assert all(torch.equal(value.cpu(), state[name]) for name, value in second.trainer.model.state_dict().items())
    second.run()
    assert second.loop.state.steps == 6
    second.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_streams_and_copies_of_a_learner_with_adapters_are_in_order(
    schema: Schema, tmp_path: Path, precision: str
) -> None:
    with CudaRecorder() as recorder:
        bench = LearnerBench(tmp_path, schema, adapted(precision), 4, device=torch.device("cuda", 0), learner=EXACT)
        bench.run()
        bench.finish()
        bench.close()
    recorder.check()


def trainer_on(
    schema: Schema, model: nn.Module, device: torch.device, strategy: Strategy | None = None, **settings: Any
) -> Trainer:
    options = LearnerSettings.model_validate({**EXACT, **settings})
    parts = (model.to(device), Classification(), strategy or STRATEGIES["er"](), schema, options, device)
    return Trainer(*parts, choose_precision("fp32", device))


def learn(trainer: Trainer, schema: Schema, steps: int) -> None:
    for step in range(steps):
        new, old = (
            trainer.examples(fake_columns(schema, range(begin, begin + 16), label=[0, 1, 2]))
            for begin in (16 * step, 1000 + step)
        )
        assert trainer.step(new, [old]).finite


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_graph_replays_steps_of_adapters(schema: Schema, precision: str) -> None:
    found: list[dict[str, Tensor]] = []
    for graphs in (False, True):
        trainer = trainer_on(schema, adapted(precision), torch.device("cuda", 0), graphs=graphs)
        learn(trainer, schema, 10)
        if graphs:
            assert trainer._passes._graphs is not None
            assert not trainer._passes._graphs.refused
        found.append(dict(trained_state(trainer.model)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_base_takes_its_bytes_on_the_device_once(schema: Schema, precision: str) -> None:
    """Neither the optimizer nor a snapshot for a version copies what is frozen."""
    model = adapted(precision).cuda()
    base = sum(value.numel() * value.element_size() for value in base_state(model).values())
    trainer = trainer_on(schema, model, torch.device("cuda", 0), optimizer={"name": "adamw", "lr": 0.01})
    learn(trainer, schema, 2)
    kept = trainer.snapshot()
    assert sum(value.numel() * value.element_size() for value in kept.values()) < base
    assert not set(base_state(trainer.model)) & {name.removeprefix("model.") for name in trainer.optimizer_state()}


def sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["experts", "progressive"])
def test_parts_of_a_growing_model_learn_and_predict_on_a_device_as_on_the_cpu(
    schema: Schema, cuda: torch.device, strategy: str
) -> None:
    outputs, sizes = [], []
    x = torch.linspace(-1, 1, 30).reshape(10, 3)
    for device in (CPU, cuda):
        model = sequential().to(device)
        added = extended(small_strategy(strategy, least=1), model, schema, device)
        trainer = trainer_on(schema, model, device, added)
        for step in range(6):
            if step == 3:
                trainer.on_drift()
            columns = fake_columns(schema, range(16 * step, 16 * step + 16), label=[0, 1, 2])
            assert trainer.step(trainer.examples(columns)).finite
        sizes.append(parts_in(trained_state(model)))
        with torch.inference_mode():
            outputs.append(model.eval()(x.to(device)).cpu())
    assert sizes == [2, 2]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_learner_has_the_same_outputs_of_a_teacher_on_a_device_and_on_the_cpu(
    schema: Schema, tmp_path: Path, cuda: torch.device
) -> None:
    """The teacher runs on another stream while the steps go on."""
    steps, trained = 5, []
    for name, device in (("cpu", CPU), ("cuda", cuda)):
        (tmp_path / name).mkdir()
        torch.manual_seed(1)
        teacher = ModuleTeacher("the teacher", nn.Linear(3, 3).to(device), ["x"], (3,), Chunks(device))
        bench = LearnerBench(
            tmp_path / name, schema, sequential(), steps, device=device, learner=EXACT, teacher=teacher, distil=True
        )
        bench.stream.unlabelled = {0, 3}
        bench.run()
        bench.finish()
        assert bench.loop.state.steps == steps
        trained.append({key: value.cpu() for key, value in bench.trainer.snapshot().items()})
        bench.close()
    within = rtol(torch.float32, steps)
    torch.testing.assert_close(trained[1], trained[0], rtol=within, atol=within)


def test_streams_and_copies_of_a_learner_with_a_teacher_are_in_order(schema: Schema, tmp_path: Path) -> None:
    with CudaRecorder() as recorder:
        device = torch.device("cuda", 0)
        teacher = ModuleTeacher("the teacher", nn.Linear(3, 3).to(device), ["x"], (3,), Chunks(device))
        bench = LearnerBench(
            tmp_path, schema, sequential(), 4, device=device, learner=EXACT, teacher=teacher, distil=True
        )
        bench.run()
        bench.finish()
        bench.close()
    recorder.check()
