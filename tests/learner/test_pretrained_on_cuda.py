"""Adapters, frozen layers in fewer bits, experts and teachers on a CUDA device, or on that of the recorder."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.evaluate.chunks import Chunks
from anabranch.learner.extensions.teacher.opening import ModuleTeacher
from anabranch.learner.model.adapter import Adapter
from anabranch.learner.model.base_precision import Nf4Embedding, Nf4Linear
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.growing.pool import parts_in
from anabranch.learner.model.task import Classification
from anabranch.learner.model.trained_set import base_state, decide_trained_set, trained_state, write_base
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import AdapterSettings
from anabranch.learner.state_dir.bases import Bases
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended
from tests.learner.learner_bench import CPU, LearnerBench
from tests.support.cuda_recorder import CudaRecorder
from tests.support.gpu import rtol
from tests.support.strategies import small_strategy

EXACT: dict[str, Any] = {"precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.1}}
pytestmark = pytest.mark.usefixtures("packages_of_pretrained")
PRECISIONS = ["fp32", "bf16", "nf4"]


def adapted(precision):
    pytest.importorskip("peft")
    if precision == "nf4":
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    settings = {"rank": 2, "train": ["4"], "base_precision": precision}
    model = Adapter(AdapterSettings.model_validate(settings)).convert(model, ModelContext(torch.device("cpu")))
    decide_trained_set(model)
    return model


@pytest.mark.parametrize("rows", [1, 3, 40], ids=["one", "few", "many"])
@pytest.mark.parametrize("shape", [(32, 64), (8, 300), (64, 64)], ids=str)
def test_kernels_of_four_bits_compute_on_a_device_what_they_do_on_the_cpu(cuda, shape, rows):
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


def test_an_embedding_of_four_bits_returns_the_same_rows(cuda):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    words = Nf4Embedding(nn.Embedding(50, 128))
    tokens = torch.randint(0, 50, (3, 7))
    found = copy.deepcopy(words).to(cuda)(tokens.to(cuda)).cpu()
    torch.testing.assert_close(found, words(tokens), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_learner_trains_adapters_on_a_device_as_on_the_cpu(schema, tmp_path, cuda, precision):
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
def test_a_learner_with_adapters_goes_on_from_its_checkpoint_on_a_device(schema, tmp_path, cuda, precision):
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
def test_streams_and_copies_of_a_learner_with_adapters_are_in_order(schema, tmp_path, precision):
    with CudaRecorder() as recorder:
        bench = LearnerBench(tmp_path, schema, adapted(precision), 4, device=torch.device("cuda", 0), learner=EXACT)
        bench.run()
        bench.finish()
        bench.close()
    recorder.check()


def trainer_on(schema, model, device, strategy=None, graphs=False, **settings):
    options = LearnerSettings.model_validate({**EXACT, **settings})
    parts = (model.to(device), Classification(), strategy or STRATEGIES["er"](), schema, options, device)
    return Trainer(TrainingSetup(*parts, choose_precision("fp32", device), graphs=graphs))


def learn(trainer, schema, steps):
    for step in range(steps):
        new, old = (
            trainer.examples(fake_columns(schema, range(begin, begin + 16), label=[0, 1, 2]))
            for begin in (16 * step, 1000 + step)
        )
        assert trainer.step(new, [old]).finite


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_graph_replays_steps_of_adapters(schema, precision):
    found: list[dict[str, Tensor]] = []
    for graphs in (False, True):
        trainer = trainer_on(schema, adapted(precision), torch.device("cuda", 0), graphs=graphs)
        learn(trainer, schema, 10)
        if graphs:
            assert trainer.runner.graphs is not None
            assert (trainer.runner.graphs.recorded, trainer.runner.graphs.refused) == (1, None)
        found.append(dict(trained_state(trainer.model)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_base_takes_its_bytes_on_the_device_once(schema, precision):
    """Neither the optimizer nor a snapshot for a version copies what is frozen."""
    model = adapted(precision).cuda()
    base = sum(value.numel() * value.element_size() for value in base_state(model).values())
    trainer = trainer_on(schema, model, torch.device("cuda", 0), optimizer={"name": "adamw", "lr": 0.01})
    learn(trainer, schema, 2)
    kept = trainer.snapshot()
    assert sum(value.numel() * value.element_size() for value in kept.values()) < base
    assert not set(base_state(trainer.model)) & {name.removeprefix("model.") for name in trainer.tensors()["optimizer"]}


def sequential():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["experts", "progressive"])
def test_parts_of_a_growing_model_learn_and_predict_on_a_device_as_on_the_cpu(schema, cuda, strategy):
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
def test_a_learner_has_the_same_outputs_of_a_teacher_on_a_device_and_on_the_cpu(schema, tmp_path, cuda):
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


def test_streams_and_copies_of_a_learner_with_a_teacher_are_in_order(schema, tmp_path):
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
