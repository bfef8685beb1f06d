"""Steps by CUDA graphs, on a CPU under the recorder, whose graphs repeat operations and no Python."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.device import Precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.compatibility import conflicts
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.graph_trial import choose_graphs, try_graphs
from anabranch.learner.train.micro_batches import StepHooks
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.step_graphs import RoundEvents
from anabranch.learner.train.trainer import Trainer
from tests.learner.learner_spec import learner_spec
from tests.support.cuda_recorder import CudaRecorder, FakeGraph
from tests.support.facts import facts_of

CUDA = torch.device("cuda", 0)
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
KINDS = ["none", "er", "der", "der++"]  # the one_hot of er-ace reads its labels on a CPU, and not on a CUDA device


def plain_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))


def setup_of(schema, model, *, strategy="er", graphs=True, precision="fp32", device=CUDA, **settings):
    given = {"optimizer": {"name": "adamw", "lr": 0.01}, "batch_size": 16, **settings}
    options = LearnerSettings.model_validate(given)
    chosen = Precision(precision, PRECISIONS[precision])
    kind = STRATEGIES[strategy]()
    return TrainingSetup(
        model.to(device), Classification(), kind, schema, options, device, chosen, output_shape=(3,), graphs=graphs
    )


def events(trainer, schema, step, rows=16):
    begins = [(16 * step, rows), *((1000 + step, n) for n in trainer.strategy.samples(rows))]
    new, *old = (trainer.examples(fake_columns(schema, range(at, at + n), label=[0, 1, 2])) for at, n in begins)
    if trainer.strategy.kind.keeps_output:
        outputs = (torch.linspace(-1, 1, 3 * len(each)).reshape(-1, 3).to(trainer.device) for each in old)
        old = [replace(each, output_B=output) for each, output in zip(old, outputs, strict=True)]
    return new, old


def learn(trainer, schema, sizes, poison=()):
    torch.manual_seed(1)
    results = []
    for step, rows in enumerate(sizes):
        new, old = events(trainer, schema, step, rows)
        if step in poison:
            new.weight_B[0] = torch.nan
        results.append(trainer.step(new, old))
    return results


def plain_of(result):
    return result.finite, result.loss, result.score, result.loss_new, result.replayed, result.rows


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def on_device(schema, sizes, poison=(), **given):
    """Return the results of steps, what they have learned, and the trainer."""
    with CudaRecorder() as cuda:
        trainer = Trainer(setup_of(schema, plain_model(), **given))
        results = learn(trainer, schema, sizes, poison)
        learned = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        state = {name: value.clone() for name, value in trainer.update.tensors()[0].items()}
    cuda.check()
    return results, {**learned, **state}, trainer


@pytest.mark.slow
@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_by_graphs_are_the_plain_ones_bit_for_bit(schema, strategy, precision):
    sizes = [16] * 6 + [9] + [16] * 2 + [12] * 5
    given = {"strategy": strategy, "precision": precision}
    expected, learned, _ = on_device(schema, sizes, (10, 12), graphs=False, **given)
    results, found, trainer = on_device(schema, sizes, (10, 12), **given)
    assert (trainer.runner.graphs.recorded, trainer.runner.graphs.refused) == (2, None)
    same(found, learned)
    assert [each.finite for each in results] == [step not in {10, 12} for step in range(len(sizes))]
    for one, other in zip(results, expected, strict=True):
        same(plain_of(one), plain_of(other))
        same((one.output_B, one.old_R), (other.output_B, other.old_R))


def test_the_steps_of_a_round_are_those_taken_one_by_one(schema):
    """Also with one that is not finite between the others, and where their memory holds fewer of them at once."""
    _, learned, single = on_device(schema, [16] * 10, (5,))
    assert single.runner.graphs.recorded == 1
    with CudaRecorder() as cuda:
        trainer = Trainer(setup_of(schema, plain_model()))
        learn(trainer, schema, [16] * 3)
        parts = [events(trainer, schema, step) for step in range(3, 10)]
        parts[2][0].weight_B[0] = torch.nan
        joined = []
        for column in ([new for new, _ in parts], [old[0] for _, old in parts]):
            tensors = [iter([*each.features.values(), each.label_B, each.weight_B]) for each in column[1:]]
            joined.append(column[0].map(lambda value, rest=tensors: torch.cat([value, *(next(one) for one in rest)])))
        new, old = joined
        trainer.runner.graphs._blocks.new_rows = 40  # two steps of 16
        begin, before = len(cuda.log), cuda.waits.total()
        results = trainer.steps(RoundEvents(new, old, [(16, 16)] * 7))
        kinds = Counter(each.kind for each in cuda.log[begin:])
        assert (kinds["launch"], kinds["wait"], kinds["copy"]) == (7, 1, 1), kinds
        assert cuda.waits.total() == before + 1
        assert [each.finite for each in results] == [True] * 2 + [False] + [True] * 4
        found = {**trainer.model.state_dict(), **trainer.update.tensors()[0]}
        assert trainer.update.state(trainer._steps)["schedule"]["step"] == 10
    cuda.check()
    same(found, learned)


def test_device_sharing_is_asked_before_each_launch(schema):
    with CudaRecorder():
        asked = []
        trainer = Trainer(setup_of(schema, plain_model()), hooks=StepHooks(asked.append))
        learn(trainer, schema, [16] * 7)
        assert trainer.runner.graphs.recorded == 1
    assert asked == [0] * 7


def test_another_learning_rate_is_another_graph_and_few_are_kept(schema):
    """A learning rate is a constant of a graph: while it changes in each step, none is recorded."""
    sizes = [16] * 14
    expected, learned, _ = on_device(schema, sizes, graphs=False, schedule={"warmup_steps": 8})
    results, found, trainer = on_device(schema, sizes, schedule={"warmup_steps": 8})
    assert trainer.runner.graphs.recorded == 1
    same(found, learned)
    same([*map(plain_of, results)], [*map(plain_of, expected)])
    _, _, trainer = on_device(schema, [rows for rows in range(4, 12) for _ in range(5)], strategy="none")
    assert trainer.runner.graphs.recorded == 8
    assert len(trainer.runner.graphs._graphs) == 4


def test_a_checkpoint_that_is_restored_is_what_later_steps_start_from(schema):
    with CudaRecorder():
        trainer = Trainer(setup_of(schema, plain_model()))
        learn(trainer, schema, [16] * 4)
        tensors, state = trainer.tensors(), trainer.state()
        first = learn(trainer, schema, [16] * 6)
        after = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.restore(tensors, state)
        second = learn(trainer, schema, [16] * 6)
        assert trainer.runner.graphs.recorded == 2
        same([*map(plain_of, second)], [*map(plain_of, first)])
        same(dict(trainer.model.state_dict()), after)


def test_results_of_a_step_are_not_those_of_the_next(schema):
    results, _, _ = on_device(schema, [16] * 7)
    assert len({result.output_B.data_ptr() for result in results}) == 7
    assert not torch.equal(results[-1].old_R, results[-2].old_R)


class Rebinding(nn.Linear):
    """Binds another tensor to its buffer in each pass."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return super().forward(x - self.mean)


