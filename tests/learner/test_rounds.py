"""A round of steps does what its steps would do one by one, and settles them together."""

import dataclasses
import itertools
import math
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from anabranch.ingest.events.block import Block, Coverage, Outcome, SkipReason
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.learner.loop import replay_feed
from anabranch.learner.loop.learning_step import Taken
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.features.learned import FeatureLearning
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.replay.sample_plan import Sample
from tests import forkserver
from tests.learner.extensions.teacher.test_learning import LinearTeacher
from tests.learner.learner_bench import CPU, NAME, LearnerBench, Stream, small_model
from tests.learner.test_label_link import KEYED
from tests.learner.test_learned_features import SCHEMA as FEATURES
from tests.learner.test_learned_features import Model
from tests.learner.test_learned_features import change as change_learned
from tests.support.waiting import slowness

BLOCK, BLOCKS, BATCH = 320, 2, 8
EVENTS = BLOCK * BLOCKS
TOO_LARGE = 1e8


class WideStream(Stream):
    """A topic whose blocks have many steps, of events that arrive in order; one in 40 is held out."""

    def __init__(self, schema, stop):
        super().__init__(schema, BLOCKS, stop)
        self.partitions = [Partition(NAME, 0, EVENTS)]
        self.offset = 0
        """Of the next event."""

    @override
    def poll(self, timeout):
        if self.offset == EVENTS:
            return self.end(timeout)
        number, row = divmod(self.offset, BLOCK)
        columns = fake_columns(self.schema, range(number * BLOCK, (number + 1) * BLOCK), label=[0, 1, 2, 1])
        columns["outcome"][::40] = 3
        columns["feature.x"] += np.random.default_rng(number).normal(size=columns["feature.x"].shape).astype(np.float32)
        if self.change is not None:
            self.change(columns)
        begin, self.offset = self.offset, (number + 1) * BLOCK
        return Block({name: column[row:] for name, column in columns.items()}, (Coverage(0, begin, self.offset),))


class Picky(nn.Module):
    """A model that raises on numbers that are too large."""

    def __init__(self):
        super().__init__()
        self.body = small_model()

    @override
    def forward(self, x):
        if (x > TOO_LARGE).any():
            raise ValueError("a number is too large")
        output: Tensor = self.body(x)
        return output


def spoil(columns):
    """Let some steps be not finite, and the model raise on some events, also on all of one step."""
    columns["feature.x"][[53, 54, 201]] = np.nan
    columns["feature.x"][[90, 91]] = 2 * TOO_LARGE
    columns["feature.x"][250:266] = 2 * TOO_LARGE


def made(path, schema, steps, strategy="er", learner=None, change=None, *, model=Picky, kind=WideStream, **options):
    """Return a learner whose rounds have up to `steps` steps."""
    torch.manual_seed(0)
    path.mkdir(parents=True, exist_ok=True)

    def stream(stop):
        wide = kind(schema, stop)
        wide.change = change
        return wide

    bench = LearnerBench(
        path,
        schema,
        model(),
        BLOCKS,
        strategy=STRATEGIES[strategy](),
        learner={"batch_size": BATCH, "replay_ratio": 1.0, **(learner or {})},
        stream=stream,
        **{"keyed": False, **options},
    )
    bench.parts.replay._ahead = 64  # type: ignore[attr-defined]
    bench.loop._steps_of_round = lambda: steps  # type: ignore[method-assign]
    return bench


def rounds_of(bench):
    """Run a learner; return how many steps each round had."""
    torch.manual_seed(1)
    rounds, take = list[int](), bench.loop._step.take

    def counted(*given):
        taken = take(*given)
        rounds.append(len(taken))
        return taken

    bench.loop._step.take = counted  # type: ignore[method-assign]
    bench.run()
    return rounds


def tensors_of(bench):
    """Return what a checkpoint would have of model, optimizer and strategy."""
    found = bench.trainer.tensors()
    return {f"{kind}.{name}": value for kind, some in found.items() for name, value in some.items()}


WITH_REPLAY = ("er", "er-ace", "der", "der++", "mir", "agem")


NUMBERS_OF_STEPS = (1, 2, 7, 32)


