"""A step against a plain PyTorch loop, bit for bit, and what happens when numbers are not finite."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from anabranch.core.errors import SettingsError
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.errors import CheckpointError
from anabranch.learner.model.device import Precision, choose_device, choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.examples import Transfer, examples_of
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Examples, Trainer
from anabranch.replay.reservoir.event_table import RECORD
from anabranch.replay.sample_plan import Sample
from anabranch.testing.strategies import extended
from tests import forkserver
from tests.support.strategies import small_strategy

CPU = torch.device("cpu")


def make_trainer(schema, model, strategy="er", **settings):
    options = LearnerSettings.model_validate({"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, **settings})
    precision = choose_precision(options.precision, CPU)
    kind = extended(small_strategy(strategy), model, schema)
    embedding = Embedding(model, "2") if kind.kind.embeds else None
    return Trainer(TrainingSetup(model, Classification(), kind, schema, options, CPU, precision, embedding))


def sgd(lr):
    return {"name": "sgd", "lr": lr, "momentum": 0.9}


def as_sample(columns):
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    n = len(columns["label"])
    return Sample(tensors, tensors["weight"], np.arange(n, dtype=np.int32), np.zeros(n, RECORD))


def test_a_step_is_the_plain_pytorch_step_bit_for_bit(schema, make_model):
    trainer = make_trainer(schema, make_model(), max_grad_norm=0.5)
    plain = make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, fused=True)
    for step in range(20):
        new = trainer.examples(fake_columns(schema, range(step * 8, step * 8 + 8), label=[0, 1, 2]))
        sampled = fake_columns(schema, range(100 + step, 104 + step), label=[2, 1])
        old = examples_of(as_sample(sampled), (4,)) if step else []
        result = trainer.step(new, old)

        x = torch.cat([each.features["x"] for each in (new, *old)])
        y = torch.cat([each.label_B for each in (new, *old)])
        optimizer.zero_grad()
        output = plain(x)
        loss = functional.cross_entropy(output, y, reduction="none").sum() / len(y)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        assert result.finite
        assert result.loss == loss.item()
        assert result.score == (output[:8].argmax(1) == new.label_B).sum().item()
        assert result.loss_new == functional.cross_entropy(output[:8], new.label_B, reduction="none").sum().item()
    for name, value in trainer.snapshot().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_a_probe_scores_as_in_evaluation_and_leaves_everything_as_it_was(schema, make_model):
    trainer = make_trainer(schema, make_model())
    trainer.step(trainer.examples(fake_columns(schema, range(8), label=[0, 1, 2])))
    before = trainer.snapshot()
    columns = fake_columns(schema, range(20), label=[0, 1, 2])
    columns["labelled"][::4] = False
    old = examples_of(as_sample(columns), (20,))[0]
    rows, score = trainer.probe(old)
    trainer.model.eval()
    right = (trainer.model(old.features["x"]).argmax(1) == old.label_B).float()
    trainer.model.train()
    assert rows == 15
    assert score == pytest.approx((right * old.weight_B).sum().item())
    assert trainer.model.training
    assert all(torch.equal(value, before[name]) for name, value in trainer.snapshot().items())


def test_the_learning_rate_is_scaled_from_that_of_the_config(schema, make_model):
    new = fake_columns(schema, range(8), label=[0, 1, 2])
    scaled, twice = make_trainer(schema, make_model()), make_trainer(schema, make_model(), optimizer=sgd(0.2))
    scaled.update.schedule.scale = 3.0
    scaled.update.schedule.scale = 2.0
    scaled.step(scaled.examples(new))
    twice.step(twice.examples(new))
    assert all(torch.equal(value, twice.snapshot()[name]) for name, value in scaled.snapshot().items())


def test_a_virtual_step_has_the_learning_rate_of_its_step_also_after_a_restart(schema, make_model):
    def make():
        return make_trainer(schema, make_model(), "mir", schedule={"warmup_steps": 10}, optimizer=sgd(1.0))

    def rates(trainer, steps):
        pick, found = trainer.strategy.select, []

        def picked(forward, new, old):
            found.append(trainer.update.rate())
            return pick(forward, new, old)

        trainer.strategy.select = picked  # type: ignore[method-assign]
        examples = trainer.examples(fake_columns(schema, range(16), label=[0, 1]))
        for _ in range(steps):
            trainer.step(examples, [examples])
        return found

    whole, resumed = make(), make()
    assert rates(whole, 3) == pytest.approx([0.1, 0.2, 0.3])
    resumed.restore(whole.tensors(), whole.state())
    assert rates(resumed, 2) == pytest.approx([0.4, 0.5])


def test_a_checkpoint_made_while_the_learning_rate_was_raised_does_not_keep_it(schema, make_model):
    trainer = make_trainer(schema, make_model(), optimizer=sgd(0.1))
    trainer.update.schedule.scale = 3.0
    tensors, state = trainer.tensors(), trainer.state()
    for resumed in (trainer, make_trainer(schema, make_model(), optimizer=sgd(0.1))):
        resumed.restore(tensors, state)
        assert [group["lr"] for group in resumed.state()["groups"]] == [0.1]


def test_the_weight_of_an_event_is_its_share_of_the_loss(schema, make_model):
    trainer = make_trainer(schema, make_model(), "none", max_grad_norm=math.inf)
    columns = fake_columns(schema, range(4), label=[0, 1])
    columns["weight"][:] = [1, 0, 3, 0]
    x, y = torch.from_numpy(columns["feature.x"]), torch.from_numpy(columns["label"])
    losses = functional.cross_entropy(make_model()(x), y, reduction="none")
    expected = (losses[0] + 3 * losses[2]) / 4
    assert trainer.step(trainer.examples(columns)).loss == pytest.approx(expected.item(), rel=1e-6)


def test_rehearsed_events_without_a_label_add_nothing_to_the_loss(schema, make_model):
    sampled = fake_columns(schema, range(10, 16), label=[2])
    results = []
    for count in (3, 6):
        trainer = make_trainer(schema, nn.Linear(3, 3))
        torch.nn.init.ones_(trainer.model.weight)  # type: ignore[arg-type]
        torch.nn.init.zeros_(trainer.model.bias)  # type: ignore[arg-type]
        columns = {name: column[:count].copy() for name, column in sampled.items()}
        columns["labelled"][3:] = False
        columns["label"][3:] = -1
        new = trainer.examples(fake_columns(schema, range(4)))
        results.append(trainer.step(new, examples_of(as_sample(columns), (6,))).loss)
    assert results[0] == pytest.approx(results[1], rel=1e-6)


@pytest.mark.parametrize(("came", "dealt"), [(8, [4, 4]), (5, [2, 3]), (2, [1, 1]), (1, [])])
def test_the_events_of_a_sample_are_dealt_among_those_that_the_strategy_asks_for(schema, make_model, came, dealt):
    trainer = make_trainer(schema, make_model(), "der++")
    sampled = as_sample(fake_columns(schema, range(came)))
    assert [len(each) for each in examples_of(sampled, trainer.strategy.samples(4))] == dealt


@pytest.mark.parametrize("poison", [math.inf, 1e38])
def test_a_step_that_is_not_finite_leaves_weights_and_statistics_as_they_were(schema, make_model, poison):
    trainer = make_trainer(schema, make_model())
    good = trainer.examples(fake_columns(schema, range(8), label=[0, 1, 2]))
    trainer.step(good)
    before = trainer.snapshot()
    x = good.features["x"].clone()
    x[3] = poison
    result = trainer.step(Examples({"x": x}, good.label_B, good.weight_B))
    assert not result.finite
    for name, value in trainer.snapshot().items():
        assert torch.equal(value, before[name]), name
    assert trainer.step(good).finite


def test_a_lone_event_is_learned_also_with_batch_norm(schema, make_model):
    for strategy in STRATEGIES.keys() - {"progressive"}:  # its model has no batch norm
        trainer = make_trainer(schema, make_model(), strategy)
        result = trainer.step(trainer.examples(fake_columns(schema, [7], label=[1])))
        assert result.finite
        assert result.score in (0.0, 1.0)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"name": "rmsprop", "lr": 0.1}, "the checkpoint is of sgd with momentum, and learner.optimizer is rmsprop"),
        ({"name": "sgd", "lr": 0.1}, "the checkpoint is of sgd with momentum, and learner.optimizer is sgd"),
    ],
)
def test_a_checkpoint_of_another_optimizer_is_refused(schema, make_model, changed, sentence):
    trainer = make_trainer(schema, make_model())
    trainer.step(trainer.examples(fake_columns(schema, range(8), label=[0, 1, 2])))
    with pytest.raises(CheckpointError, match=sentence):
        make_trainer(schema, make_model(), optimizer=changed).restore(trainer.tensors(), trainer.state())


def test_a_checkpoint_of_another_model_is_refused_with_the_first_weight_that_does_not_fit(schema):
    small, wide = (make_trainer(schema, nn.Sequential(nn.Linear(4, n), nn.Linear(n, 3))) for n in (2, 8))
    with pytest.raises(CheckpointError, match=r"moving the checkpoints away: size mismatch for 0.weight: .*") as caught:
        wide.restore(small.tensors(), small.state())
    assert str(caught.value).count("size mismatch") == 1


def test_a_checkpoint_of_fp32_goes_on_in_fp16(schema, make_model):
    trainer = make_trainer(schema, make_model())
    good = trainer.examples(fake_columns(schema, range(8), label=[0, 1, 2]))
    trainer.step(good)
    options = LearnerSettings.model_validate({"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}})
    half = Trainer(
        TrainingSetup(
            make_model(), Classification(), STRATEGIES["er"](), schema, options, CPU, Precision("fp16", torch.float16)
        )
    )
    half.restore(trainer.tensors(), trainer.state())
    assert half.step(good).finite


class Odd(nn.Linear):
    """Has a mask of minus infinity, and statistics that it rebinds."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("mask", torch.full((3,), -math.inf))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().forward(x - self.mean.detach())


