"""Messages with the id of a writer schema, and JSON for comparison: of four fields, and of 64 floats."""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fastavro
import numpy as np
from google.protobuf.message_factory import GetMessageClass

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.protobuf_schema.descriptors import message_type
from anabranch.ingest.schema_registry.cache import WriterSchemas
from anabranch.ingest.schema_registry.writer_schema import SchemaKind, WriterSchema
from anabranch.ingest.settings.formats import REGISTRY_FORMATS
from anabranch.ingest.settings.registry import RegistrySettings
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.worker.block_builder import BlockBuilder

_ID = 7
_PREFIX = b"\0" + _ID.to_bytes(4)
_WORDS = 200
"""Distinct strings of the event with four fields."""


@dataclass(frozen=True)
class Events:
    """A kind of event: the section `[schema]`, the writer schema's text in each format, and one event by number."""

    schema: Mapping[str, Any]
    writers: Mapping[str, str]
    event: Callable[[np.random.Generator, int], dict[str, Any]]


def _four(_: np.random.Generator, number: int) -> dict[str, Any]:
    return {"amount": number / 8, "items": number % 50, "country": f"c{number % _WORDS}", "y": number % 2}


def _wide(dice: np.random.Generator, number: int) -> dict[str, Any]:
    return {"x": dice.random(64, np.float32).tolist(), "y": number % 2}


def _record(*fields: tuple[str, Any]) -> str:
    return json.dumps({"type": "record", "name": "E", "fields": [{"name": n, "type": t} for n, t in fields]})


def _object(**properties: Any) -> str:
    return json.dumps({"type": "object", "properties": properties, "required": list(properties)})


_LABEL = {"name": "y", "classes": 2}
FOUR = Events(
    {
        "features": {
            "amount": {"dtype": "float32"},
            "items": {"dtype": "int32"},
            "country": {"dtype": "string", "encode": {"hash": 1000}},
        },
        "label": _LABEL,
    },
    {
        "avro": _record(("amount", "double"), ("items", "int"), ("country", "string"), ("y", "int")),
        "protobuf": 'syntax = "proto3"; message E { double amount = 1; int32 items = 2; string country = 3; '
        "int32 y = 4; }",
        "json-schema": _object(
            amount={"type": "number"}, items={"type": "integer"}, country={"type": "string"}, y={"type": "integer"}
        ),
    },
    _four,
)
WIDE = Events(
    {"features": {"x": {"dtype": "float32", "shape": [64]}}, "label": _LABEL},
    {
        "avro": _record(("x", {"type": "array", "items": "float"}), ("y", "int")),
        "protobuf": 'syntax = "proto3"; message E { repeated float x = 1; int32 y = 2; }',
        "json-schema": _object(x={"type": "array", "items": {"type": "number"}}, y={"type": "integer"}),
    },
    _wide,
)


def messages(events: Events, form: str, count: int) -> list[bytes]:
    """Return events as messages of a format, those with a writer schema with its number before the record."""
    dice = np.random.default_rng(0)
    return list(map(_packer(events, form), (events.event(dice, number) for number in range(count))))


def _packer(events: Events, form: str) -> Callable[[dict[str, Any]], bytes]:
    if form == "avro":
        schema = fastavro.parse_schema(json.loads(events.writers[form]))

        def packed(event: dict[str, Any]) -> bytes:
            output = io.BytesIO(_PREFIX)
            output.seek(len(_PREFIX))
            fastavro.schemaless_writer(output, schema, event)
            return output.getvalue()

        return packed
    if form == "protobuf":
        kind = GetMessageClass(message_type(WriterSchema(_ID, "protobuf", events.writers[form]), (0,)))
        return lambda event: _PREFIX + b"\0" + kind(**event).SerializeToString()
    prefix = _PREFIX if form == "json-schema" else b""
    return lambda event: prefix + json.dumps(event).encode()


class _OneSchema:
    """A registry that has one schema."""

    def __init__(self, schema: WriterSchema) -> None:
        self._schema = schema

    def schema(self, _: int | str) -> WriterSchema:
        return self._schema

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def builder(events: Events, form: str, stream: Mapping[str, Any]) -> Iterator[BlockBuilder]:
    """Yield what decodes messages of a format to blocks, holding out 1 %; `stream` is the section `[stream]`."""
    described = {**stream, "format": form}
    schemas: WriterSchemas | None = None
    if form in REGISTRY_FORMATS:
        described["registry"] = {"url": "http://localhost:1", "subject": "unused"}
        kind: SchemaKind = form  # type: ignore[assignment]
        client: Any = _OneSchema(WriterSchema(_ID, kind, events.writers[form]))
        schemas = WriterSchemas(RegistrySettings.model_validate(described["registry"]), client)
    schema = Schema(SchemaSettings.model_validate(events.schema))
    try:
        hold_out = HoldOut(fraction=0.01, seed=0)
        yield BlockBuilder(schema, StreamSettings.model_validate(described), hold_out, schemas)
    finally:
        if schemas is not None:
            schemas.close()
