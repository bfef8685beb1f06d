"""When retention removes records before the history is read."""

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.transport.protocol import HistoryProgress
from anabranch.ingest.worker.history_feed import RetentionWatch

P0, P1 = TopicPartition("events", 0), TopicPartition("events", 1)
NOW = 1_800_000_000.0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def progress(rows_done, *, done=False):
    return HistoryProgress(1, 0, 10_000, rows_done, done)


def test_removal_before_the_expected_end_is_a_problem_in_time():
    clock = Clock()
    watch = RetentionWatch({P0: NOW + 5000, P1: NOW + 500}, 0, clock, lambda: NOW + clock.now)
    assert watch.problem(progress(0)) is None
    clock.now = 1
    assert watch.problem(progress(1)) is None, "the rate is not known yet"
    clock.now = 10
    sentence = watch.problem(progress(100))
    assert sentence is not None
    assert sentence.startswith("retention removes the first records of events[1] that wait for the history about 2027-")
    assert "expected to last until 2027-" in sentence
    clock.now = 20
    assert watch.problem(progress(2000)) is None, "it became faster"
    clock.now = 400
    assert watch.problem(progress(2000)) is not None
    assert watch.problem(progress(10_000, done=True)) is None


def test_without_retention_there_is_no_problem():
    clock = Clock()
    watch = RetentionWatch({}, 0, clock, lambda: NOW)
    assert watch.problem(progress(0)) is None
    clock.now = 1e6
    assert watch.problem(progress(1)) is None
    assert watch.problem(None) is None