def test_buffers_may_be_infinite_or_rebound(schema):
    trainer = make_trainer(schema, Odd())
    good = trainer.examples(fake_columns(schema, range(8), label=[0, 1, 2]))
    assert trainer.step(good).finite
    before = trainer.snapshot()
    x = torch.full_like(good.features["x"], math.inf)
    assert not trainer.step(Examples({"x": x}, good.label_B, good.weight_B)).finite
    assert all(torch.equal(value, before[name]) for name, value in trainer.snapshot().items())
    assert trainer.step(good).finite


def test_poison_does_not_use_up_the_loss_scale(schema, make_model):
    """fp16 on a CPU computes in fp16 all the same; the setting refuses it only because it is slow there."""
    options = LearnerSettings.model_validate({"optimizer": {"name": "sgd", "lr": 0.1}})
    trainer = Trainer(
        TrainingSetup(
            make_model(), Classification(), STRATEGIES["none"](), schema, options, CPU, Precision("fp16", torch.float16)
        )
    )
    good = trainer.examples(fake_columns(schema, range(8), label=[0, 1, 2]))
    poison = Examples({"x": torch.full_like(good.features["x"], 6e4)}, good.label_B, good.weight_B * 1e30)
    for _ in range(20):
        trainer.step(poison)
    assert trainer.update.scaler.get_scale() >= 1
    assert trainer.step(good).finite


