"""Bounds what a message may unfold into, before it is parsed: two bytes can be a message of fifty.

Reads the wire format of https://protobuf.dev/programming-guides/encoding far enough to count fields.
"""

from typing import Any

from anabranch.serving.errors import BadRequestError

_HARMLESS_BYTES = 65_536
"""A shorter message cannot unfold into much."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


def check_fields(body: bytes, descriptor: Any, most: int) -> None:
    """Raise BadRequestError where a message, with those in it, has more than `most` fields, or is malformed."""
    if len(body) > _HARMLESS_BYTES:
        _count(memoryview(body), descriptor, most, most)


def _count(view: memoryview, descriptor: Any, left: int, most: int) -> int:
    """Return how many of `left` fields are left after those of a message."""
    position, end = 0, len(view)
    while position < end:
        if not left:
            raise BadRequestError(
                f"the message has more than {most} fields; send elements packed, or fewer rows at once"
            )
        left -= 1
        tag, position = _varint(view, position)
        kind = tag & 7
        if kind == _VARINT:
            _, position = _varint(view, position)
        elif kind == _BYTES:
            size, position = _varint(view, position)
            field = descriptor.fields_by_number.get(tag >> 3)
            if field is not None and field.message_type is not None and position + size <= end:
                left = _count(view[position : position + size], field.message_type, left, most)
            position += size
        elif kind in (_FIXED32, _FIXED64):
            position += 4 if kind == _FIXED32 else 8
        else:
            raise BadRequestError("the message has fields of a kind that the protocol does not have")
    if position > end:
        raise BadRequestError("the message ends within a field")
    return left


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for index in range(_LONGEST_VARINT):
        if position >= len(view):
            raise BadRequestError("the message ends within a field")
        byte = view[position]
        position += 1
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, position
    raise BadRequestError("the message has a number of more than 64 bits")
