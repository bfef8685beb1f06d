"""Decodes Protobuf records one by one, with the Protobuf runtime.

Legend: M records.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Decoded, Reject, nested
from anabranch.ingest.formats.event_structs import dict_decoder
from anabranch.ingest.formats.protobuf_schema.descriptors import message_type
from anabranch.ingest.formats.protobuf_schema.fields import TIMESTAMP, WRAPPERS, ReadField, ReadType
from anabranch.ingest.schema_registry.writer_schema import WriterSchema


class ProtobufRecords:
    """Decodes records of one message type."""

    def __init__(self, read: ReadType, schema: Schema) -> None:
        self._read = read
        self._parse: Any = GetMessageClass(read.message).FromString
        self._parse_many: Any = GetMessageClass(read.messages).FromString
        self._decoder = dict_decoder(schema)

    def decode(self, records: Sequence[bytes]) -> Decoded:
        """Decode M records, each one event or a reject."""
        events: list[dict[str, Any]] = []
        readable: list[int] = []
        for index, record in enumerate(records):
            try:
                message = self._parse(record)
            except DecodeError:
                continue
            events.append({field.declared.name: _value(field, message) for field in self._read.fields})
            readable.append(index)
        decoded = self._decoder.decode(events).at(np.array(readable, np.int32))
        unreadable = unreadable_rejects(set(range(len(records))).difference(readable))
        return replace(
            decoded,
            rejects=sorted([*decoded.rejects, *unreadable]),
            unknown_fields=len(readable) if self._read.has_unknown else 0,
        )

    def unreadable(self, records: Sequence[bytes]) -> set[int]:
        """Return the indexes of records that are not Protobuf messages.

        All are first parsed as one message that has them in a field, which takes a fifth of the time.
        """
        found: set[int] = set()
        try:
            self._parse_many(b"".join(chain.from_iterable((_prefix(len(each)), each) for each in records)))
        except DecodeError:
            pass
        else:
            return found
        for index, record in enumerate(records):
            try:
                self._parse(record)
            except DecodeError:
                found.add(index)
        return found


@functools.lru_cache(maxsize=4096)
def _prefix(length: int) -> bytes:
    """Return what precedes a message of this many bytes in field 1: the field's tag, and the length as a varint."""
    prefix = bytearray(b"\x0a")
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix)


def unreadable_rejects(indexes: set[int]) -> list[Reject]:
    """Return rejects for records that are not Protobuf messages."""
    return [Reject(index, WHOLE_MESSAGE, "schema: it is not a Protobuf message") for index in sorted(indexes)]


def _value(field: ReadField, message: Any) -> Any:
    """Return the value of a field as JSON would have it; None if it is missing."""
    *outer, name = field.steps
    for each in outer:
        if not message.HasField(each):
            return None
        message = getattr(message, each)
    if field.presence and not message.HasField(name):
        return None
    value = getattr(message, name)
    if field.form == "timestamp":
        return field.declared.of_seconds(value.seconds + value.nanos / 1e9)
    if field.form == "wrapper":
        value = value.value
    elif field.form == "list":
        values = list(value) if field.words is None else [field.word(number) for number in value]
        return values if field.declared.is_label else nested(values, field.declared.shape) or None
    if field.words is not None:
        value = field.word(value)
    if value == field.missing:
        return None
    return int(value) if field.scalar == "bool" and field.declared.is_label else value


def reader_of(writer: WriterSchema, indexes: Sequence[int]) -> Callable[[bytes], dict[str, Any]]:
    """Return what makes a document of a record, with all fields: times as such, and None for what no field can be.

    Raises UnfitSchemaError where the schema cannot be read; what is returned raises DecodeError.
    """
    parse: Any = GetMessageClass(message_type(writer, indexes)).FromString
    return lambda record: _document(parse(record))


def _document(message: Any) -> dict[str, Any]:
    return {field.name: _any_value(message, field) for field in message.DESCRIPTOR.fields}


def _any_value(message: Any, field: Any) -> Any:
    """Return the value of any field as JSON would have it; None if it is missing, or no feature can be made of it."""
    if field.type == field.TYPE_BYTES or (field.has_presence and not message.HasField(field.name)):
        return None
    value = getattr(message, field.name)
    if field.is_repeated:
        return list(value) or None if field.message_type is None and field.enum_type is None else None
    if field.message_type is None:
        named = field.enum_type and field.enum_type.values_by_number.get(value)
        return named.name if named else value
    if field.message_type.full_name == TIMESTAMP:
        return datetime.fromtimestamp(value.seconds + value.nanos / 1e9, UTC)
    return value.value if field.message_type.full_name in WRAPPERS else _document(value)