def test_a_checkpoint_keeps_the_loss_scale(schema, make_model):
    def make():
        options = LearnerSettings.model_validate({"optimizer": sgd(0.1)})
        return Trainer(
            TrainingSetup(
                make_model(),
                Classification(),
                STRATEGIES["none"](),
                schema,
                options,
                CPU,
                Precision("fp16", torch.float16),
            )
        )

    first, second = make(), make()
    good = first.examples(fake_columns(schema, range(8), label=[0, 1, 2]))
    loud = Examples({"x": good.features["x"] * 100}, good.label_B, good.weight_B)
    assert first.step(loud).finite
    assert first.step(good).finite
    scaler = first.state()["scaler"]
    assert scaler["_growth_tracker"] > 0
    first.update.scaler.update(128.0)
    second.restore(first.tensors(), first.state())
    assert second.update.scaler.get_scale() == 128
    for trainer in (first, second):
        trainer.step(good)
    assert all(torch.equal(value, second.snapshot()[name]) for name, value in first.snapshot().items())


def test_a_snapshot_is_not_changed_by_later_steps(schema, make_model):
    trainer = make_trainer(schema, make_model())
    before = trainer.snapshot()
    copied = {name: value.clone() for name, value in before.items()}
    trainer.step(trainer.examples(fake_columns(schema, range(8))))
    assert all(torch.equal(before[name], copied[name]) for name in before)
    assert any(not torch.equal(before[name], value) for name, value in trainer.snapshot().items())


