"""Each format that has a registry: a serializer of confluent-kafka, and another decoder that reads its records."""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import fastavro
import jsonschema_rs
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer

from tests.support.protobuf import message_class

_AVRO = {
    "type": "record",
    "name": "Event",
    "fields": [
        {"name": "x", "type": {"type": "array", "items": "float"}},
        {"name": "k", "type": "string"},
        {"name": "n", "type": "int"},
        {"name": "d", "type": {"type": "array", "items": "double"}},
        {"name": "y", "type": ["null", "int"]},
        {"name": "w", "type": "double"},
        {"name": "t", "type": "double"},
    ],
}
_PROTOBUF = """syntax = "proto3"; message Other { int32 a = 1; }
message Event { repeated float x = 1; string k = 2; sint32 n = 3; repeated double d = 4; optional int32 y = 5;
double w = 6; double t = 7; int64 other = 8; }"""
_NUMBERS = {"type": "array", "items": {"type": "number"}}
_JSON = {
    "title": "Event",
    "type": "object",
    "properties": {
        "x": _NUMBERS,
        "k": {"type": "string"},
        "n": {"type": "integer"},
        "d": {"type": "array", "items": _NUMBERS},
        "y": {"type": "integer"},
        "w": {"type": "number"},
        "t": {"type": "number"},
    },
    "required": ["x", "k", "n", "d", "w", "t"],
}


@dataclass(frozen=True)
class Codec:
    """How events of a format are written, and read by another decoder, which raises for what is damaged.

    `is_exact`: whether each record that the other decoder reads must become an event; ours may refuse more otherwise.
    """

    serializer: Callable[[Any, dict[str, Any]], Callable[..., Any]]
    read: Callable[[bytes], dict[str, Any]]
    is_exact: bool = False


def flat(some: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event with its nested lists as one."""
    return {**some, "d": list(chain.from_iterable(some["d"]))}


def _avro(registry: Any, options: dict[str, Any]) -> Callable[..., Any]:
    serialize = AvroSerializer(registry, json.dumps(_AVRO), conf=options)
    return lambda some, context: serialize(flat(some), context)


def _read_avro(record: bytes) -> dict[str, Any]:
    data = io.BytesIO(record)
    some: Any = fastavro.schemaless_reader(data, _PARSED_AVRO, None)
    if data.tell() != len(record):
        raise ValueError("bytes follow the record")
    return dict(some)


_PARSED_AVRO = fastavro.parse_schema(_AVRO)
_CLASS = message_class(_PROTOBUF, "Event")


def _protobuf(registry: Any, options: dict[str, Any]) -> Callable[..., Any]:
    serialize = ProtobufSerializer(_CLASS, registry, options)
    return lambda some, context: serialize(_CLASS(**flat(some), other=3), context)


def _read_protobuf(record: bytes) -> dict[str, Any]:
    message = _CLASS.FromString(record)
    some = {name: getattr(message, name) for name in "kywtn"}
    return {**some, "x": list(message.x), "d": list(message.d), "y": message.y if message.HasField("y") else None}


def _json(registry: Any, options: dict[str, Any]) -> Callable[..., Any]:
    return JSONSerializer(json.dumps(_JSON), registry, conf=options)


def _read_json(record: bytes) -> dict[str, Any]:
    some: Any = json.loads(record.decode())
    _VALIDATOR.validate(some)
    if any(len(row) != 2 for row in some["d"]):
        raise ValueError("d is not of shape [2, 2]")
    return flat(some)


_VALIDATOR = jsonschema_rs.validator_for(_JSON)
CODECS = {
    "avro": Codec(_avro, _read_avro),
    "protobuf": Codec(_protobuf, _read_protobuf, is_exact=True),
    "json-schema": Codec(_json, _read_json),
}
