"""Reads from an Arrow IPC stream's metadata how much it holds, before anything is allocated.

A reader allocates what compressed buffers claim, copies a dictionary at each delta, and accepts a column of nulls of
any length: a small message could allocate any amount of memory. The metadata are flatbuffers (Arrow columnar format,
IPC).
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

_CONTINUATION = 0xFFFFFFFF
_VERSION_5 = 4
_SCHEMA, _DICTIONARY, _RECORDS = 1, 2, 3
_MOST_PARTS = 64
_MALFORMED = "malformed Arrow IPC stream"


class UnfitError(ValueError):
    """A message that cannot be used, with the reason for its dead letter."""


class Claims(NamedTuple):
    """The sizes that a stream's metadata give."""

    schema: bytes
    """The first part of the stream: streams with equal first parts have the same schema."""
    rows: int
    inflated_bytes: int
    """Bytes of the compressed buffers once they are decompressed."""


class _Part(NamedTuple):
    """The schema, a dictionary or a record batch."""

    kind: int
    body_bytes: int
    rows: int
    compressed: Sequence[tuple[int, int]]


def claims(stream: bytes) -> Claims:
    """Read the metadata of all parts of a stream.

    Raises:
        UnfitError: it is no IPC stream, or one that is not taken: torn, of Arrow before 1.0, with dictionary deltas or
            in very many parts.
    """
    try:
        return _claims(stream)
    except struct.error:
        raise UnfitError(_MALFORMED) from None


def _claims(stream: bytes) -> Claims:
    schema, rows, inflated = b"", 0, 0
    for number, (begin, part, body) in enumerate(_parts(stream)):
        if (part.kind == _SCHEMA) != (number == 0):
            raise UnfitError("an Arrow IPC stream is a schema, dictionaries and record batches")
        if number == _MOST_PARTS:
            raise UnfitError(f"it has more than {_MOST_PARTS} parts; join its record batches")
        if part.kind == _SCHEMA:
            schema = stream[begin:body]
        rows += part.rows
        inflated += sum(_inflated(stream, body, part.compressed))
    if not schema:
        raise UnfitError("empty message")
    return Claims(schema, rows, inflated)


def _parts(stream: bytes) -> Iterator[tuple[int, _Part, int]]:
    """Yield where each part begins, what it is, and where its body begins."""
    begin = 0
    while begin < len(stream):
        mark, size = struct.unpack_from("<II", stream, begin)
        if mark != _CONTINUATION:
            raise UnfitError("it is no Arrow IPC stream, such as pyarrow.ipc.new_stream writes")
        if size == 0:
            if begin + 8 < len(stream):
                raise UnfitError("bytes follow the end of its Arrow IPC stream; send one stream a message")
            return
        body = begin + 8 + size
        part = _part(stream[begin + 8 : body])
        if body + part.body_bytes > len(stream):
            raise UnfitError("truncated Arrow IPC stream")
        yield begin, part, body
        begin = body + part.body_bytes


@lru_cache(16)
def _part(metadata: bytes) -> _Part:
    """Read the metadata of a part; cached, since small messages mostly have equal metadata."""
    message = _Table(metadata, _offset(metadata, 0))
    kind, offset, body_bytes = message.byte(1), message.offset(2), message.long(3)
    if message.short(0) != _VERSION_5:
        raise UnfitError("it was written in the format of Arrow before 1.0")
    if kind not in (_SCHEMA, _DICTIONARY, _RECORDS):
        raise UnfitError("an Arrow IPC stream is a schema, dictionaries and record batches")
    if kind == _SCHEMA:
        return _Part(kind, _natural(body_bytes), 0, ())
    batch = _Table(metadata, offset + _offset(metadata, offset))
    if kind == _DICTIONARY:
        if batch.byte(2):
            raise UnfitError("dictionary deltas are not taken; write each dictionary whole")
        offset = batch.offset(1)
        batch = _Table(metadata, offset + _offset(metadata, offset))
    rows = _natural(batch.long(0)) if kind == _RECORDS else 0
    compressed = _buffers(metadata, batch.offset(2)) if batch.offset(3) else ()
    return _Part(kind, _natural(body_bytes), rows, compressed)


def _buffers(metadata: bytes, offset: int) -> tuple[tuple[int, int], ...]:
    """Return the offset in the body and the length of each buffer."""
    vector = offset + _offset(metadata, offset)
    begin, end = vector + 4, vector + 4 + 16 * _offset(metadata, vector)
    if not offset or end > len(metadata):
        raise UnfitError(_MALFORMED)
    return tuple(struct.iter_unpack("<qq", metadata[begin:end]))


def _inflated(stream: bytes, body: int, buffers: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield the decompressed size of each buffer, from the 8 bytes before it; -1 there means not compressed."""
    for start, length in buffers:
        if length:
            if not 0 <= start < len(stream):
                raise UnfitError(_MALFORMED)
            (size,) = struct.unpack_from("<q", stream, body + start)
            yield length if size == -1 else _natural(size)


def _natural(number: int) -> int:
    if number < 0:
        raise UnfitError(_MALFORMED)
    return number


class _Table:
    """A flatbuffers table; fields that it leaves out are 0. Reading beyond the data is a struct.error."""

    def __init__(self, data: bytes, offset: int) -> None:
        (back,) = struct.unpack_from("<i", data, offset)
        self._data, self._begin, self._fields = data, offset, offset - back
        if self._fields < 0:
            raise UnfitError(_MALFORMED)
        (self._size,) = struct.unpack_from("<H", data, self._fields)

    def offset(self, field: int) -> int:
        """Return the offset of a field, or 0 if it is left out."""
        at = 4 + 2 * field
        if at + 2 > self._size:
            return 0
        (offset,) = struct.unpack_from("<H", self._data, self._fields + at)
        return self._begin + int(offset) if offset else 0

    def byte(self, field: int) -> int:
        return self._number("<B", field)

    def short(self, field: int) -> int:
        return self._number("<h", field)

    def long(self, field: int) -> int:
        return self._number("<q", field)

    def _number(self, kind: str, field: int) -> int:
        offset = self.offset(field)
        return int(struct.unpack_from(kind, self._data, offset)[0]) if offset else 0


def _offset(data: bytes, offset: int) -> int:
    return int(struct.unpack_from("<I", data, offset)[0])