def test_bf16_learns_a_separable_stream(schema, make_model):
    trainer = make_trainer(schema, make_model(), precision="bf16")
    score = 0.0
    for step in range(150):
        columns = fake_columns(schema, range(step * 12, step * 12 + 12), label=[0, 1, 2])
        columns["feature.x"][:] = torch.eye(3)[torch.from_numpy(columns["label"])].numpy()
        score = trainer.step(trainer.examples(columns)).score
    assert score == 12


class TestSettings:
    @pytest.mark.parametrize("name", ["fp8", "fp16", "tf32"])
    def test_what_needs_cuda_is_refused_without(self, name):
        with pytest.raises(SettingsError, match=rf'learner.precision = "{name}" needs a CUDA device'):
            choose_precision(name, CPU)

    @pytest.mark.parametrize(("name", "capability"), [("tf32", (8, 0)), ("fp8", (8, 9))])
    def test_a_device_that_is_too_old_is_refused(self, name, capability, monkeypatch):
        cuda, has = torch.device("cuda"), [capability]
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: has[0])
        assert choose_precision(name, cuda).dtype is {"tf32": None, "fp8": torch.bfloat16}[name]
        has[0] = (7, 5)
        sentence = rf'precision = "{name}" needs compute capability 8\.\d, which cuda lacks'
        with pytest.raises(SettingsError, match=sentence):
            choose_precision(name, cuda)

    @pytest.mark.process
    def test_tf32_sets_the_flags_of_its_process_and_other_precisions_none(self):
        code = (
            "import torch, warnings; from anabranch.learner.model.device import Precision\n"
            "warnings.simplefilter('error')\n"
            "def flags(): return (torch.backends.cuda.matmul.fp32_precision, torch.get_float32_matmul_precision())\n"
            "before = flags()\n"
            "Precision('fp32', None).configure(); Precision('bf16', torch.bfloat16).configure()\n"
            "assert flags() == before, flags()\n"
            "Precision('tf32', None).configure(); print(*flags(), torch.backends.cudnn.conv.fp32_precision)"
        )
        done = forkserver.run(["-c", code])
        assert done.stdout.split() == ["tf32", "high", "tf32"], done.stderr

    def test_auto_is_fp32_on_a_cpu(self):
        assert choose_precision("auto", CPU).dtype is None

    def test_a_device_that_is_not_there_is_refused(self):
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
        with pytest.raises(SettingsError, match=r'learner.device = "cuda:7"'):
            choose_device("cuda:7")

    @pytest.mark.parametrize(
        ("optimizer", "message"),
        [
            ({"name": "adamw", "lr": 1e-3, "momentum": 0.9}, "adamw has no 'momentum'; it takes lr, betas"),
            ({"name": "adamw", "lr": 1e-3, "betas": [2, 3]}, "adamw refuses"),
        ],
    )
    def test_an_optimizer_argument_that_does_not_fit_is_named(self, schema, make_model, optimizer, message):
        with pytest.raises(SettingsError, match=message):
            make_trainer(schema, make_model(), optimizer=optimizer)

    def test_a_model_without_parameters_is_refused(self, schema):
        with pytest.raises(SettingsError, match="no parameters"):
            make_trainer(schema, nn.Identity())


