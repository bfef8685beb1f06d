"""Stream time of labels and events, lags of labels, and which partitions wait for others."""

from dataclasses import replace

import numpy as np
import pytest

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.extensions.late_labels.stream_times import AlignedReading, LabelClock, LabelLags, StreamTimes
from anabranch.learner.stream.ledger import Ledger

EVENTS, LABELS_0, LABELS_1 = TopicPartition("events", 0), TopicPartition("labels", 0), TopicPartition("labels", 1)
CLOCK = LabelClock(monotonic=lambda: 100.0, wall=lambda: 5_000.0)


def ledger(*positions):
    """Return the accounts of EVENTS, LABELS_0 and LABELS_1 at these positions."""
    accounts = Ledger()
    for name, position in zip((EVENTS, LABELS_0, LABELS_1), positions, strict=True):
        accounts.add_partition(name, 0)
        accounts.partitions[-1].position = Position(position)
    return accounts


def partitions(*ends):
    return [Partition(name, 0, end) for name, end in zip((EVENTS, LABELS_0, LABELS_1), ends, strict=True)]


def messages(partition, *time_ms):
    """Return rows of one message for each time."""
    n = len(time_ms)
    return {
        "partition": np.full(n, partition, np.int32),
        "row": np.zeros(n, np.int32),
        "time_ms": np.array(time_ms, np.int64),
    }


def steadily(times, partition, time_ms):
    """Add messages of one time."""
    times.add(messages(partition, *[time_ms] * 15))


@pytest.fixture
def times():
    times = StreamTimes(["labels"], CLOCK)
    for partition, time_ms in enumerate((7_000, 9_000, 8_000)):
        steadily(times, partition, time_ms)
    return times


def test_stream_time_is_the_lowest_of_the_partitions(times):
    assert times.now(partitions(9, 9, 9), ledger(1, 2, 1), 99.0) == (8_000, 7_000)


def test_a_partition_at_its_end_has_the_time_at_which_the_end_was_asked_for(times):
    asked = (5_000 - 1 - 2) * 1000  # a second ago, and two seconds for records on their way
    assert times.now(partitions(9, 9, 1), ledger(1, 2, 1), 99.0) == (9_000, 7_000)
    assert times.now(partitions(1, 2, 1), ledger(1, 2, 1), 99.0) == (asked, asked)
    assert times.now(partitions(1, 2, 1), ledger(1, 2, 1), None) == (8_000, 7_000)


def test_there_is_no_stream_time_before_each_partition_has_one():
    times = StreamTimes(["labels"], CLOCK)
    steadily(times, 0, 7_000)
    steadily(times, 1, 3_000)
    assert times.now(partitions(9, 9, None), ledger(1, 1, 0), 99.0) == (None, 7_000)


def test_a_topic_that_was_created_again_has_the_time_of_the_latest(times):
    accounts = ledger(1, 2, 1)
    accounts.add_partition(EVENTS.next_incarnation, 0)
    before, *labels = partitions(9, 9, 9)
    again = [replace(before, read=False), *labels, Partition(EVENTS.next_incarnation, 0, 9)]
    assert times.now(again, accounts, 99.0) == (8_000, None)
    steadily(times, 3, 1_000)
    assert times.now(again, accounts, 99.0) == (8_000, 1_000)


def test_a_partition_that_nobody_reads_holds_up_no_time(times):
    first, second, removed = partitions(9, 9, 1)
    assert times.now([first, second, replace(removed, read=False)], ledger(1, 2, 1), 99.0) == (9_000, 7_000)


def test_a_record_of_the_future_does_not_move_stream_time(times):
    wall_ms = 5_000_000
    steadily(times, 1, wall_ms + 20 * 3_600_000)
    steadily(times, 2, wall_ms + 60_001)
    assert times.now(partitions(9, 9, 9), ledger(1, 2, 1), 99.0) == (8_000, 7_000)
    steadily(times, 1, wall_ms + 60_000)
    steadily(times, 2, wall_ms + 60_000)
    assert times.now(partitions(9, 9, 9), ledger(1, 2, 1), 99.0) == (wall_ms, 7_000)


