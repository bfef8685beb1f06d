"""Events on which the model raises: they are found, left out and counted, and the others are learned."""

import itertools
import logging
import shutil

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.errors import RankLostError
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.faulty_events import Raised, RaisingEventsError, may_be_of_events, raising
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended
from tests.learner.learner_bench import ROWS, LearnerBench
from tests.support.strategies import small_strategy

CPU = torch.device("cpu")
BAD = 900.0


class Refusing(nn.Sequential):
    """Raises where an event begins with 900, at an index of choice; samples random numbers and keeps statistics."""

    def __init__(self, where="forward"):
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.where, self.passes = where, 0

    def forward(self, x):
        self.passes += 1
        output: Tensor = super().forward(x)
        if (x[:, 0] == BAD).any():
            if self.where == "forward":
                raise IndexError("index out of range in self")
            output.register_hook(self._refuse)
        if self.where == "everything":
            raise TypeError("the code is wrong")
        return output

    def _refuse(self, _gradient):
        raise ValueError("no gradient of this")


def make(schema, model, strategy="er", task=None, **settings):
    options = LearnerSettings.model_validate({"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, **settings})
    chosen = extended(small_strategy(strategy), model, schema)
    embedding = Embedding(model, "2") if chosen.kind.embeds else None
    precision = choose_precision(options.precision, CPU)
    return Trainer(TrainingSetup(model, task or Classification(), chosen, schema, options, CPU, precision, embedding))


def some(schema, trainer, rows, bad=()):
    columns = fake_columns(schema, rows, label=[0, 1, 2])
    columns["feature.x"][list(bad), 0] = BAD
    return trainer.examples(columns)


def without(events, bad):
    stays = torch.ones(len(events), dtype=torch.bool)
    stays[list(bad)] = False
    return events[stays]


def replayed(strategy, trainer, events):
    if not trainer.strategy.kind.replays:
        return []
    if trainer.strategy.kind.keeps_output:
        events = Examples(events.features, events.label_B, events.weight_B, torch.zeros(len(events), 3))
    return [events, events] if strategy == "der++" else [events]


def found_in(rows, bad):
    calls = []

    def check(begin, end):
        calls.append((begin, end))
        if bad & set(range(begin, end)):
            raise ValueError("bad")

    return list(raising(rows, check)), len(calls)


def test_few_events_of_many_are_found_by_halves():
    assert found_in(1024, {0, 511, 1023})[0] == [0, 511, 1023]
    assert found_in(1024, {3})[1] <= 2 * 10 + 1
    assert found_in(100, set(range(100)))[0] == list(range(100))
    assert found_in(64, set(range(0, 64, 2)))[1] <= 2 * 64
    assert found_in(7, set()) == ([], 1)


def test_events_that_raise_together_alone_are_all_found():
    def check(begin, end):
        if begin <= 5 and end > 10:
            raise ValueError("these two")

    assert list(raising(16, check)) == list(range(16))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        MemoryError(),
        RankLostError("gone"),
        RuntimeError("[gloo] Connection closed by peer"),
        RuntimeError("CUDA error: device-side assert triggered"),
    ],
)
def test_what_is_no_events_fault_is_raised_as_it_is(error):
    assert not may_be_of_events(error)

    def check(_begin, _end):
        raise error

    with pytest.raises(type(error)):
        raising(4, check)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "progressive"])  # of an nn.Sequential