class Reading(nn.Linear):
    """Reads a value on the host."""

    def __init__(self):
        super().__init__(3, 3)

    def forward(self, x):
        return super().forward(x) * (1.0 if x.sum().item() > 0 else 2.0)


class Counting(nn.Linear):
    """Computes something else in each second pass."""

    def __init__(self):
        super().__init__(3, 3)
        self.calls = [0]

    def forward(self, x):
        self.calls[0] += 1
        return super().forward(x) * (1.0 + self.calls[0] % 2)


class Noting(Counting):
    """Counts its passes where one can see it."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return nn.Linear.forward(self, x)


class Invalidating(nn.Linear):
    """Reads a value on the host only while it is recorded, for which CUDA refuses to end the recording."""

    def __init__(self):
        super().__init__(3, 3)

    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            x.sum().item()
        return super().forward(x)


class Alternating(nn.Linear):
    """Raises while it is recorded."""

    def __init__(self):
        super().__init__(3, 3)

    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not now")
        return super().forward(x)


@pytest.mark.parametrize("kind", [Rebinding, Reading, Invalidating, Alternating])
def test_a_step_that_cannot_be_recorded_leaves_all_as_it_was(schema, kind):
    found = []
    for graphs in (False, True):
        with CudaRecorder():
            torch.manual_seed(0)
            trainer = Trainer(setup_of(schema, nn.Sequential(kind(), nn.Dropout(0.3)), graphs=graphs))
            results = [*map(plain_of, learn(trainer, schema, [16] * 8))]
            found.append((results, trainer.model.state_dict(), trainer.update.tensors()[0]))
            if graphs:
                assert trainer.runner.graphs.recorded == 1
                assert trainer.runner.without_graphs.startswith("steps run without CUDA graphs: a step cannot be rec")
    same(found[1], found[0])


def try_model(schema, model, **given):
    with CudaRecorder():
        setup = setup_of(schema, model, graphs=False, **given)
        before = {name: value.clone() for name, value in setup.model.state_dict().items()}
        generator = torch.get_rng_state()
        why = try_graphs(setup, STRATEGIES[given.get("strategy", "er")], lambda _model: None)
        same(dict(setup.model.state_dict()), before)
        assert torch.equal(torch.get_rng_state(), generator)
    return why


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["none", "er", "der++"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_with_batch_norm_and_dropout_passes_the_trial(schema, strategy, precision):
    assert try_model(schema, plain_model(), strategy=strategy, precision=precision) is None
    assert try_model(schema, plain_model(), strategy=strategy, precision=precision, deterministic=True) is None


@pytest.mark.parametrize(
    ("kind", "given", "why"),
    [
        (Reading, {}, "a step waits for the device: RuntimeError: called a synchronizing CUDA operation"),
        (Rebinding, {}, "a step cannot be recorded: RuntimeError: the model binds other tensors to its buffers"),
        (Counting, {}, "they compute other losses: "),
        (Noting, {}, "the model changes its attribute passes in Python in a step"),
        (Alternating, {}, "a step cannot be recorded: ValueError: not now"),
        (plain_model, {"micro_batch_size": 8}, "learner.micro_batch_size divides a step"),
        (plain_model, {"optimizer": {"name": "adafactor"}}, 'learner.optimizer = "adafactor" and learner.strategy'),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_the_trial_says_why_steps_cannot_run_as_graphs(schema, kind, given, why):
    torch.manual_seed(0)
    assert why in try_model(schema, kind(), **given)


def test_a_graph_whose_random_numbers_do_not_advance_fails_the_trial(schema, monkeypatch):
    usual = FakeGraph.replay

    def with_the_same_numbers(graph):
        before = torch.get_rng_state()
        usual(graph)
        torch.set_rng_state(before)

    monkeypatch.setattr(FakeGraph, "replay", with_the_same_numbers)
    why = try_model(schema, plain_model())
    assert why is not None
    assert "they compute other losses" in why or "they learn something else" in why


def chosen(path, schema, model, device=CUDA, precision=None, **learner):
    options = LearnerSettings.model_validate({"batch_size": 16, **learner})
    given = {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
    events = SchemaSettings.model_validate(given)
    pipeline = learner_spec(path, events, ModelSettings(factory="m:build"), learner=options)
    setup = replace(setup_of(schema, model, graphs=False, device=device), settings=options)
    setup = setup if precision is None else replace(setup, precision=precision)
    return choose_graphs(pipeline, setup, STRATEGIES["er"], lambda _model: None)


def test_auto_takes_graphs_where_the_trial_passes_and_says_otherwise_why_not(schema, tmp_path, caplog):
    with CudaRecorder(), caplog.at_level("INFO"):
        assert chosen(tmp_path, schema, plain_model()).graphs
        refused = chosen(tmp_path, schema, Reading())
        half = chosen(tmp_path, schema, plain_model(), precision=Precision("fp16", torch.float16))
        recomputed = chosen(tmp_path, schema, plain_model(), activation_checkpointing=True)
        off = chosen(tmp_path, schema, plain_model(), graphs=False)
    assert not any(each.graphs for each in (refused, half, recomputed, off))
    assert refused.no_graphs.startswith("steps run without CUDA graphs: a step waits for the device: ")
    assert "with fp16 the host decides" in half.no_graphs
    assert "learner.activation_checkpointing = true: modules that recompute" in recomputed.no_graphs
    assert off.no_graphs == ""
    assert caplog.messages == [refused.no_graphs, half.no_graphs, recomputed.no_graphs]
    with CudaRecorder():
        assert Trainer(refused).runner.without_graphs == refused.no_graphs


def test_true_ends_the_start_where_steps_cannot_run_as_graphs(schema, tmp_path):
    with (
        CudaRecorder(),
        pytest.raises(SettingsError, match=r"^learner.graphs = true: a step waits .*; write"),
    ):
        chosen(tmp_path, schema, Reading(), graphs=True)
    with pytest.raises(SettingsError, match=r"^learner.graphs = true: the device is cpu, and not a CUDA device"):
        chosen(tmp_path, schema, plain_model(), device=torch.device("cpu"), graphs=True)
    alone = chosen(tmp_path, schema, plain_model(), device=torch.device("cpu"))
    assert (alone.graphs, alone.no_graphs) == (False, "")


@pytest.mark.parametrize(
    ("learner", "replay", "sharing"),
    [
        ({"strategy": "mir"}, {}, {}),
        ({"strategy": "agem"}, {}, {}),
        ({"strategy": "ewc"}, {}, {}),
        ({"strategy": "lwf"}, {}, {}),
        ({"compile": True}, {}, {}),
        ({"activation_checkpointing": True}, {}, {}),
        ({"replicas": 2}, {}, {}),
        ({"precision": "fp16"}, {}, {}),
        ({}, {"sampling": "similar"}, {}),
        ({}, {"admission": "diverse"}, {}),
        ({}, {}, {"yield_at": "layer"}),
        ({}, {}, {"sms": 8}),
    ],
)
def test_settings_under_which_a_step_is_not_recorded_are_refused(learner, replay, sharing):
    for graphs in (False, "auto", True):
        given = facts_of(learner={"graphs": graphs, **learner}, replay=replay, device_sharing=sharing)
        sentences = [sentence for _, sentence in conflicts(given)]
        assert len(sentences) == (graphs is True)
        assert all("learner.graphs = true" in sentence for sentence in sentences)


ADAMW, SGD = {"name": "adamw", "lr": 0.01}, {"name": "sgd", "lr": 0.1, "momentum": 0.9}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("strategy", "precision", "optimizer"),
    [
        ("er", "fp32", ADAMW),
        ("er", "bf16", ADAMW),
        ("er", "fp32", SGD),
        ("der++", "bf16", ADAMW),
        ("er-ace", "fp32", ADAMW),
        ("none", "fp32", SGD),
    ],
)
def test_a_gpu_learns_by_graphs_what_it_learns_without(schema, strategy, precision, optimizer):
    """Bit for bit: with dropout, steps that are not finite, and batches of another size."""
    found = []
    given = {"strategy": strategy, "precision": precision, "optimizer": optimizer}
    for graphs in (False, True):
        trainer = Trainer(setup_of(schema, plain_model(), graphs=graphs, **given))
        results = learn(trainer, schema, [16] * 8 + [9] * 2 + [16] * 3, (5, 11))
        if graphs:
            assert (trainer.runner.graphs.recorded, trainer.runner.graphs.refused) == (1, None)
        found.append(([*map(plain_of, results)], dict(trainer.model.state_dict()), trainer.update.tensors()[0]))
    same(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Invalidating, Alternating, Rebinding])
def test_a_gpu_goes_on_after_a_recording_that_failed(schema, kind):
    """Random numbers, streams and memory too: later steps are those without graphs, and other models are recorded."""
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        trainer = Trainer(setup_of(schema, nn.Sequential(kind(), nn.Dropout(0.3)), graphs=graphs))
        stream = torch.cuda.current_stream(CUDA)
        results = learn(trainer, schema, [16] * 12)
        assert torch.cuda.current_stream(CUDA) == stream
        assert not graphs or trainer.runner.graphs.refused is not None
        found.append(([*map(plain_of, results)], trainer.model.state_dict()))
    same(found[1], found[0])
    trainer = Trainer(setup_of(schema, plain_model()))
    assert all(result.finite for result in learn(trainer, schema, [16] * 8))
    assert (trainer.runner.graphs.recorded, trainer.runner.graphs.refused) == (1, None)


@pytest.mark.gpu
def test_a_gpu_passes_the_trial_with_what_can_be_recorded_alone(schema):
    for kind, passes in ((Reading, False), (Rebinding, False), (Counting, False), (plain_model, True)):
        torch.manual_seed(0)
        setup = setup_of(schema, kind(), graphs=False)
        why = try_graphs(setup, STRATEGIES["er"], lambda _model: None)
        assert (why is None) == passes, why