@pytest.mark.gpu
def test_columns_come_to_the_gpu_as_they_were_when_they_were_given():
    transfer = Transfer((), torch.device("cuda")).copy
    column = np.arange(1 << 20, dtype=np.float32)
    (there,) = transfer([column])
    column[:] = 0
    assert torch.equal(there.cpu(), torch.arange(1 << 20, dtype=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_learns_a_separable_stream(schema, make_model, precision):
    cuda = torch.device("cuda")
    options = LearnerSettings.model_validate({"precision": precision, "optimizer": {"name": "adamw", "lr": 1e-2}})
    trainer = Trainer(
        TrainingSetup(
            make_model().to(cuda),
            Classification(),
            STRATEGIES["er"](),
            schema,
            options,
            cuda,
            choose_precision(precision, cuda),
        )
    )
    score = 0.0
    for step in range(300):
        columns = fake_columns(schema, range(step * 12, step * 12 + 12), label=[0, 1, 2])
        columns["feature.x"][:] = torch.eye(3)[torch.from_numpy(columns["label"])].numpy()
        result = trainer.step(trainer.examples(columns))
        assert result.finite
        score = result.score
    assert score == 12


@pytest.mark.gpu
def test_a_gpu_has_half_precision_by_itself():
    assert choose_precision("auto", torch.device("cuda")).name in {"bf16", "fp16"}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # what the compiler recommends
def test_what_is_compiled_learns_on_a_gpu_what_it_learns_as_it_is(schema, make_model, caplog):
    cuda, losses = torch.device("cuda"), []
    for compile_ in (False, True):
        options = LearnerSettings.model_validate({"compile": compile_, "optimizer": {"name": "sgd", "lr": 0.1}})
        parts = (make_model().to(cuda), Classification(), STRATEGIES["er"](), schema, options, cuda)
        columns = fake_columns(schema, range(12), label=[0, 1, 2])
        with torch._dynamo.config.patch(suppress_errors=False):  # which monkeypatch cannot set back
            trainer = Trainer(TrainingSetup(*parts, choose_precision("fp32", cuda)))
            losses.append([trainer.step(trainer.examples(columns)).loss for _ in range(5)])
    torch._dynamo.reset()
    assert "compiling fails" not in caplog.text
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.gpu
def test_a_gpu_that_is_out_of_memory_takes_the_step_in_smaller_parts(schema, make_model, caplog):
    """More than eight events at once need more memory than there is."""
    cuda = torch.device("cuda")
    torch.cuda.empty_cache()

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_model()
            self.share = torch.cuda.mem_get_info()[0] // 9

        def forward(self, x):
            torch.empty(len(x) * self.share, dtype=torch.uint8, device=x.device)
            output: torch.Tensor = self.body(x)
            return output

    options = LearnerSettings.model_validate({"optimizer": {"name": "sgd", "lr": 0.1}})
    parts = (Large().to(cuda), Classification(), STRATEGIES["none"](), schema, options, cuda)
    trainer = Trainer(TrainingSetup(*parts, choose_precision("fp32", cuda)))
    new = trainer.examples(fake_columns(schema, range(12), label=[0, 1, 2]))
    assert [trainer.step(new).finite for _ in range(3)] == [True] * 3
    torch.cuda.empty_cache()
    assert trainer.runner.micro_batch_size == 6
    assert caplog.text.count("ran out of memory") == 1
