"""Parses the records that kafka-python fetched, with size limits, and with errors that name the offsets.

kafka-python itself decompresses without a limit, passes on all errors of a codec, and reads the same record again
without end.
"""

import functools
import time
from collections.abc import Iterator
from typing import Any

from kafka.consumer.fetcher import Fetcher
from kafka.errors import CorruptRecordError, UnsupportedCodecError
from kafka.record.default_records import DefaultRecord
from kafka.record.util import decode_varint

from anabranch.ingest.kafka.diagnostics import damaged, too_large
from anabranch.ingest.kafka.kafka_python.decompression import InflatedTooLargeError, inflate


class UnreadableError(CorruptRecordError):  # type: ignore[misc]
    """Records that cannot be read: those from `begin` on and before `end`.

    Where `end` is None, the batch has another checksum than its contents, and may be good when it is fetched again.
    """

    def __init__(self, sentence: str, partition: Any, begin: int, end: int | None, time_ms: int, reason: str) -> None:
        super().__init__(sentence)
        self.partition = partition
        self.begin = begin
        self.end = end
        self.time_ms = time_ms
        self.reason = reason


class ReplacedNames(list[tuple[str, bytes]]):
    """Headers of which some had a name that is not UTF-8."""


def bound(consumer: Any, limit: int) -> None:
    """Bound batches of a kafka-python consumer by `limit` decompressed bytes; a larger one raises UnreadableError."""
    consumer._fetcher.PartitionRecords = functools.partial(_Records, limit)


def records_of(partition: Any, records: Any, limit: int) -> Any:
    """Return the records of an answer that was made here, from offset 0 on, parsed as `bound` has those of a broker."""
    return _Records(limit, 0, partition, records)


class _Records(Fetcher.PartitionRecords):  # type: ignore[misc]
    """The records of one answer for one partition."""

    def __init__(self, limit: int, *arguments: Any, **options: Any) -> None:
        self._limit = limit
        super().__init__(*arguments, **options)

    def _unpack_records(self, tp: Any, records: Any, *deserializers: Any) -> Iterator[Any]:
        batches = _Batches(records, self._limit)
        try:
            yield from super()._unpack_records(tp, batches, *deserializers)
        except (UnsupportedCodecError, MemoryError):
            raise  # no fault of the batch
        except Exception as exc:
            raise self._unreadable(batches.last, exc) from exc

    def _unreadable(self, batch: "_Batch | None", exc: Exception) -> UnreadableError:
        sentence = f"{type(exc).__name__}: {exc}"
        begin, end, time_ms = max(self.fetch_offset, self.next_fetch_offset), None, int(time.time() * 1000)
        reason = too_large(self._limit) if isinstance(exc, InflatedTooLargeError) else damaged(sentence)
        if batch is not None and (batch.sound or not self.check_crcs) and batch.end >= begin:
            end = batch.end
            # Compaction may have left fewer records than the batch has offsets.
            begin, time_ms = max(begin, end - batch.left), batch.time_ms
        return UnreadableError(sentence, self.topic_partition, begin, end, time_ms, reason)


class _Batches:
    """kafka-python's MemoryRecords, whose batches are bounded."""

    def __init__(self, theirs: Any, limit: int) -> None:
        self._theirs = theirs
        self._limit = limit
        self.last: _Batch | None = None
        """The batch that is being read."""

    def next_batch(self) -> "_Batch | None":
        self.last = None
        batch = self._theirs.next_batch()
        self.last = None if batch is None else _Batch(batch, self._limit)
        return self.last


class _Batch:
    """Replaces a batch of kafka-python."""

    def __init__(self, theirs: Any, limit: int) -> None:
        self._theirs = theirs
        self._limit = limit
        self.sound = False
        """Whether its checksum was compared and fits."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def __next__(self) -> Any:
        return next(self._theirs)

    def __iter__(self) -> Iterator[Any]:
        theirs = self._theirs
        if theirs.compression_type:
            self._inflate()
        while True:
            try:
                yield from theirs
            except CorruptRecordError as exc:
                if not isinstance(exc.__context__, UnicodeDecodeError):
                    raise
            else:
                return
            yield _with_replaced_names(theirs)

    @property
    def end(self) -> int:
        """The first offset after it; a compressed batch of the old formats has the offset of its last record."""
        return int(self._theirs.next_offset if self._theirs.magic == 2 else self._theirs.base_offset + 1)

    @property
    def left(self) -> int:
        """How many records are still to be read, at most."""
        if self._theirs.magic == 2:
            return int(self._theirs.records_count) - int(self._theirs._next_record_index)
        return self.end

    @property
    def time_ms(self) -> int:
        """The newest record's timestamp, by the header of the batch."""
        return int(self._theirs.max_timestamp if self._theirs.magic == 2 else self._theirs._timestamp or 0)

    def validate_crc(self) -> bool:
        self.sound = bool(self._theirs.validate_crc())
        return self.sound

    def _inflate(self) -> None:
        theirs = self._theirs
        theirs._assert_has_codec(theirs.compression_type)
        if theirs.magic == 2:
            if not theirs._decompressed:
                data = bytes(memoryview(theirs._buffer)[theirs._pos :])
                theirs._buffer, theirs._pos = inflate(theirs.compression_type, data, self._limit), 0
                theirs._decompressed = True
        else:
            # Of the old formats, which current brokers do not write, only the size is checked beforehand.
            key, value = theirs._read_key_value(theirs.KEY_OFFSET_V1 if theirs.magic else theirs.KEY_OFFSET_V0)
            del key
            if theirs.magic or theirs.compression_type != theirs.CODEC_LZ4:
                inflate(theirs.compression_type, value or b"", self._limit)


def _with_replaced_names(batch: Any) -> Any:
    """Return the next record of a batch of format 2, and each header; names that are not UTF-8 have U+FFFD in them."""
    buffer, pos = batch._buffer, batch._pos

    def number() -> int:
        nonlocal pos
        found, pos = decode_varint(buffer, pos)
        return int(found)

    def field() -> bytes | None:
        nonlocal pos
        length = number()
        if length < 0:
            return None
        pos += length
        return bytes(buffer[pos - length : pos])

    length = number()
    end = pos + length
    number()  # attributes, of which there are none
    delta, offset = number(), batch.base_offset + number()
    stamped = batch.timestamp_type == batch.LOG_APPEND_TIME
    timestamp = batch.max_timestamp if stamped else batch.first_timestamp + delta
    key, value = field(), field()
    headers = ReplacedNames()
    for _ in range(number()):
        name, content = field(), field()
        headers.append(((name or b"").decode(errors="replace"), content))  # type: ignore[arg-type]
    if pos != end:
        raise CorruptRecordError(f"a record of {length} bytes at offset {offset} ends elsewhere")
    batch._pos, batch._next_record_index = pos, batch._next_record_index + 1
    return DefaultRecord(length, offset, timestamp, batch.timestamp_type, key, value, headers)