def test_a_step_without_the_events_that_raise_is_the_same_as_without_them(schema, strategy, where):
    if where == "backward" and not STRATEGIES[strategy].kind.learns_gradient:
        where = "forward"
    trainer, other = (make(schema, Refusing(where), strategy, micro_batch_size=12) for _ in range(2))
    for each in (trainer, other):
        torch.manual_seed(1)
        each.step(some(schema, each, range(16)), replayed(strategy, each, some(schema, each, range(20, 36))))
    torch.manual_seed(2)
    bad, bad_old = (2, 9), (5,)
    new, old = some(schema, trainer, range(40, 56), bad), some(schema, trainer, range(60, 76), bad_old)
    given = replayed(strategy, trainer, old)
    with pytest.raises(RaisingEventsError) as caught:
        trainer.step(new, given)
    expected = [*bad, *(16 * (sample + 1) + index for sample in range(len(given)) for index in bad_old)]
    assert list(caught.value.indices) == expected
    assert "index out of range" in caught.value.message or "no gradient of this" in caught.value.message
    result = trainer.step(without(new, bad), replayed(strategy, trainer, without(old, bad_old)))
    torch.manual_seed(2)
    plain = other.step(without(new, bad), replayed(strategy, other, without(old, bad_old)))
    assert (result.finite, result.loss) == (True, plain.loss)
    for mine, its in zip(trainer.tensors().values(), other.tensors().values(), strict=True):
        assert all(torch.equal(value, its[name]) for name, value in mine.items())
    assert trainer.state() == other.state()


@pytest.mark.parametrize("count", [1, 2, 16])
def test_a_step_of_which_every_event_raises_names_them_all(schema, count):
    trainer = make(schema, Refusing())
    before = trainer.snapshot()
    with pytest.raises(RaisingEventsError) as caught:
        trainer.step(some(schema, trainer, range(count), tuple(range(count))))
    assert list(caught.value.indices) == list(range(count))
    assert all(torch.equal(value, before[name]) for name, value in trainer.snapshot().items())


def test_a_model_that_raises_on_zeros_too_is_broken_and_its_error_is_raised(schema):
    trainer = make(schema, Refusing("everything"))
    with pytest.raises(TypeError, match="the code is wrong"):
        trainer.step(some(schema, trainer, range(16)), [some(schema, trainer, range(16))])


def test_what_cannot_be_found_again_is_raised(schema, monkeypatch):
    trainer = make(schema, Refusing())

    def fail():
        raise ValueError("the optimizer is wrong")

    monkeypatch.setattr(trainer.update, "apply", fail)
    with pytest.raises(ValueError, match="the optimizer is wrong"):
        trainer.step(some(schema, trainer, range(16)))


@pytest.mark.parametrize("method", ["loss", "score"])
def test_a_task_that_raises_on_a_label_is_like_a_model_that_raises(schema, method):
    class Choosy(Classification):
        def loss(self, output_B, label_B):
            if method == "loss" and (label_B == 2).any():
                raise ValueError("no twos")
            return super().loss(output_B, label_B)

        def score(self, output_B, label_B):
            if method == "score" and (label_B == 2).any():
                raise ValueError("no twos")
            return super().score(output_B, label_B)

    trainer = make(schema, Refusing(), task=Choosy())
    with pytest.raises(RaisingEventsError, match="no twos") as caught:
        trainer.step(some(schema, trainer, range(9)))
    assert list(caught.value.indices) == [2, 5, 8]


def test_passes_that_find_events_are_few(schema):
    model = Refusing()
    trainer = make(schema, model)
    new = some(schema, trainer, range(256), (77,))
    model.passes = 0
    with pytest.raises(RaisingEventsError):
        trainer.step(new)
    assert model.passes <= 2 + 2 * 8


def test_a_probe_names_the_events_that_raise_and_leaves_the_model_as_it_was(schema):
    trainer = make(schema, Refusing())
    before = trainer.snapshot()
    with pytest.raises(RaisingEventsError) as caught:
        trainer.probe(some(schema, trainer, range(16), (3, 4)))
    assert list(caught.value.indices) == [3, 4]
    assert trainer.model.training
    assert all(torch.equal(value, before[name]) for name, value in trainer.snapshot().items())


def test_the_log_names_events_at_most_every_ten_seconds(caplog):
    now = [0.0]
    raised = Raised(lambda: now[0])
    with caplog.at_level(logging.WARNING):
        raised.log("which are skipped", [f"t[0]@{offset}" for offset in range(7)], "IndexError: bad")
        raised.log("which are skipped", ["t[0]@8", "t[0]@9"], "IndexError: bad")
        now[0] = 11.0
        raised.log("which are skipped", ["t[0]@10"], "IndexError: bad")
    assert [record.getMessage() for record in caplog.records] == [
        "the model raises on t[0]@0, t[0]@1, t[0]@2, t[0]@3, t[0]@4 and 2 more, which are skipped: IndexError: bad",
        "the model raises on t[0]@10, which are skipped; 2 other events since the last such line: IndexError: bad",
    ]


