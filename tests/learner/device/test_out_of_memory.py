"""Less memory: micro-batches that halve when it runs out, activations that are computed again."""

import contextlib
import copy
import logging
import threading
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.core.backoff import Backoff
from anabranch.core.errors import SettingsError
from anabranch.core.failures import out_of_memory
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner import __main__ as program
from anabranch.learner.device import out_of_memory as handling
from anabranch.learner.device.out_of_memory import MemoryRetry, MemoryUse, halve_micro_batch, memory_error
from anabranch.learner.errors import MemoryShortageError
from anabranch.learner.evaluate.scoring import Scorer
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import Precision, choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.converters import Recomputation
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.replay import build
from anabranch.replay.build import build_store
from anabranch.replay.settings import ReplaySettings

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
GB = 10**9
OTHERS = MemoryUse(free=GB, limit=80 * GB, own=10 * GB)
"""Other processes have most of the device."""
FP32 = choose_precision("fp32", CPU)


class Narrow(nn.Module):
    """Throws dice, keeps statistics, and runs out of memory with more than so many events at once."""

    def __init__(self, most, error):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.most = most
        self.error = error

    def forward(self, x):
        output: torch.Tensor = self.body(x)
        if len(x) > self.most:
            raise self.error()
        return output


def kinds():
    return [
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    ]


class Failing(Narrow):
    """Runs out of memory in one of its passes."""

    def __init__(self, at):
        super().__init__(1000, kinds()[0])
        self.left = at

    def forward(self, x):
        self.left -= 1
        if not self.left:
            raise self.error()
        return super().forward(x)


def make_trainer(schema, model, strategy="none", precision=FP32, **settings):
    options = LearnerSettings.model_validate({"optimizer": {"name": "sgd", "lr": 0.1}, **settings})
    return Trainer(TrainingSetup(model, Classification(), STRATEGIES[strategy](), schema, options, CPU, precision))


def learn(trainer, schema, steps):
    for step in steps:
        columns = fake_columns(schema, range(step * 16, step * 16 + 16), label=[0, 1, 2])
        trainer.step(trainer.examples(columns))


@pytest.mark.parametrize("error", kinds())
def test_out_of_memory_halves_the_micro_batch_and_the_result_is_that_of_the_smaller_one(schema, error, caplog):
    small = make_trainer(schema, Narrow(16, error), micro_batch_size=4)
    torch.manual_seed(1)
    learn(small, schema, range(3))
    narrow = make_trainer(schema, Narrow(5, error))
    torch.manual_seed(1)
    with caplog.at_level(logging.ERROR):
        learn(narrow, schema, range(3))
    assert narrow.runner.micro_batch_size == 4
    assert narrow.warning is not None
    assert "learner.micro_batch_size = 4" in narrow.warning
    said = [record.getMessage() for record in caplog.records]
    assert [f"learner.micro_batch_size = {most}" in text for most, text in zip((8, 4), said, strict=True)] == [True] * 2
    expected = small.snapshot()
    assert all(torch.equal(value, expected[name]) for name, value in narrow.snapshot().items())


@pytest.mark.parametrize("at", [1, 2, 3])
def test_who_picks_old_events_does_so_again_in_smaller_parts_and_the_virtual_step_is_undone(schema, at):
    """The passes of MIR: old events before it, new ones for its gradient, old ones after it."""
    found = []
    for most, fails in ((10, 0), (None, at)):
        trainer = make_trainer(schema, Failing(fails), "mir", micro_batch_size=most)
        new, old = (
            trainer.examples(fake_columns(schema, range(begin, begin + n), label=[0, 1, 2]))
            for begin, n in ((0, 4), (50, 20))
        )
        torch.manual_seed(1)
        result = trainer.step(new, [old])
        assert result.finite
        assert trainer.runner.micro_batch_size == 10
        found.append(trainer.snapshot())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("precision", [FP32, Precision("fp16", torch.float16)], ids=lambda each: each.name)
