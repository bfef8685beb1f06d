"""Which offsets an error of a fetched batch is about, for batches as brokers keep them: compacted, damaged, old."""

import functools
import struct
from typing import Any

import pytest
from kafka import TopicPartition
from kafka.record.memory_records import MemoryRecords, MemoryRecordsBuilder

from anabranch.ingest.kafka.kafka_python.records import UnreadableError, _Records

GZIP, LZ4 = 1, 3
MOST = 10_000
MARK = b"the value"


def batch(offsets, value=MARK, codec=0, magic=2):
    builder = MemoryRecordsBuilder(magic, codec, 10**8, offset=0 if magic == 1 and codec else offsets[0])
    for index, offset in enumerate(offsets):
        builder.skip(offset - (offsets[index - 1] + 1 if index else offset))
        builder.append(timestamp=1_000 + index, key=None, value=value, headers=[])
    builder.close()
    written = bytes(builder.buffer())
    if magic == 1 and codec:
        # The broker gives the message around the others the offset of the last, and those of them count from 0.
        return struct.pack(">q", offsets[-1]) + written[8:]
    return written


def read(data, begin=0, *, check_crcs=True):
    """Return the offsets that come, and the error that follows them."""
    make: Any = functools.partial(_Records, MOST)
    records = make(begin, TopicPartition("events", 0), MemoryRecords(data), check_crcs=check_crcs)
    found: list[int] = []
    try:
        while part := records.take(2):
            found += [record.offset for record in part]
    except UnreadableError as exc:
        return found, exc
    return found, None


@pytest.mark.parametrize("magic", [1, 2])
@pytest.mark.parametrize("codec", [0, GZIP, LZ4])
def test_batches_within_the_bound_are_read(magic, codec):
    data = batch([0, 1, 2], codec=codec, magic=magic) + batch([3], codec=codec, magic=magic)
    assert read(data) == ([0, 1, 2, 3], None)


@pytest.mark.parametrize("magic", [1, 2])
@pytest.mark.parametrize("codec", [GZIP, LZ4])
@pytest.mark.parametrize("begin", [0, 4])
def test_an_error_names_the_offsets_of_a_batch_beyond_the_bound(magic, codec, begin):
    data = batch([0, 1]) + batch([2, 3, 4, 5], bytes(MOST), codec, magic) + batch([6])
    found, error = read(data, begin)
    assert found == [0, 1][begin:]
    assert error is not None
    assert (error.begin, error.end) == (max(2, begin), 6)
    assert error.reason.startswith("too-large")


def test_an_error_names_as_many_offsets_of_a_compacted_batch_as_it_has_records():
    found, error = read(batch([0]) + batch([1, 5, 9], bytes(MOST), GZIP))
    assert found == [0]
    assert error is not None
    assert (error.begin, error.end, error.time_ms) == (7, 10, 1_002)


def test_without_a_checksum_an_error_names_the_offsets_from_the_first_bad_record_on():
    data = batch([0, 1, 2, 3])
    position = data.rindex(MARK) - 1  # the length of the last value
    damaged = data[:position] + b"\x7f" + data[position + 1 :]
    found, error = read(damaged, check_crcs=False)
    assert found == [0, 1, 2]
    assert error is not None
    assert (error.begin, error.end) == (3, 4)
    assert error.reason.startswith("corrupt")


def test_an_error_of_a_wrong_checksum_has_no_end_since_the_batch_may_be_good_when_fetched_again():
    found, error = read(batch([0, 1]) + batch([2, 3]).replace(MARK, b"other one"))
    assert found == [0, 1]
    assert error is not None
    assert (error.begin, error.end) == (2, None)
    assert error.reason.startswith("corrupt")


def test_data_that_do_not_match_their_codec_are_corrupt():
    data = batch([0, 1], bytes(100), GZIP)
    begin = data.index(b"\x1f\x8b")
    found, error = read(data[:begin] + b"\0\0" + data[begin + 2 :], check_crcs=False)
    assert found == []
    assert error is not None
    assert (error.begin, error.end) == (0, 2)
    assert "BadGzipFile" in error.reason
