"""A whole learner with a teacher: each event has one outcome, whatever the teacher does, also after a restart."""

from datetime import timedelta

import numpy as np
import pytest
import torch

from anabranch.learner.errors import TeacherError
from anabranch.learner.strategies.registry import STRATEGIES
from tests.learner.learner_bench import ROWS
from tests.support.waiting import wait_until

BLOCKS = 8
UNLABELLED = {0, 3, 6}
PER_BLOCK = ROWS - 1
"""One event of each block is held out."""


class LinearTeacher:
    """Answers with a linear function of the features, or does as the test says; answers about a batch once."""

    name = "the teacher of the test"
    threads = 2
    timeout: timedelta | None = None

    def __init__(self, does=lambda output_N: output_N):
        self.does = does
        self.offsets: list[int] = []

    def answer(self, columns):
        self.offsets += columns["offset"].tolist()
        weight = np.arange(9, dtype=np.float32).reshape(3, 3) / 9
        return self.does((columns["feature.x"] @ weight).astype(np.float32))

    def close(self):
        pass


def raises(_output_N):
    raise TeacherError("the teacher is away")


def make(make_bench, blocks, teacher, **options):
    bench = make_bench(blocks, teacher=teacher, distil=True, **options)
    bench.stream.unlabelled = UNLABELLED
    return bench


def counts(bench):
    return {name: count for name, count in bench.loop.ledger.totals.outcomes.items() if count}


@pytest.mark.parametrize("strategy", ["er", "none", "der++"])
def test_unlabelled_events_are_trained_on_once_and_scores_are_of_labelled_ones(make_bench, strategy):
    teacher = LinearTeacher()
    bench = make(make_bench, BLOCKS, teacher, strategy=STRATEGIES[strategy]())
    before = bench.trainer.snapshot()
    bench.run()
    assert counts(bench) == {"trained": BLOCKS * PER_BLOCK, "held_out": BLOCKS}
    labelled = (BLOCKS - len(UNLABELLED)) * PER_BLOCK
    assert bench.loop.monitor.prequential.loss.rows == labelled
    assert bench.loop.monitor.prequential.score.rows == labelled
    assert bench.loop.state.rows_new == BLOCKS * PER_BLOCK
    assert sorted(teacher.offsets) == sorted(set(teacher.offsets)), "no event is asked about twice"
    assert len(teacher.offsets) == BLOCKS * PER_BLOCK
    assert any(not torch.equal(value, before[name]) for name, value in bench.trainer.snapshot().items())


def test_the_store_keeps_the_teachers_outputs_of_all_events_and_steps_learn_from_them(make_bench):
    blocks = 14  # samples are planned some steps ahead
    bench = make(make_bench, blocks, LinearTeacher(), replay={"capacity": 1000})
    seen: list[tuple[int, int]] = []
    step = bench.trainer.step

    def stepped(new, old=(), rows=None):
        for events in old:
            assert events.teacher_B is not None
            expected = events.features["x"] @ torch.arange(9.0).reshape(3, 3) / 9
            assert torch.allclose(events.teacher_B, expected, atol=1e-5)
            seen.append((len(events), int((events.weight_B == 0).sum())))
        return step(new, old, rows)

    bench.trainer.step = stepped
    bench.run()
    store = bench.store
    store.flush_pending()
    assert len(store) == blocks * PER_BLOCK
    assert sum(unlabelled for _, unlabelled in seen) > 0, "unlabelled events are replayed too"
    assert sum(rows for rows, _ in seen) == bench.loop.state.rows_replay


@pytest.mark.parametrize("strategy", ["none", "der"])
def test_a_strategy_without_rehearsed_labels_stores_no_outputs_of_the_teacher(make_bench, strategy):
    bench = make(make_bench, 3, LinearTeacher(), strategy=STRATEGIES[strategy]())
    bench.run()
    assert "teacher" not in bench.store.fields


