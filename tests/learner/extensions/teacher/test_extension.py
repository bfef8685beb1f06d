"""The feed of a teacher's outputs: what steps wait for, what they go on without, and what is counted."""

import gc
import threading
import weakref
from datetime import timedelta

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Histogram

from anabranch.ingest.events.block import Outcome, SkipReason
from anabranch.learner.errors import TeacherError
from anabranch.learner.extensions.teacher.extension import TeacherFeed
from anabranch.learner.stream.batch import Batch, Span
from tests.support.waiting import PATIENCE_SECONDS, wait_until

STEP = 4


class FakeTeacher:
    """Answers with ones, or does as the test says."""

    name = "the teacher of the test"

    def __init__(self, threads=1, timeout=timedelta(seconds=60)):
        self.threads, self.timeout = threads, timeout
        self.asked = 0
        self.failure: str | None = None
        self.blocked = threading.Event()
        self.blocked.set()
        self.output: float | NDArray[np.float32] = 1.0

    def answer(self, columns):
        self.asked += 1
        assert self.blocked.wait(PATIENCE_SECONDS)
        if self.failure is not None:
            raise TeacherError(self.failure)
        return np.full((len(columns["offset"]), 2), self.output, np.float32)

    def close(self):
        self.blocked.set()


@pytest.fixture
def make_feed():
    feeds: list[TeacherFeed] = []

    def make(teacher, *, unlabelled=False, clock=lambda: 0.0, registry=None):
        histogram = Histogram("seconds", "Of a step.", registry=registry or CollectorRegistry())
        feeds.append(TeacherFeed(teacher, (2,), histogram, STEP, unlabelled=unlabelled, clock=clock))
        return feeds[-1]

    yield make
    for feed in feeds:
        feed.close()


def batch_of(labelled):
    rows = len(labelled)
    identity = {
        "partition": np.zeros(rows, np.int32),
        "offset": np.arange(rows),
        "outcome": np.zeros(rows, np.uint8),
        "reason": np.zeros(rows, np.uint8),
    }
    span = Span(identity, np.ones(rows, np.bool_), {}, {}, {}, {})
    return Batch({"offset": np.arange(rows), "labelled": np.array(labelled)}, {}, {}, [span])


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_step_gets_the_outputs_that_were_asked_for_before(make_feed, threads):
    teacher = FakeTeacher(threads)
    feed, batches = make_feed(teacher), [batch_of([True] * rows) for rows in (3, 1, 2)]
    for batch in batches:
        feed.foresee(batch.new)
    for batch in batches:
        feed.take(batch, ())
        assert batch.new["teacher"].tolist() == [[1.0, 1.0]] * len(batch)
    assert teacher.asked == 3
    assert feed.report()["teacher"].rows == {"answered": 6, "unusable": 0}
    assert (feed.report()["teacher"].up, feed.warning) == (True, None)


def test_a_batch_that_was_not_asked_about_before_is_asked_about_at_its_step(make_feed):
    feed, batch = make_feed(FakeTeacher()), batch_of([True])
    feed.take(batch, ())
    assert batch.new["teacher"].tolist() == [[1.0, 1.0]]


def test_no_step_waits_beyond_the_timeout_and_its_events_learn_from_labels_alone(make_feed):
    teacher = FakeTeacher(timeout=timedelta(milliseconds=1))
    teacher.blocked.clear()
    feed, batch = make_feed(teacher), batch_of([True, True])
    feed.foresee(batch.new)
    feed.take(batch, ())
    assert np.isnan(batch.new["teacher"]).all()
    assert feed.report()["teacher"].rows["late"] == 2


def test_a_round_waits_as_long_as_its_steps_would_one_by_one(make_feed):
    teacher, hours = FakeTeacher(timeout=timedelta(hours=1)), [0.0]
    teacher.blocked.clear()

    def clock():
        if hours[0]:
            teacher.blocked.set()
        return 3600 * hours[0]

    feed, rounds = make_feed(teacher, clock=clock), batch_of([True] * (2 * STEP + 1))
    feed.foresee(rounds.new)
    hours[0] = 2.5
    feed.take(rounds, ())
    assert feed.report()["teacher"].rows == {"answered": 2 * STEP + 1, "unusable": 0}


def test_the_time_that_is_measured_is_that_of_a_step_as_the_timeout_is(make_feed):
    seconds, registry = iter(range(0, 1000, 6)), CollectorRegistry()
    feed = make_feed(FakeTeacher(0), clock=lambda: next(seconds), registry=registry)
    feed.take(batch_of([True] * 3 * STEP), ())
    assert registry.get_sample_value("seconds_sum") == 6 / 3


def test_no_more_batches_than_threads_are_kept_of_those_for_which_no_step_waits(make_feed):
    """A teacher whose answers never come holds neither the memory of the stream nor its warning back."""
    teacher, now = FakeTeacher(threads=2, timeout=timedelta(seconds=1)), [0.0]
    teacher.blocked.clear()
    feed = make_feed(teacher, clock=lambda: now[0])
    kept = 0

    def drop():
        nonlocal kept
        kept -= 1

    for _ in range(50):
        batch = batch_of([True])
        batch.new["feature.x"] = np.zeros(9, np.float32)
        weakref.finalize(batch.new["feature.x"], drop)
        kept += 1
        feed.foresee(batch.new)
        now[0] += 100.0
        feed.take(batch, ())
    del batch
    gc.collect()
    assert kept == 2
    assert (feed.report()["teacher"].rows["late"], feed.report()["teacher"].rows["unasked"]) == (2, 48)
    assert not feed.report()["teacher"].up
    assert "is still at 2 batches for which no step waits any more; until it answers again" in feed.warning
    teacher.blocked.set()
    wait_until(lambda: not kept)
    now[0] += 100.0
    for _ in range(2):  # the trial, and what follows once it is answered
        feed.foresee((batch := batch_of([True])).new)
        wait_until(lambda: feed.report()["teacher"].up)
        feed.take(batch, ())
    assert feed.report()["teacher"].rows["answered"] >= 1
    assert feed.warning is None