def assert_equal(one, other, *, each=True):
    """Assert that two learners have the same bits, outcomes and scores; `each`: scores of each step, and its store."""
    expected, found = tensors_of(one), tensors_of(other)
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []
    assert other.loop.ledger.state() == one.loop.ledger.state()
    assert not each or other.parts.monitor.state() == one.parts.monitor.state()
    scores = [bench.parts.monitor.prequential.score for bench in (one, other)]
    assert scores[0].rows == scores[1].rows > 0
    assert scores[0].total == pytest.approx(scores[1].total, rel=1e-9)
    windows = [bench.parts.monitor.outcomes.newest for bench in (one, other)]
    assert one.parts.trainer.wrappers or len(windows[0]) == scores[0].rows  # a rank has its own part
    assert windows[0].label.tolist() == windows[1].label.tolist()
    assert windows[0].predicted == pytest.approx(windows[1].predicted, abs=1e-6)
    assert not each or other.store.event_table.copy().tobytes() == one.store.event_table.copy().tobytes()
    for count in ("steps", "rows_new", "rows_replay"):
        assert getattr(other.loop.state, count) == getattr(one.loop.state, count)


@pytest.fixture
def compared(tmp_path):
    """Runs a learner for each of some steps of a round, which must have the same bits; returns that of one step."""
    learners = []

    def compare(schema, *given, each=True, longest=32, **options):
        rounds = []
        for steps in NUMBERS_OF_STEPS:
            learners.append(made(tmp_path / str(steps), schema, steps, *given, **options))
            rounds.append(max(rounds_of(learners[-1])))
            assert_equal(learners[0], learners[-1], each=each)
        assert rounds == [min(longest, steps) for steps in NUMBERS_OF_STEPS]
        return learners[0]

    yield compare
    for bench in learners:
        bench.close()


FIXED = {"deterministic": True}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*WITH_REPLAY, "none", "ewc", "lwf"])
@pytest.mark.parametrize("change", [None, spoil], ids=["", "spoiled"])
def test_the_bits_are_the_same_whatever_the_steps_of_a_round(schema, compared, strategy, change):
    one = compared(schema, strategy, FIXED, change)
    if change is not None:
        assert one.loop.ledger.totals.skipped == {"non_finite": 32, "model": 36}


class OddStream(WideStream):
    """A topic whose blocks end anywhere: with half a step, one, or in the middle of some; one in 40 is held out."""

    SIZES = (1, 3, 8, 8, 8, 13, 5, 40, 0, 2, 100, 64, 7)

    @override
    def poll(self, timeout):
        if self.offset == EVENTS:
            return self.end(timeout)
        begin, size = self.offset, self.SIZES[self.next % len(self.SIZES)]
        self.next, self.offset = self.next + 1, min(EVENTS, begin + size)
        columns = fake_columns(self.schema, range(begin, self.offset + 1), label=[0, 1, 2, 1])
        columns = {name: column[:-1] for name, column in columns.items()}
        columns["outcome"][columns["offset"] % 40 == 0] = Outcome.HELD_OUT
        columns["feature.x"] += np.random.default_rng(begin).normal(size=columns["feature.x"].shape).astype(np.float32)
        columns["feature.x"][np.isin(columns["offset"], [53, 54, 201])] = np.nan
        columns["feature.x"][np.isin(columns["offset"], [90, 91, *range(250, 266)])] = 2 * TOO_LARGE
        return Block(columns, (Coverage(0, begin, self.offset),))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "fixed"), [("er", True), ("none", True), ("none", False)])
def test_the_bits_are_the_same_wherever_blocks_end(schema, compared, strategy, fixed):
    """Also where no bits are asked for, and a round has the blocks that have arrived."""
    learner = {"max_delay": "1h", **({"deterministic": True} if fixed else {})}
    one = compared(schema, strategy, learner, kind=OddStream, each=fixed)
    assert one.loop.ledger.totals.skipped == {"non_finite": 16, "model": 18}
    assert one.loop.ledger.totals.outcomes["trained"] == EVENTS - 16 - 34


@pytest.mark.slow
def test_the_bits_are_the_same_with_a_gradient_of_several_passes(schema, compared):
    compared(schema, "er", {**FIXED, "micro_batch_size": 3}, spoil)


@pytest.mark.slow
def test_a_drift_is_found_after_the_same_step_whatever_the_steps_of_a_round(schema, compared):
    def change(columns):
        label = columns["label"]
        columns["feature.x"][:] = 3 * np.eye(3, dtype=np.float32)[label]
        if columns["offset"][0]:
            label[:] = np.random.default_rng(0).integers(0, 3, len(label))

    optimizer = {"name": "sgd", "lr": 0.3}
    one = compared(schema, "none", {**FIXED, "optimizer": optimizer, "drift": {"delta": 0.5}}, change)
    assert one.parts.monitor.drift.count == 1