def test_many_events_that_raise_are_unhealthy_until_they_are_few_again():
    raised = Raised()
    raised.add(1000, 9, "bad")
    assert raised.problem(1000) is None
    raised.add(1200, 41, "worse")
    problem = raised.problem(1200)
    assert problem is not None
    assert problem.startswith("the model raised on 50 of the last 1000 new events, which are skipped: worse")
    assert raised.problem(2100) is None
    assert raised.problem(2300) is None


class Stored(nn.Sequential):
    """Takes events that do not begin with 900, as a model with an embedding of 900 rows."""

    def __init__(self):
        super().__init__(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        if (x[:, 0] == BAD).any():
            raise IndexError("index out of range in self")
        output: Tensor = super().forward(x)
        return output


@pytest.fixture
def make_bench(tmp_path, schema):
    benches: list[LearnerBench] = []

    def build(blocks, bad, **options):
        torch.manual_seed(0)
        benches.append(LearnerBench(tmp_path, schema, Stored(), blocks, **options))

        def change(columns):
            columns["feature.x"][bad(columns), 0] = BAD

        benches[-1].stream.change = change
        return benches[-1]

    yield build
    for bench in benches:
        bench.close()


def test_new_events_that_raise_are_skipped_and_nothing_else_is(make_bench, caplog):
    bench = make_bench(6, lambda columns: np.isin(columns["offset"], [40, 41, 100]))
    bench.run()
    bench.finish()
    loop = bench.loop
    assert loop.ledger.totals.outcomes == {
        "trained": 6 * (ROWS - 1) - 3,
        "stored_only": 0,
        "held_out": 6,
        "dead_lettered": 0,
        "skipped": 3,
    }
    assert loop.ledger.totals.skipped == {"model": 3}
    assert loop.state.rows_new == 6 * (ROWS - 1) - 3
    assert len(bench.store) == 6 * (ROWS - 1) - 3
    assert loop.ledger.partitions[0].position.offset == 6 * ROWS
    assert "the model raises on events[0]@40, events[0]@41, which are skipped: IndexError: index out" in caplog.text
    assert loop.raising_events.problem is None


@pytest.mark.slow
@pytest.mark.parametrize("replay", [{}, {"disk": {"bytes": "1MB"}, "device_bytes": "1kB"}], ids=["device", "disk"])
def test_an_old_event_that_raises_is_replayed_no_more(make_bench, replay):
    """It was stored without a label, so that the model has not seen it."""
    bench = make_bench(40, lambda columns: columns["offset"] < ROWS, replay={"capacity": 5000, **replay})
    bench.stream.unlabelled = {0}
    bench.run()
    store = bench.store
    store.flush_pending()
    held = store.event_table.by_slot.take(store.event_table.slots)["offset"]
    left = np.setdiff1d(np.arange(40 * ROWS), [*held, *range(5, 40 * ROWS, ROWS)])
    assert len(left) > 10
    assert (left < ROWS).all()
    raised = bench.metrics.learner.raised.labels("replay")._value.get()
    assert len(left) <= raised < 3 * len(left), "only plans that were made already name them again"
    assert bench.loop.ledger.totals.outcomes["trained"] == 39 * (ROWS - 1)
    assert bench.loop.ledger.totals.outcomes["skipped"] == 0


@pytest.mark.parametrize("cause", ["new", "old"])
def test_where_ranks_only_know_that_some_event_raises_the_new_or_the_old_ones_are_left_out(
    make_bench, monkeypatch, cause
):
    """As ranks that split a model do. New events are tried alone: without an error there, an old one is the cause."""
    bench = make_bench(40, lambda columns: columns["offset"] == (7 if cause == "old" else 20 * ROWS))
    take, tried = bench.trainer.step, list[tuple[int, int]]()

    def step(new, old=(), columns=None):
        tried.append((len(new), sum(map(len, old))))
        if any((each.features["x"][:, 0] == BAD).any() for each in (new, *old)):
            raise RaisingEventsError(range(len(new)), "IndexError: index out of range", of_batch=True)
        return take(new, old, columns)

    if cause == "old":
        bench.stream.unlabelled = {0}  # it is stored, and not trained on
    monkeypatch.setattr(bench.trainer, "step", step)
    bench.run()
    rows, outcomes = ROWS - 1, bench.loop.ledger.totals.outcomes
    removed = bench.metrics.learner.raised.labels("replay")._value.get()
    alone = [old for (new, old), after in itertools.pairwise(tried) if old and after == (new, 0)]
    if cause == "new":
        assert len(alone) == 1
        assert (outcomes["skipped"], outcomes["trained"], removed) == (rows, 39 * rows, 0)
        return
    assert 1 <= len(alone) <= 3, "only plans that were made already name it again"
    assert (outcomes["skipped"], outcomes["trained"], removed) == (0, 39 * rows, sum(alone))
    store = bench.store
    store.flush_pending()
    assert 7 not in store.event_table.by_slot.take(store.event_table.slots)["offset"]


def test_a_held_out_event_that_raises_leaves_the_set_and_spoils_no_verdict(make_bench):
    bench = make_bench(100, lambda columns: np.isin(columns["offset"], [5 + 3 * ROWS, 5 + 60 * ROWS]))
    bench.run()
    bench.finish()
    bench.loop.raising_events.clean_holdout()
    assert len(bench.holdout) == 98
    assert bench.metrics.learner.raised.labels("held_out")._value.get() == 2
    assert bench.publisher.verdict == "inconclusive"
    assert set(bench.publisher.scoring.evaluation.windows) >= {"new", "old"}
    assert bench.publisher.gate.hold.since is None


@pytest.mark.slow
def test_a_probe_takes_a_held_out_event_that_raises_out_of_the_set(make_bench):
    bench = make_bench(200, lambda columns: columns["offset"] % (20 * ROWS) == 5, learner={"replay_ratio": "auto"})
    bench.run()
    assert bench.metrics.learner.raised.labels("held_out")._value.get() > 0
    assert bench.loop.state.steps == 200


@pytest.mark.slow
def test_a_stream_of_which_half_raises_is_learned_and_is_unhealthy(make_bench):
    bench = make_bench(20, lambda columns: columns["offset"] % 2 == 0)
    bench.run()
    assert bench.loop.ledger.totals.outcomes["trained"] + bench.loop.ledger.totals.outcomes["skipped"] == 20 * (
        ROWS - 1
    )
    assert bench.loop.ledger.totals.outcomes["skipped"] == 20 * ROWS // 2
    problem = bench.loop.raising_events.problem
    assert problem is not None
    assert "the model raised on 320 of the last 620 new events" in problem


@pytest.mark.slow
def test_while_the_model_takes_nothing_no_checkpoint_passes_by_the_events(make_bench):
    bench = make_bench(30, lambda columns: columns["offset"] >= 5 * ROWS, every="1ms")
    bench.run()
    bench.finish()
    assert bench.loop.ledger.totals.skipped == {"model": 25 * (ROWS - 1)}
    problem = bench.loop.raising_events.problem
    assert problem is not None
    assert "no checkpoint is made" in problem
    newest = bench.checkpoints.newest()
    assert newest is not None
    assert all(each["position"][0] < 20 * ROWS for each in newest[1].state["ledger"]), "empty in the first checkpoint"


@pytest.mark.slow
def test_a_resumed_run_skips_the_same_events_and_ends_with_the_same_weights(make_bench, tmp_path):
    def bad(columns):
        return columns["offset"] % 50 == 7

    whole = make_bench(30, bad)
    whole.run()
    weights, outcomes = whole.trainer.snapshot(), whole.loop.ledger.totals.outcomes
    whole.close()
    shutil.rmtree(tmp_path)
    half = make_bench(13, bad)
    half.run()
    half.finish()
    half.close()
    resumed = make_bench(30, bad)
    resumed.resume()
    resumed.run()
    assert resumed.loop.ledger.totals.outcomes == outcomes
    assert all(torch.equal(value, weights[name]) for name, value in resumed.trainer.snapshot().items())
