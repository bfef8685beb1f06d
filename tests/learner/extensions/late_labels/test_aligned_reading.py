"""Which partitions wait for others, so that topics are read up to the same time."""

from dataclasses import replace

import pytest

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.extensions.late_labels.stream_times import AlignedReading
from anabranch.learner.stream.ledger import Ledger

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