def test_batches_that_still_waited_when_their_step_went_on_are_not_sent(make_feed):
    teacher, now = FakeTeacher(timeout=timedelta(seconds=1)), [0.0]
    teacher.blocked.clear()
    feed = make_feed(teacher, clock=lambda: now[0])
    batches = [batch_of([True]) for _ in range(4)]
    for batch in batches:
        feed.foresee(batch.new)
    now[0] = 5.0
    for batch in batches:
        feed.take(batch, ())
    teacher.blocked.set()
    feed.close()
    assert (teacher.asked, feed.report()["teacher"].rows["late"]) == (1, 4)


def test_the_wait_is_counted_from_when_the_events_were_sent(make_feed):
    teacher, now = FakeTeacher(timeout=timedelta(seconds=5)), [0.0]
    teacher.blocked.clear()
    feed, batch = make_feed(teacher, clock=lambda: now[0]), batch_of([True])
    feed.foresee(batch.new)
    now[0] = 5.0
    feed.take(batch, ())  # returns at once
    assert feed.report()["teacher"].rows["late"] == 1
    assert feed.report()["teacher"].waited_seconds == 0


def test_events_without_label_and_output_are_skipped_and_counted(make_feed):
    teacher = FakeTeacher()
    teacher.output = np.array([[1.0, 1.0], [np.nan, 1.0], [1.0, 1.0], [1.0, np.nan]], np.float32)
    feed, batch = make_feed(teacher, unlabelled=True), batch_of([True, True, False, False])
    feed.take(batch, ())
    assert batch.new["offset"].tolist() == [0, 1, 2]
    assert np.isnan(batch.new["teacher"]).any(axis=1).tolist() == [False, True, False]
    (span,) = batch.spans
    assert span.columns["outcome"].tolist() == [0, 0, 0, Outcome.SKIPPED]
    assert span.columns["reason"].tolist() == [0, 0, 0, SkipReason.UNTAUGHT]
    assert feed.report()["teacher"].rows == {"answered": 2, "unusable": 2}


def test_a_teacher_that_fails_is_away_until_one_batch_after_the_back_off_is_answered(make_feed):
    teacher, now = FakeTeacher(), [0.0]
    feed = make_feed(teacher, unlabelled=True, clock=lambda: now[0])
    teacher.failure = "the teacher at http://x:1 cannot be reached: Connection refused"
    feed.take(batch_of([True]), ())
    assert feed.report()["teacher"].rows["failed"] == 1
    assert not feed.report()["teacher"].up
    assert feed.warning == (
        "the teacher at http://x:1 cannot be reached: Connection refused; until it answers again events are learned "
        "from by their labels alone, and those without one are skipped, counted as untaught"
    )
    feed.take(batch_of([True, False]), ())
    assert (teacher.asked, feed.report()["teacher"].rows["unasked"]) == (1, 2), "it is not asked during the back-off"

    now[0] = 1.0
    teacher.failure = None
    teacher.blocked.clear()
    trial, others = batch_of([True]), batch_of([True])
    feed.foresee(trial.new)
    feed.foresee(others.new)
    feed.take(trial, ())  # no step waits for a trial
    feed.take(others, ())
    assert (feed.report()["teacher"].rows["late"], feed.report()["teacher"].rows["unasked"]) == (1, 3)
    teacher.blocked.set()
    feed._threads[0].wait()
    assert (feed.report()["teacher"].up, feed.warning, teacher.asked) == (True, None, 2)
    feed.take(batch_of([True]), ())
    assert feed.report()["teacher"].rows["answered"] == 1


def test_batches_that_were_sent_before_a_failure_do_not_wait_for_their_own(make_feed):
    teacher = FakeTeacher()
    teacher.failure, batches = "away", [batch_of([True]) for _ in range(4)]
    teacher.blocked.clear()
    feed = make_feed(teacher)
    for batch in batches:
        feed.foresee(batch.new)
    teacher.blocked.set()
    for batch in batches:
        feed.take(batch, ())
    assert (teacher.asked, feed.report()["teacher"].rows["failed"]) == (1, 4)


def test_the_pause_between_trials_doubles_up_to_half_a_minute(make_feed):
    teacher, now = FakeTeacher(threads=0), [0.0]
    teacher.failure = "away"
    feed, pauses = make_feed(teacher, clock=lambda: now[0]), []
    for _ in range(12):
        before, asked = now[0], teacher.asked
        while teacher.asked == asked:
            now[0] += 0.25
            feed.take(batch_of([True]), ())
        pauses.append(now[0] - before)
    assert pauses[1] <= 1.25
    assert 15 <= pauses[-1] <= 30.25


def test_an_error_of_our_own_ends_the_learner(make_feed):
    teacher = FakeTeacher()
    teacher.output = np.zeros(7, np.float32)  # does not fit
    feed, batch = make_feed(teacher), batch_of([True])
    with pytest.raises(ValueError, match="broadcast"):
        feed.take(batch, ())