@pytest.mark.slow
def test_what_features_learn_has_the_same_bits_whatever_the_steps_of_a_round(compared):
    def model():
        found = Model()
        FeatureLearning().convert(found, ModelContext(CPU, FEATURES))
        return found

    compared(FEATURES, "er", FIXED, change_learned, model=model)


def erase(columns):
    """Let some events be tombstones of a key that others before and after them have."""
    columns["key_hash"][:] = 1 + np.arange(len(columns["offset"])) % 50
    for row in (70, 71, 203):
        columns["key_hash"][row] = 1 + row % 10
        columns["outcome"][row], columns["reason"][row] = Outcome.SKIPPED, SkipReason.TOMBSTONE


@pytest.mark.slow
def test_a_tombstone_ends_a_round_so_that_the_bits_are_the_same(schema, compared, tmp_path):
    one = compared(schema, "er", FIXED, erase, longest=22, keyed=True)
    assert one.log.count == 6
    assert one.erasure.erased > 10
    again = []
    for steps in (1, 7):  # as after a restart, where the log has the records of tombstones that are read again
        path = tmp_path / f"again-{steps}"
        path.mkdir()
        for name in ("erasures.log", "erasures.key"):
            shutil.copy(one.log.path.parent / name, path)
        again.append(made(path, schema, steps, "er", FIXED, erase, keyed=True))
        assert max(rounds_of(again[-1])) == steps
        assert again[-1].loop.ledger.totals.skipped["erased"] > 10
    assert_equal(*again)
    for bench in again:
        bench.close()


class LateStream(WideStream):
    """A topic of events that wait for their labels, and one of these labels in another order; neither is behind."""

    def __init__(self, schema, stop):
        super().__init__(schema, stop)
        self.partitions = [Partition(NAME, 0, EVENTS), Partition(TopicPartition("labels", 0), 0, EVENTS)]
        self.blocks, self.turn, self.ended = 2 * BLOCKS, 0, 0

    def hold(self, partitions):
        """Blocks come in turn. Called before each batch."""
        self.turn += 1

    @override
    def poll(self, timeout):
        if self.next == self.blocks:  # for the first time, there are decided events to train on
            self.ended = self.ended or self.turn
            return self.end(timeout) if self.turn > self.ended else None
        number, kind = divmod(self.next, 2)
        self.next += 1
        offsets = range(number * BLOCK, (number + 1) * BLOCK)
        columns = fake_columns(self.schema, offsets, label=[0, 1, 2, 1])
        columns["feature.x"] += np.random.default_rng(number).normal(size=columns["feature.x"].shape).astype(np.float32)
        columns["key_hash"][:] = 1 + np.array(offsets)
        columns["time_ms"][:], columns["partition"][:] = 5000, kind
        columns["outcome"][:] = Outcome.LABEL if kind else Outcome.WAITING
        if kind:
            order = np.random.default_rng(number).permutation(BLOCK)
            columns["key_hash"][:], columns["label"][:] = columns["key_hash"][order], columns["label"][order]
        else:
            columns["labelled"][:] = False
            if self.change is not None:
                self.change(columns)
        return Block(columns, (Coverage(kind, offsets.start, offsets.stop),))


LABELS = {"topics": ["labels"], "wait": "1h", "bytes": "1MB"}


@pytest.mark.slow
@pytest.mark.parametrize("change", [None, spoil], ids=["", "spoiled"])
def test_events_with_late_labels_have_the_same_bits_whatever_the_steps_of_a_round(compared, change):
    labels = LabelStreamSettings.model_validate(LABELS)
    one = compared(KEYED, "none", None, change, each=False, kind=LateStream, labels=labels, keyed=True)
    waited = one.loop.ledger.totals.waited
    if change is None:
        assert waited["trained"] == EVENTS
        assert one.loop.monitor.prequential.score.rows == EVENTS
    else:
        assert waited["skipped"] >= 40
        assert waited["trained"] + waited["skipped"] == EVENTS


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 32])
def test_early_negatives_are_trained_on_once_in_rounds_and_their_positives_again(tmp_path, steps):
    settings = {**LABELS, "unmatched": "negative", "early": "negative-then-correct"}
    labels = LabelStreamSettings.model_validate(settings)
    bench = made(tmp_path, KEYED, steps, "none", kind=LateStream, labels=labels, keyed=True)
    assert max(rounds_of(bench)) == steps
    bench.loop.ledger.count()
    assert bench.loop.ledger.totals.waited["trained"] == EVENTS
    assert bench.loop.state.rows_new == EVENTS * 3 // 2  # half of them are of class 1
    assert bench.loop.monitor.prequential.score.rows == EVENTS
    bench.close()


