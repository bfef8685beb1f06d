"""Avro record after record, by fastavro.

Each record is decoded with a number after it, and what is read there is compared with that number: neither fastavro nor
pyruhvro notices bytes that follow a record, and fastavro skips fields beyond the end.
"""

import json
import math
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from io import SEEK_CUR, SEEK_SET, BytesIO
from typing import Any

import fastavro
import numpy as np
from fastavro.schema import SchemaParseException
from typing_extensions import override

from anabranch.ingest.events.schema import UNITS
from anabranch.ingest.formats.avro_records.fields import AvroReading
from anabranch.ingest.formats.avro_records.schema import TIMESTAMPS, AvroType, parse_avro, written
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Decoded, Reject
from anabranch.ingest.formats.event_structs import dict_decoder
from anabranch.ingest.schema_registry.writer_schema import UnfitSchemaError, WriterSchema

END = 1 + secrets.randbits(52) / 2**52
"""The number after each record; random, so that a message cannot contain it."""
END_BYTES = struct.pack("<d", END)
END_FIELD = "end"
FOLLOWED = "bytes follow the record; it was written with another schema than its id says, or is damaged"


class _Record(BytesIO):
    """A record of which fields are skipped: raises EOFError at its end, and where fastavro would go back.

    fastavro itself skips as many values as a damaged array claims, up to 2^62, without noticing that there are no bytes
    left. What it reads, it checks.
    """

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        if len(found) != size:
            raise EOFError
        return found

    @override
    def seek(self, offset: int, whence: int = SEEK_SET, /) -> int:
        if whence != SEEK_CUR or offset < 0:
            raise EOFError
        self.read(offset)
        return self.tell()


class AvroRowsDecoder:
    """Decodes one record after the other; fields that are not read are skipped."""

    def __init__(self, reading: AvroReading) -> None:
        """Raise UnfitSchemaError where the writer schema breaks a rule of Avro, such as one for names."""
        self._reading = reading
        record = reading.record
        try:
            self._writer, self._reader = (
                fastavro.parse_schema(json.loads(written(record, names, END_FIELD, for_columns=False)))
                for names in (record.fields, reading.outermost)
            )
        except (SchemaParseException, ValueError) as exc:
            raise UnfitSchemaError(f"its Avro schema cannot be used: {exc}") from exc
        self._open: type[BytesIO] = BytesIO if set(reading.outermost) == set(record.fields) else _Record
        self._steps = [(name, reading.steps(name)) for name in reading.fields]
        units = {each.name: each.unit for each in reading.schema.features} | {
            reading.schema.time: reading.schema.time_unit
        }
        self._times = [(name, UNITS[units[name]][0] / TIMESTAMPS[logical]) for name, logical in reading.times.items()]
        self._whole = {each.name for each in reading.schema.features if each.is_time and each.dtype.kind != "f"}
        self._shapes = {f.name: f.shape for f in reading.schema.features if len(f.shape) > 1}
        self._decoder = dict_decoder(reading.schema)

    def decode(self, records: Sequence[bytes]) -> Decoded:
        """Decode M records, each one event or a reject."""
        events: list[dict[str, Any]] = []
        rejects: list[Reject] = []
        read: list[int] = []
        for index, record in enumerate(records):
            try:
                event: Any = fastavro.schemaless_reader(self._open(record + END_BYTES), self._writer, self._reader)
                if event[END_FIELD] != END:
                    rejects.append(Reject(index, WHOLE_MESSAGE, f"schema: {FOLLOWED}"))
                    continue
                events.append(self._event(event))
            except MemoryError:
                raise
            except Exception as exc:  # noqa: BLE001 fastavro raises many kinds for a damaged record
                # Of the end of a record and of wrong branches, fastavro's own words say nothing.
                why = {EOFError: "it ends too early", IndexError: "it has a wrong index"}.get(type(exc), str(exc))
                rejects.append(Reject(index, WHOLE_MESSAGE, f"schema: the record cannot be read: {why}"))
                continue
            read.append(index)
        decoded = self._decoder.decode(events).at(np.array(read, np.int32))
        unknown = len(records) if self._reading.has_unknown else 0
        return replace(decoded, rejects=sorted([*decoded.rejects, *rejects]), unknown_fields=unknown)

    def _event(self, record: dict[str, Any]) -> dict[str, Any]:
        event = {name: _value_at(record, steps) for name, steps in self._steps}
        schema = self._reading.schema
        for name, factor in self._times:
            event[name] = _scaled(event[name], factor, whole=name in self._whole)
        if self._reading.is_label_boolean and event[schema.label.name] is not None:
            event[schema.label.name] = int(event[schema.label.name])
        for name, value in event.items():
            if isinstance(value, Decimal):
                event[name] = float(value)
        for name, shape in self._shapes.items():
            value = event.get(name)
            if isinstance(value, list) and not (value and isinstance(value[0], list)):
                event[name] = _nested(value, shape)
        return event


def reader_of(writer: WriterSchema) -> Callable[[bytes], dict[str, Any]]:
    """Return what makes a document of a record, with all fields: times as such, and None for what no field can be.

    Raises UnfitSchemaError where the schema cannot be read; what is returned raises many kinds for a damaged record.
    """
    record = parse_avro(writer)
    try:
        schema = fastavro.parse_schema(json.loads(written(record, record.fields, END_FIELD, for_columns=False)))
    except (SchemaParseException, ValueError) as exc:
        raise UnfitSchemaError(f"its Avro schema cannot be used: {exc}") from exc

    def read(content: bytes) -> dict[str, Any]:
        event: Any = fastavro.schemaless_reader(BytesIO(content + END_BYTES), schema, None)
        if event[END_FIELD] != END:
            raise ValueError(FOLLOWED)
        return {name: _document(part, event[f"f{i}"]) for i, (name, part) in enumerate(_parts(record))}

    return read


def _parts(record: AvroType) -> Iterator[tuple[str, AvroType]]:
    return zip(record.fields, record.parts, strict=True)


def _document(kind: AvroType, value: Any) -> Any:
    """Return a value as a message of JSON would have it."""
    if kind.kind == "union":
        (kind, *others) = kind.without_null() or (kind,)
        if others:
            return None if isinstance(value, dict | list | bytes) else value
    if value is None or (kind.kind in ("map", "bytes", "fixed") and not isinstance(value, Decimal)):
        return None
    if kind.kind == "record":
        return {name: _document(part, value[f"f{i}"]) for i, (name, part) in enumerate(_parts(kind))}
    if kind.kind == "array":
        return [_document(kind.parts[0], each) for each in value]
    return datetime.fromtimestamp(value / TIMESTAMPS[kind.logical], UTC) if kind.logical in TIMESTAMPS else value


def _value_at(record: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        if record is None:
            return None
        record = record[step]
    return record


def _scaled(time: Any, factor: float, *, whole: bool) -> Any:
    """Return a time, or those of a list, in other units."""
    if isinstance(time, list):
        return [_scaled(each, factor, whole=whole) for each in time]
    if not isinstance(time, int | float):
        return time
    return math.floor(time * factor) if whole else time * factor


def _nested(flat: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Return one list of all values as nested lists, where their number is that of the shape."""
    if math.prod(shape) != len(flat):
        return flat
    for size in reversed(shape[1:]):
        flat = [flat[at : at + size] for at in range(0, len(flat), size)]
    return flat