@pytest.mark.parametrize(
    "does",
    [raises, lambda output_N: np.full_like(output_N, np.nan)],
    ids=["away", "NaN"],
)
def test_without_outputs_labelled_events_are_trained_on_and_others_are_skipped(make_bench, does):
    bench = make(make_bench, BLOCKS, LinearTeacher(does))
    bench.run()
    skipped = len(UNLABELLED) * PER_BLOCK
    assert counts(bench) == {"trained": BLOCKS * PER_BLOCK - skipped, "held_out": BLOCKS, "skipped": skipped}
    assert bench.loop.ledger.totals.skipped == {"untaught": skipped}
    assert bench.loop.ledger.partitions[0].position.offset == BLOCKS * ROWS
    assert bench.feed is not None
    rows = bench.feed.report()["teacher"].rows
    assert rows["answered"] == 0
    assert sum(rows.values()) == BLOCKS * PER_BLOCK


def test_a_teacher_that_comes_back_is_learned_from_again(make_bench):
    teacher = LinearTeacher(raises)
    bench = make(make_bench, BLOCKS, teacher)
    assert bench.feed is not None
    now, feed = [0.0], bench.feed
    feed._clock = lambda: now[0]

    def advance():
        now[0] += 10.0
        teacher.does = lambda output_N: output_N
        if now[0] == 20.0:  # no step waits for the trial that begins in the second
            wait_until(lambda: feed.report()["teacher"].up, "an answer")

    bench.run(advance)
    rows = feed.report()["teacher"].rows
    assert rows["failed"] == PER_BLOCK
    assert rows["answered"] >= (BLOCKS - 2) * PER_BLOCK
    assert feed.report()["teacher"].up


def test_a_resumed_run_equals_the_uninterrupted_one_and_no_event_counts_twice(make_bench):
    blocks, middle = 14, 9
    uninterrupted = make(make_bench, blocks, LinearTeacher())
    uninterrupted.run()
    interrupted = make(make_bench, middle, LinearTeacher())
    interrupted.run()
    interrupted.finish()
    interrupted.close()
    resumed = make(make_bench, blocks, LinearTeacher())
    resumed.resume()
    assert resumed.loop.state.steps == middle
    resumed.run()
    for name, value in uninterrupted.trainer.snapshot().items():
        assert torch.equal(resumed.trainer.snapshot()[name], value), name
    assert resumed.loop.state.rows_replay == uninterrupted.loop.state.rows_replay > 0
    assert resumed.loop.ledger.state() == uninterrupted.loop.ledger.state()
    assert resumed.loop.monitor.prequential.state() == uninterrupted.loop.monitor.prequential.state()


def test_erased_events_are_not_trained_on_although_the_teacher_was_asked_about_them(make_bench):
    teacher = LinearTeacher()
    bench = make(make_bench, 3, teacher)

    def tombstone(columns):
        columns["key_hash"][:] = np.arange(ROWS) % 4 + 1
        if columns["offset"][0] == 2 * ROWS:
            columns["outcome"][20], columns["reason"][20], columns["key_hash"][20] = 5, 4, 2

    bench.stream.change = tombstone
    bench.run()
    assert bench.loop.ledger.totals.skipped == {"tombstone": 1, "erased": 5}
    assert counts(bench) == {"trained": 3 * PER_BLOCK - 5, "held_out": 2, "skipped": 6}


def test_batches_that_are_there_are_asked_about_before_their_step(make_bench):
    bench = make(make_bench, 3, LinearTeacher(), learner={"batch_size": 5, "max_delay": "10s"})
    assert bench.feed is not None
    order: list[str] = []
    ask, step = bench.feed.foresee, bench.trainer.step

    def asked(columns):
        order.append("ask")
        ask(columns)

    def stepped(*given):
        order.append("step")
        return step(*given)

    bench.loop._source._foresee, bench.trainer.step = [asked], stepped  # type: ignore[method-assign]
    bench.run()
    assert order[:7] == ["ask", "ask", "ask", "ask", "ask", "step", "ask"]
    assert order.count("ask") == order.count("step")