@pytest.mark.slow
def test_a_teacher_is_asked_once_about_a_round_and_the_bits_are_the_same(schema, compared):
    teacher = LinearTeacher()
    asked, answer = list[int](), teacher.answer

    def counted(columns):
        asked.append(len(columns["offset"]))
        return answer(columns)

    teacher.answer = counted  # type: ignore[method-assign]
    compared(schema, "none", {}, spoil, each=False, teacher=teacher)
    assert {2 * BATCH, 7 * BATCH, 32 * BATCH} < {*asked}
    assert sum(asked) == 4 * (EVENTS - 16)


@pytest.mark.slow
def test_two_ranks_have_the_same_bits_whatever_the_steps_of_a_round(tmp_path):
    program = Path(__file__).parent / "rounds_program.py"
    numbers = [str(steps) for steps in NUMBERS_OF_STEPS]
    processes = [forkserver.start([str(program), str(rank), str(tmp_path), *numbers]) for rank in range(2)]
    try:
        assert [process.wait(100 * slowness()) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_events_of_a_step_that_is_not_finite_alone_are_skipped_in_a_round(schema, tmp_path):
    bench = made(tmp_path, schema, 32, learner={"drift": {"actions": ["mark"]}}, change=spoil)
    assert max(rounds_of(bench)) == 32
    outcomes, held = bench.loop.ledger.totals.outcomes, set(bench.store.event_table.copy()["offset"].tolist())
    assert bench.loop.ledger.totals.skipped == {"non_finite": 32, "model": 36}
    assert outcomes["skipped"] == 68
    assert outcomes["trained"] == EVENTS - 16 - 68
    assert bench.loop.state.rows_new == outcomes["trained"]
    assert not held & {53, 54, 201, 90, 91, *range(250, 266)}
    bench.close()


@pytest.mark.slow
def test_a_step_whose_score_is_not_finite_is_left_out_of_the_scores_of_its_round_alone(schema, tmp_path, monkeypatch):
    """And values on which the model has raised are not what others are compared with."""
    rows, watched = [], []
    for steps in (1, 16):
        bench = made(tmp_path / str(steps), schema, steps, learner={"replay_ratio": 0.0}, change=spoil)
        trainer, step, seen = bench.parts.trainer, bench.parts.trainer.step, list[float]()

        def scored(*given, step=step, bench=bench):
            result = step(*given)
            return dataclasses.replace(result, score=math.nan) if bench.loop.state.steps == 20 else result

        def observe(columns, names, seen=seen):
            seen.append(float(np.nanmax(columns["feature.x"])))

        trainer.step = scored  # type: ignore[method-assign]
        bench.loop._step.values.observe = observe  # type: ignore[method-assign]
        bench.run()
        rows.append(bench.loop.monitor.prequential.score.rows)
        watched.append(max(seen))
        bench.close()
    assert rows[0] == rows[1] > 0
    assert max(watched) < TOO_LARGE


@pytest.mark.parametrize("strategy", ["er", "der"])
def test_no_event_is_replayed_in_the_round_in_which_it_is_trained_on(schema, tmp_path, strategy):
    bench = made(tmp_path, schema, 12, strategy)
    replayed, take = list[Sample](), bench.loop._step.take
    sample, checked = bench.background_store.sample, []

    def sampled(step, *counts):
        found = sample(step, *counts)
        if found is not None:
            replayed.append(found)
        return found

    def checking(batch, names):
        replayed.clear()
        new = set(batch.new["offset"].tolist())
        taken: list[Taken] = take(batch, names)
        old = {offset for each in replayed for offset in each.records["offset"].tolist()}
        checked.append((len(taken), len(old)))
        assert not old & new
        return taken

    bench.background_store.sample, bench.loop._step.take = sampled, checking  # type: ignore[method-assign]
    bench.run()
    assert max(steps for steps, _ in checked) == 12
    assert checked[-1][1], "the last round replays"
    bench.close()


def test_a_learner_takes_rounds_of_as_many_steps_as_fit_the_time_where_they_wait(schema, tmp_path):
    lengths = {}
    for name, learner in {"long": {"round": "1h"}, "short": {"round": "0.001ms"}}.items():
        bench = made(tmp_path / name, schema, 1, learner=learner)
        del bench.loop._steps_of_round  # type: ignore[method-assign]
        lengths[name] = rounds_of(bench)
        assert sum(lengths[name]) == bench.loop.state.steps == 78
        bench.close()
    assert max(lengths["short"]) == 1
    assert lengths["long"][0] == 1, "how long a step takes is not known yet"
    assert max(lengths["long"]) > 8


def test_a_round_is_no_longer_than_its_time_with_what_it_waits_for_besides_its_steps(schema, tmp_path, monkeypatch):
    seconds, teacher = [0.0], LinearTeacher()
    clock = SimpleNamespace(perf_counter=lambda: seconds[0], monotonic=time.monotonic)
    monkeypatch.setattr("anabranch.learner.loop.training_loop.time", clock)
    teacher.threads, answer = 0, teacher.answer

    def answered(columns):
        seconds[0] += 600 * len(columns["offset"]) / BATCH
        return answer(columns)

    teacher.answer = answered  # type: ignore[method-assign]
    bench = made(tmp_path, schema, 1, "none", {"round": "1h"}, teacher=teacher)
    del bench.loop._steps_of_round  # type: ignore[method-assign]
    assert max(rounds_of(bench)) == 5
    bench.close()


def test_a_round_whose_steps_wait_ends_in_time_too_although_the_processor_does_nothing(schema, tmp_path):
    bench, used = made(tmp_path, schema, 1, "none", {"round": "0.001ms"}), itertools.count()
    bench.loop._step._clock = lambda: next(used) * 1e-9
    del bench.loop._steps_of_round  # type: ignore[method-assign]
    assert set(rounds_of(bench)) == {1}
    bench.close()


@pytest.mark.parametrize("strategy", ["er", "none"])
def test_a_deterministic_learner_ends_a_round_in_time_too(schema, tmp_path, strategy):
    bench = made(tmp_path, schema, 1, strategy, {"deterministic": True, "round": "0.001ms"})
    del bench.loop._steps_of_round  # type: ignore[method-assign]
    assert set(rounds_of(bench)) == {1}, "else a stop and the heartbeat wait for many slow steps"
    bench.close()


class UnevenStream(WideStream):
    """A topic whose blocks have half a step to 80 steps."""

    def __init__(self, schema, stop):
        super().__init__(schema, stop)
        sizes = np.random.default_rng(5).choice([4, 8, 16, 40, 80, 320, 640], 12)
        self.blocks, self.ends = len(sizes), np.cumsum(sizes).tolist()
        self.partitions = [Partition(NAME, 0, self.ends[-1])]

    @override
    def poll(self, timeout):
        if self.next == self.blocks:
            return self.end(timeout)
        begin, end = [0, *self.ends][self.next : self.next + 2]
        self.next += 1
        return Block(fake_columns(self.schema, range(begin, end), label=[0, 1, 2, 1]), (Coverage(0, begin, end),))


def test_a_sample_is_chosen_for_each_step_of_a_round_that_is_taken_early(schema, tmp_path, monkeypatch):
    monkeypatch.setattr("anabranch.learner.loop.training_loop.overlaps", lambda _device: True)
    learner = {"batch_size": BATCH, "max_delay": "1h", "round": "1h"}
    bench = LearnerBench(
        tmp_path, schema, small_model(), 0, learner=learner, stream=partial(UnevenStream, schema), keyed=False
    )
    store, sample, chosen = bench.background_store, bench.background_store.sample, list[bool]()

    def sampled(step, *counts):
        chosen.append(step + len(counts) - 1 <= store.through)
        return sample(step, *counts)

    store.sample = sampled  # type: ignore[method-assign]
    assert max(rounds_of(bench)) > 8
    assert all(chosen), f"steps {np.flatnonzero(~np.array(chosen))} replay nothing"
    bench.close()


def test_each_step_copies_its_events_where_the_device_has_no_memory_for_those_of_a_round(schema, tmp_path):
    bench = made(tmp_path, schema, 32)
    copy = bench.loop._step.copied

    def copied(columns):
        if len(columns["offset"]) > BATCH:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")
        return copy(columns)

    bench.loop._step.copied = copied
    assert max(rounds_of(bench)) == 32
    assert bench.loop.state.rows_new == EVENTS - 16
    bench.close()


def test_each_step_takes_its_part_of_the_sample_where_the_device_has_no_memory_for_all_of_it(
    schema, tmp_path, monkeypatch
):
    settings, examples_of_all, short = {"deterministic": True}, replay_feed.all_examples_of, list[int]()
    expected, bench = (made(tmp_path / name, schema, 7, "der++", settings) for name in ("expected", "short"))
    for each in (expected, bench):
        each.parts.replay._ahead = 16  # type: ignore[attr-defined]
    rounds_of(expected)

    def without_memory(sample):
        if len(sample) > 4 * BATCH:
            short.append(len(sample))
            raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")
        return examples_of_all(sample)

    monkeypatch.setattr(replay_feed, "all_examples_of", without_memory)
    rounds_of(bench)
    assert short
    assert bench.loop.state.rows_replay == expected.loop.state.rows_replay
    found = tensors_of(bench)
    assert all(torch.equal(value, found[name]) for name, value in tensors_of(expected).items())
    for each in (expected, bench):
        each.close()


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(
    "learner",
    [{"replay_ratio": "auto"}, {"drift": {"actions": ["raise-lr"]}}, {"drift": {"actions": ["checkpoint"]}}],
    ids=str,
)
def test_each_step_is_a_round_where_scores_adjust_steps_whose_bits_have_to_repeat(
    schema, tmp_path, learner, deterministic
):
    bench = made(tmp_path, schema, 1, learner={**learner, "round": "1h", "deterministic": deterministic})
    del bench.loop._steps_of_round  # type: ignore[method-assign]
    assert (set(rounds_of(bench)) == {1}) == deterministic
    bench.close()


def test_a_drift_raises_the_learning_rate_from_the_next_round_on(schema, tmp_path):
    settings = {"drift": {"actions": ["raise-lr"], "lr_factor": 3.0, "steps": 40}}
    bench = made(tmp_path, schema, 16, "none", learner=settings)
    step, factors, taken = bench.trainer.step, list[float](), list[int]()

    def stepped(*given):
        factors.append(bench.trainer.update.schedule.scale)
        return step(*given)

    def drift_once():
        taken.append(bench.loop.state.steps)
        if len(taken) == 2:
            bench.loop._step.respond()

    bench.trainer.step = stepped  # type: ignore[method-assign]
    bench.run(drift_once)
    expected = []
    for begin, end in itertools.pairwise([0, *taken]):
        expected += [3 - 2 * (begin - taken[1]) / 40 if taken[1] <= begin < taken[1] + 40 else 1.0] * (end - begin)
    assert factors == pytest.approx(expected)
    assert max(np.diff([0, *taken])) == 16
    bench.close()


class KilledError(Exception):
    """Stands for the death of a learner."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["er", "der"])
def test_a_learner_that_dies_in_the_middle_of_a_round_repeats_all_of_it_to_the_same_bits(schema, tmp_path, strategy):
    settings = {"deterministic": True}
    whole = made(tmp_path / "whole", schema, 7, strategy, settings, spoil)
    rounds_of(whole)
    killed = made(tmp_path / "killed", schema, 7, strategy, settings, spoil)
    torch.manual_seed(1)
    step, begun = killed.trainer.step, list[int]()

    def until_killed(*given):
        if killed.loop.state.steps == begun[-1] + 3 > 40:
            raise KilledError
        return step(*given)

    def request_checkpoint():
        begun.append(killed.loop.state.steps)
        if len(begun) == 4:
            killed.checkpointer.request()

    begun.append(0)
    killed.trainer.step = until_killed  # type: ignore[method-assign]
    with pytest.raises(KilledError):
        killed.run(request_checkpoint)
    killed.close()

    last = made(tmp_path / "killed", schema, 7, strategy, settings, spoil)
    last.resume()
    assert 0 < last.loop.state.steps < begun[-1]
    last.stream.offset = last.loop.ledger.partitions[0].position.offset  # type: ignore[attr-defined]
    last.run()
    expected = tensors_of(whole)
    assert all(torch.equal(value, expected[name]) for name, value in tensors_of(last).items())
    assert last.loop.ledger.state() == whole.loop.ledger.state()
    held = [sorted(bench.store.event_table.copy()["offset"].tolist()) for bench in (last, whole)]
    assert held[0] == held[1]
    for bench in (whole, last):
        bench.close()