def test_memory_that_runs_out_after_the_gradient_was_unscaled_halves_too(schema, precision, monkeypatch):
    """A-GEM makes copies of the gradient once all of it is there."""
    trainer, whole = (make_trainer(schema, nn.Linear(3, 3), "agem", precision) for _ in range(2))
    whole.model.load_state_dict(trainer.snapshot())
    for each in (trainer, whole):
        # So low that nothing overflows: at the limit of fp16 the two sums differ in who does.
        each.update.scaler.load_state_dict({**each.update.scaler.state_dict(), "scale": 64.0})
    adjust, errors = trainer.strategy.transform_gradients, [kinds()[0]()]

    def adjusted(scale):
        if errors:
            raise errors.pop()
        adjust(scale)

    monkeypatch.setattr(trainer.strategy, "transform_gradients", adjusted)
    examples = trainer.examples(fake_columns(schema, range(16), label=[0, 1, 2]))
    assert trainer.step(examples, [examples]).finite
    assert whole.step(examples, [examples]).finite
    assert not errors
    assert trainer.runner.micro_batch_size == 16
    assert trainer.update.scaler.state_dict() == whole.update.scaler.state_dict()
    torch.testing.assert_close(trainer.snapshot(), whole.snapshot(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("error", kinds())
def test_an_optimizer_whose_state_does_not_fit_is_named(schema, error, monkeypatch):
    def fail(*_, **__):
        raise error()

    trainer, whole = (make_trainer(schema, nn.Linear(3, 3), optimizer={"name": "adam"}) for _ in range(2))
    learn(whole, schema, [0])
    resumed = make_trainer(schema, nn.Linear(3, 3), optimizer={"name": "adam"})
    resumed.restore(whole.tensors(), whole.state())
    for each in (trainer, whole, resumed):
        monkeypatch.setattr(each.update.optimizer, "step", fail)
        monkeypatch.setattr(each.update._fused, "_kernel", fail)
    with pytest.raises(
        SettingsError, match=r"^learner.optimizer: cpu runs out of memory with what adam keeps"
    ) as raised:
        learn(trainer, schema, [0])
    assert str(error()) in str(raised.value)
    for each in (whole, resumed):  # which had room for them: others have taken it, and may give it back
        with pytest.raises(RuntimeError) as caught:
            learn(each, schema, [1])
        assert out_of_memory(caught.value)


def test_where_not_even_a_few_events_fit_one_sentence_says_so(schema):
    trainer = make_trainer(schema, Narrow(1, kinds()[0]))
    with pytest.raises(SettingsError, match=r"model.factory: cpu runs out of memory with 2 events at once"):
        learn(trainer, schema, [0])


@pytest.mark.parametrize("error", kinds())
def test_a_probe_that_does_not_fit_scores_in_smaller_parts(schema, error):
    columns = fake_columns(schema, range(16), label=[0, 1, 2])
    columns["weight"][:] = range(16)
    narrow, whole = make_trainer(schema, Narrow(5, error)), make_trainer(schema, Narrow(16, error))
    before = narrow.snapshot()
    rows, score = narrow.probe(narrow.examples(columns))
    assert (rows, score) == pytest.approx(whole.probe(whole.examples(columns)))
    assert narrow.runner.micro_batch_size == 4
    assert narrow.model.training
    assert all(torch.equal(value, before[name]) for name, value in narrow.snapshot().items())


def test_a_probe_is_cut_into_micro_batches_as_a_step_is(schema):
    trainer = make_trainer(schema, Narrow(4, kinds()[0]), micro_batch_size=4)
    assert trainer.probe(trainer.examples(fake_columns(schema, range(16), label=[0, 1, 2])))[0] == 16
    assert trainer.warning is None


@pytest.mark.parametrize("error", kinds())
def test_held_out_events_that_do_not_fit_are_scored_fewer_at_once(schema, error, caplog):
    columns = fake_columns(schema, range(50), label=[0, 1, 2])
    narrow, whole = Narrow(5, error), Narrow(50, error)
    scorer, other = (Scorer(model, Classification(), schema, CPU) for model in (narrow, whole))
    expected = other.score(whole.state_dict(), columns)
    for _ in range(2):
        assert np.array_equal(scorer.score(narrow.state_dict(), columns), expected)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["cpu ran out of memory: from now on 3 events are scored at once"]


def test_where_not_even_one_held_out_event_fits_the_error_is_raised(schema):
    model = Narrow(0, kinds()[0])
    scorer = Scorer(model, Classification(), schema, CPU)
    with pytest.raises(torch.OutOfMemoryError):
        scorer.score(model.state_dict(), fake_columns(schema, range(50), label=[0]))


def test_other_errors_are_not_out_of_memory(schema):
    trainer = make_trainer(schema, Narrow(1, lambda: RuntimeError("mat1 and mat2 shapes cannot be multiplied")))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        learn(trainer, schema, [0])
    assert trainer.runner.micro_batch_size is None


def test_what_the_allocator_of_the_cpu_says_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(caught.value)


def deep():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh())
    return nn.Sequential(nn.Linear(3, 8), block, nn.Linear(8, 3))


@pytest.mark.parametrize("which", [True, ["1"], ["1.0", "2"]])
def test_checkpointed_activations_change_neither_gradient_nor_statistics(schema, which):
    found = []
    for chosen in (False, which):
        trainer = make_trainer(schema, deep(), activation_checkpointing=chosen)
        torch.manual_seed(1)
        learn(trainer, schema, range(4))
        found.append(trainer.snapshot())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_checkpointed_module_keeps_less_and_a_copy_of_it_is_its_own():
    kept: list[int] = []

    def passes(model):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            model(torch.ones(64, 3)).sum()
        return sum(kept)

    plain, less = deep(), deep()
    Recomputation(["1"]).convert(less, ModelContext(CPU))
    assert passes(less) < passes(plain)
    other = copy.deepcopy(less)
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    assert other.eval()(torch.ones(2, 3)).abs().sum() == 0
    assert less.eval()(torch.ones(2, 3)).abs().sum() > 0


def test_a_graph_that_is_kept_may_be_gone_through_twice():
    model = deep()
    Recomputation(True).convert(model, ModelContext(CPU))
    loss = model(torch.ones(4, 3)).square().sum()
    found = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(once, again) for once, again in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("model", "which", "message"),
    [
        (nn.Linear(3, 3), True, "the model has no nn.Sequential"),
        (deep(), ["7"], 'the model has no module "7", but 0, 1, 1.0'),
    ],
)
def test_a_module_that_is_not_there_is_named(model, which, message):
    with pytest.raises(SettingsError, match=message):
        Recomputation(which).convert(model, ModelContext(CPU))