def test_one_message_with_a_wrong_time_does_not_move_stream_time(times):
    rows = messages(0, *[4_000_000] * 1000)
    times.add({**rows, "row": np.arange(1000, dtype=np.int32)})
    times.add(messages(1, 4_000_000))
    assert times.now(partitions(9, 9, 9), ledger(1, 2, 1), 99.0) == (8_000, 7_000)


def test_stream_time_goes_back_after_wrong_times(times):
    steadily(times, 0, 4_000_000)
    assert times.now(partitions(9, 9, 9), ledger(1, 2, 1), 99.0) == (8_000, 4_000_000)
    steadily(times, 0, 7_001)
    assert times.now(partitions(9, 9, 9), ledger(1, 2, 1), 99.0) == (8_000, 7_001)


def test_the_lag_of_labels_is_that_of_the_last_ones():
    lags = LabelLags()
    assert lags.quantiles() == (None, None)
    lags.add(np.arange(1, 100) * 1000)
    assert lags.quantiles() == pytest.approx((50.0, 98.02))
    restored = LabelLags()
    restored.add(np.array(lags.state()))
    assert restored.quantiles() == lags.quantiles()
    for _ in range(200):
        lags.add(np.full(100, 7_000))
    assert lags.quantiles() == (7.0, 7.0)


def test_checkpoints_have_the_last_lags():
    lags = LabelLags()
    lags.add(np.arange(20_000))
    assert lags.state() == list(range(20_000 - 1024, 20_000))


FULL, WAIT_MS = 0.5, 8_000


class Topics:
    """Partitions that end at offset 100, their positions and stream times."""

    def __init__(self, *names):
        self.partitions = [Partition(TopicPartition(name, 0, history=int(name == "file")), 0, 100) for name in names]
        self.ledger, self.now = Ledger(), 0.0
        for partition in self.partitions:
            self.ledger.add_partition(partition.name, 0)
        self.times = [0] * len(names)
        self.reading = AlignedReading(WAIT_MS, lambda: self.now)

    def ahead(self, taken=FULL):
        return set(self.reading.ahead(taken, self.partitions, self.ledger, self.times.__getitem__))

    def read(self, index, offset, time_ms):
        self.ledger.partitions[index].position, self.times[index] = Position(offset), time_ms


@pytest.fixture
def topics():
    topics = Topics("events", "labels")
    topics.read(0, 10, 1_000)
    topics.read(1, 10, 5_000)
    return topics


def test_a_topic_that_is_ahead_waits_until_the_other_is_as_far(topics):
    assert topics.ahead() == {1}
    topics.read(0, 20, 4_000)
    assert topics.ahead() == set()
    topics.read(0, 30, 7_000)
    assert topics.ahead() == {0}


def test_while_there_is_room_no_topic_waits(topics):
    assert topics.ahead(0.125) == set()
    assert topics.ahead(0.13) == {1}
    assert topics.ahead(0.07) == {1}
    assert topics.ahead(0.06) == set()
    assert topics.ahead(0.07) == set()


def test_a_topic_that_is_read_to_its_end_or_not_at_all_is_not_waited_for(topics):
    topics.read(0, 100, 1_000)
    assert topics.ahead() == set()
    topics.read(0, 10, 1_000)
    topics.partitions[0] = replace(topics.partitions[0], read=False)
    assert topics.ahead() == set()


def test_a_topic_whose_end_is_not_known_is_waited_for(topics):
    topics.partitions[0] = replace(topics.partitions[0], end=None)
    assert topics.ahead() == {1}


def test_a_topic_from_which_nothing_comes_is_waited_for_for_a_minute(topics):
    assert topics.ahead() == {1}
    topics.now = 59.0
    assert topics.ahead() == {1}
    topics.now = 60.0
    assert topics.ahead() == set()
    topics.read(0, 11, 1_000)
    assert topics.ahead() == {1}


def test_no_topic_waits_before_the_files_of_the_history_are_read():
    topics = Topics("file", "events", "labels")
    topics.read(2, 10, 90_000)
    assert topics.ahead() == set()
    topics.read(0, 100, 0)
    assert topics.ahead() == {2}
