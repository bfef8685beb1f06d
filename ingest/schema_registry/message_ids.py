"""Where a message has the id of its writer schema: before the record, or in a header.

An id is a byte 0 and four bytes of a number, or a byte 1 and the 16 bytes of a GUID. In Protobuf, the indexes that lead
to the message type in its file follow the id.
"""

import uuid
from collections.abc import Sequence
from typing import NamedTuple

HEADER = "__value_schema_id"
_NUMBER, _GUID = 0, 1
_LENGTHS = {_NUMBER: 5, _GUID: 17}
_LARGEST_NUMBER = 2**31 - 1
"""Registries number schemas from 1, as signed integers of 32 bits."""
_MOST_INDEXES = 32
"""Message types of Protobuf can be nested this deep."""
FIRST_MESSAGE = (0,)
"""The indexes of the first message type of a file, which are written as a single 0."""


class SchemaIdError(ValueError):
    """A message whose schema id cannot be read."""


class Located(NamedTuple):
    """The id of a message's writer schema: a number, a GUID, or None where it has none; and where its record begins."""

    id: int | str | None
    indexes: tuple[int, ...]
    begin: int


def locate(value: bytes, headers: Sequence[tuple[str, bytes]], *, has_indexes: bool) -> Located:
    """Return the schema id of a message; one in a header comes before one in the value.

    `has_indexes`: message indexes follow the id, as they do in Protobuf; without an id they are `FIRST_MESSAGE`.

    Raises:
        SchemaIdError: the id begins, and is not complete, or no registry can have it.
    """
    for name, header in headers:
        if name == HEADER:
            found = _read(header, has_indexes=has_indexes)
            if found.id is None:
                raise SchemaIdError(f"the header {HEADER} does not begin with a byte 0 or 1")
            return Located(found.id, found.indexes, 0)
    return _read(value, has_indexes=has_indexes)


def _read(data: bytes, *, has_indexes: bool) -> Located:
    form = data[0] if data else None
    length = _LENGTHS.get(form) if form is not None else None
    if length is None:
        return Located(None, FIRST_MESSAGE, 0)
    if len(data) < length:
        raise SchemaIdError(f"the id of its schema has {len(data)} of {length} bytes")
    name = int.from_bytes(data[1:5]) if form == _NUMBER else str(uuid.UUID(bytes=data[1:17]))
    if isinstance(name, int) and name > _LARGEST_NUMBER:
        raise SchemaIdError(f"the id of its schema is {name}, and no registry has ids above {_LARGEST_NUMBER}")
    indexes, begin = _indexes(data, length) if has_indexes else (FIRST_MESSAGE, length)
    return Located(name, indexes, begin)


def _indexes(data: bytes, begin: int) -> tuple[tuple[int, ...], int]:
    """Return the message indexes at `begin`, and where they end: their number, then each, as zigzag varints."""
    count, begin = _varint(data, begin)
    if not 0 <= count <= _MOST_INDEXES:
        raise SchemaIdError(f"{count} message indexes follow the id of its schema")
    indexes = []
    for _ in range(count):
        index, begin = _varint(data, begin)
        indexes.append(index)
    return tuple(indexes) or FIRST_MESSAGE, begin


def _varint(data: bytes, begin: int) -> tuple[int, int]:
    """Return a zigzag varint of at most 32 bits, and where it ends."""
    number = 0
    for at, byte in enumerate(data[begin : begin + 5]):
        number |= (byte & 0x7F) << (7 * at)
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), begin + at + 1
    raise SchemaIdError("the message indexes after the id of its schema are not complete")