OF_TORCH = (
    "CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of 74.51 GiB of which 1.00 GiB is "
    "free. Including non-PyTorch memory, this process has {own} GiB memory in use."
)


@pytest.mark.parametrize(
    ("use", "message", "of_settings"),
    [
        (OTHERS, OF_TORCH.format(asked="2.00", own="9.50"), False),
        (OTHERS, OF_TORCH.format(asked="66.00", own="9.50"), True),  # more than the device has
        (OTHERS, OF_TORCH.format(asked="2.00", own="73.00"), True),  # what a pass had is released by now
        (OTHERS._replace(limit=11 * GB), OF_TORCH.format(asked="2.00", own="9.50"), True),  # its own limit
        (OTHERS._replace(own=79 * GB), OF_TORCH.format(asked="2.00", own="9.50"), True),
        (OTHERS, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", False),
        (None, OF_TORCH.format(asked="2.00", own="9.50"), False),
    ],
)
def test_memory_that_others_hold_is_no_error_of_the_settings(monkeypatch, use, message, of_settings):
    monkeypatch.setattr(handling, "memory_use", lambda _device: use)
    error = memory_error(CUDA, message, "take a smaller model", undone=True)
    assert isinstance(error, SettingsError) == of_settings
    assert message in str(error)
    if isinstance(error, MemoryShortageError):
        assert error.undone
        if use is not None:
            assert "1.00 GB are free, and this process has reserved 10.00 GB of the 80.00 GB" in str(error)
    assert isinstance(memory_error(CPU, message, "take a smaller model", undone=True), SettingsError)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pass_of_two_events_that_does_not_fit_for_now_can_be_repeated_where_no_rank_waits(monkeypatch, ranks):
    monkeypatch.setattr(handling, "memory_use", lambda _device: OTHERS)
    with pytest.raises(MemoryShortageError) as raised:
        halve_micro_batch(16, 2, CUDA, ranks, OF_TORCH.format(asked="2.00", own="9.50"))
    assert raised.value.undone == (ranks == 1)


@pytest.fixture
def shared(monkeypatch):
    """Other processes use the memory of every device, and retries follow at once."""
    monkeypatch.setattr(handling, "is_shared", lambda _device: True)
    monkeypatch.setattr(handling, "memory_use", lambda _device: OTHERS)
    monkeypatch.setattr(handling, "_BACKOFF", Backoff(timedelta(seconds=0.02), timedelta(seconds=0.02)))
    monkeypatch.setattr(handling, "_POLL_SECONDS", 0.001)


@pytest.mark.usefixtures("shared")
def test_a_step_that_memory_was_too_short_for_has_changed_nothing(schema):
    error = kinds()[0]
    narrow, wide = make_trainer(schema, Narrow(1, error)), make_trainer(schema, Narrow(16, error))
    torch.manual_seed(1)
    with pytest.raises(MemoryShortageError) as raised:
        learn(narrow, schema, [0])
    assert raised.value.undone
    assert (narrow.runner.micro_batch_size, narrow.warning) == (None, None), (
        "a moment's shortage makes no later step smaller"
    )
    assert isinstance(narrow.model, Narrow)
    narrow.model.most = 16
    learn(narrow, schema, [0])
    torch.manual_seed(1)
    learn(wide, schema, [0])
    expected = wide.snapshot()
    assert all(torch.equal(value, expected[name]) for name, value in narrow.snapshot().items())


@pytest.mark.usefixtures("shared")
def test_an_optimizer_whose_state_does_not_fit_for_now_ends_the_process_without_blame(schema, monkeypatch):
    def fail(*_, **__):
        raise kinds()[0]()

    trainer = make_trainer(schema, nn.Linear(3, 3), optimizer={"name": "adam"})
    monkeypatch.setattr(trainer.update.optimizer, "step", fail)
    with pytest.raises(MemoryShortageError) as raised:
        learn(trainer, schema, [0])
    assert not raised.value.undone, "some weights may have changed"


class Scarce:
    """Work that runs out of memory so many times."""

    def __init__(self, times, error):
        self.left, self.error, self.calls = times, error, 0

    def __call__(self):
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error()
        return "done"


def oom():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")


@pytest.mark.usefixtures("shared")
def test_work_that_runs_out_of_memory_is_repeated_while_the_learner_reports():
    waiting: list[str | None] = []
    retry = MemoryRetry(CPU, threading.Event(), [lambda: waiting.append(retry.waiting)])
    assert retry(Scarce(3, oom)) == "done"
    assert set(waiting) == {"waits for memory of cpu: CUDA out of memory. Tried to allocate 2.00 MiB"}
    assert retry.waiting is None
    assert retry(Scarce(1, lambda: MemoryShortageError("short", undone=True)), repeatable=False) == "done"


@pytest.mark.usefixtures("shared")
def test_work_is_repeated_a_few_times_and_then_a_sentence_names_what_is_known():
    work = Scarce(100, oom)
    with pytest.raises(MemoryShortageError, match=r"^cpu has too little memory: 1.00 GB are free") as raised:
        MemoryRetry(CPU, threading.Event())(work, undone=False)
    assert 2 < work.calls < 20
    assert not raised.value.undone


@pytest.mark.usefixtures("shared")
def test_a_stop_ends_the_wait(monkeypatch):
    monkeypatch.setattr(handling, "_BACKOFF", Backoff(timedelta(hours=1), timedelta(hours=1)))
    stop, work = threading.Event(), Scarce(100, oom)
    with pytest.raises(MemoryShortageError):
        MemoryRetry(CPU, stop, [stop.set])(work)
    assert work.calls == 2


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("error", "repeatable"),
    [
        (lambda: RuntimeError("shapes cannot be multiplied"), True),
        (lambda: SettingsError("no such module"), True),
        (oom, False),
        (lambda: MemoryShortageError("short", undone=False), False),
    ],
)
def test_work_with_another_error_or_with_effects_is_not_repeated(error, repeatable):
    work = Scarce(1, error)
    with pytest.raises(type(error())):
        MemoryRetry(CPU, threading.Event())(work, repeatable=repeatable)
    assert work.calls == 1


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("of_settings", [False, True])
def test_a_memory_tier_that_does_not_fit_at_the_start_is_tried_again_unless_it_never_will(
    schema, tmp_path, monkeypatch, of_settings
):
    made, tier = [0], build.MemoryTier

    def make(*given, **options):
        made[0] += 1
        if made[0] <= 2:
            raise oom()
        return tier(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "MemoryTier", make)
    if of_settings:
        monkeypatch.setattr(handling, "memory_use", lambda _device: OTHERS._replace(own=80 * GB))
    settings = ReplaySettings.model_validate({"disk": {"bytes": "1MB"}, "capacity": 100})
    ends = pytest.raises(SettingsError, match="do not fit on") if of_settings else contextlib.nullcontext()
    with ends:
        store = MemoryRetry(CPU, threading.Event())(lambda: build_store(settings, schema, CPU, 0, tmp_path))
        store.close()
    assert made[0] == (1 if of_settings else 3)


def test_a_shortage_ends_the_process_with_code_1_and_a_stop_meanwhile_with_none(caplog):
    stop = threading.Event()
    with pytest.raises(SystemExit) as ended, program._shortage_ends(stop):
        raise MemoryShortageError("cuda has too little memory", undone=True)
    assert ended.value.code == 1
    assert "cuda has too little memory" in caplog.text
    stop.set()
    with program._shortage_ends(stop):
        raise MemoryShortageError("cuda has too little memory", undone=True)
