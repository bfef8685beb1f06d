"""What is decoded alone, what is not decoded, and what is marked meanwhile."""

import mmap
import signal

import pytest

from anabranch.ingest.errors import HistoryAwayError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.transport.decoding_mark import MARK_BYTES, DecodingMark, OffsetRange
from anabranch.ingest.worker.decoding_limits import REFUSED, DecodingLimits

A, B = TopicPartition("events", 0), TopicPartition("events", 1)
INDEX = {A: 0, B: 1}


def mark():
    return DecodingMark(memoryview(mmap.mmap(-1, MARK_BYTES)))


def messages(partition, *offsets):
    n = len(offsets)
    return Messages(partition, list(offsets), [0] * n, [None] * n, [b"x"] * n, [()] * n, offsets[-1] + 5)


def split(limits, *portion):
    return [[offset for each in part for offset in each.offsets] for part in limits.split(portion, INDEX)]


@pytest.mark.parametrize(
    ("suspects", "parts"),
    [
        ([], [[1, 3, 4, 9, 7, 8]]),
        ([OffsetRange(0, 3, 5)], [[1], [3], [4], [9], [7, 8]]),
        ([OffsetRange(0, 0, 2), OffsetRange(1, 8, 20)], [[1], [3, 4, 9], [7], [8]]),
        ([OffsetRange(0, 20, 30)], [[1, 3, 4, 9], [7, 8]]),
    ],
)
def test_suspects_are_decoded_alone_in_the_order_of_the_offsets(suspects, parts):
    assert split(DecodingLimits(mark(), suspects), messages(A, 1, 3, 4, 9), messages(B, 7, 8)) == parts


def test_the_end_after_the_last_message_stays_with_it():
    parts = list(DecodingLimits(mark(), [OffsetRange(0, 3, 5)]).split([messages(A, 1, 3, 4)], INDEX))
    assert [part[0].end for part in parts] == [3, 4, 9]


def test_refused_offsets_have_a_fault_and_keep_what_they_hold():
    limits = DecodingLimits(mark(), (), [(1, 8)])
    assert not limits.refusing(messages(A, 7, 8), 0).faults
    refused = limits.refusing(messages(B, 7, 8), 1)
    assert (refused.faults, refused.values) == ({1: REFUSED}, [b"x", b"x"])


def test_what_is_decoded_is_marked_and_stays_marked_after_an_exception():
    shared = mark()
    limits = DecodingLimits(shared)
    with limits.decoding([(messages(A, 3, 4), 0), (messages(B, 7), 1)]):
        assert shared.read() == [(0, 3, 5), (1, 7, 8)]
    assert shared.read() == []
    with pytest.raises(MemoryError), limits.decoding([(messages(B, 7), 1)]):
        raise MemoryError
    assert shared.read() == [(1, 7, 8)]


def test_the_limit_of_cpu_time_ends_with_the_block():
    with DecodingLimits(mark(), has_limit=True).decoding([(messages(A, 3), 0)]):
        assert 0 < signal.getitimer(signal.ITIMER_PROF)[0] <= 6
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_an_error_that_is_handled_clears_the_mark():
    shared = mark()
    with DecodingLimits(shared).reading_files(0, 7):
        assert shared.read() == [(0, 7, 7)]
    with pytest.raises(HistoryAwayError), DecodingLimits(shared).reading_files(0, 7):
        raise HistoryAwayError
    assert shared.read() == []
