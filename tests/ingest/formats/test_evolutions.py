"""Messages of confluent-kafka's serializers: each format, each position of the id, and each change of a writer schema.

The registry is the `mock://` one of confluent-kafka, which gives schemas numbers and GUIDs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from confluent_kafka.schema_registry import (
    SchemaRegistryClient,
    header_schema_id_serializer,
    prefix_schema_id_serializer,
)
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from anabranch.ingest.formats.registry import make_format
from anabranch.ingest.schema_registry.cache import WriterSchemas
from anabranch.ingest.schema_registry.message_ids import HEADER
from anabranch.ingest.schema_registry.writer_schema import Reference, SchemaKind, WriterSchema
from anabranch.ingest.settings.registry import RegistrySettings
from anabranch.ingest.settings.stream import StreamSettings
from tests.ingest.conftest import make_schema
from tests.support.protobuf import message_class

TOPIC = "payments"
SCHEMA = make_schema(
    {"amount": {"dtype": "float32"}, "count": {"dtype": "int16", "default": 7}},
    {"name": "y", "classes": 3},
    key={"name": "id"},
)
Fields = Mapping[str, str]
"""Types of a writer schema's fields, by name and in order: "float", "int" or "string"."""
OLD: Fields = {"amount": "float", "count": "int", "y": "int", "id": "string"}
VALUES = {"amount": 3, "count": 5, "y": 2, "id": "k", "remark": "new", "total": 5}


@dataclass(frozen=True)
class Evolution:
    """A newer writer schema, what `count` becomes of its messages, and whether they have a field that is not read."""

    new: Fields
    count: int = 5
    unknown: bool = False
    reason: str | None = None


EVOLUTIONS = {
    "a field is added": Evolution({**OLD, "remark": "string"}, unknown=True),
    "a field with a default is removed": Evolution({name: OLD[name] for name in ("amount", "y", "id")}, count=7),
    "a field without a default is removed": Evolution(
        {name: OLD[name] for name in ("count", "y", "id")}, reason="amount"
    ),
    "a type is promoted": Evolution({**OLD, "amount": "int"}),
    "fields are renamed and in another order": Evolution(
        {"id": "string", "total": "int", "y": "int", "amount": "float"}, count=7, unknown=True
    ),
}


def _avro(registry, fields, options):
    described = [{"name": name, "type": kind} for name, kind in fields.items()]
    text = json.dumps({"type": "record", "name": "Payment", "fields": described})
    return AvroSerializer(registry, text, conf=options)


def _protobuf(registry, fields, options):
    kinds = {"int": "int64", "float": "double", "string": "string"}
    declared = " ".join(f"{kinds[kind]} {name} = {number};" for number, (name, kind) in enumerate(fields.items(), 1))
    payment = message_class(f'syntax = "proto3"; message Other {{}} message Payment {{ {declared} }}', "Payment")
    serializer = ProtobufSerializer(payment, registry, options)
    return lambda event, context: serializer(payment(**event), context)


def _json(registry, fields, options):
    kinds = {"int": "integer", "float": "number", "string": "string"}
    properties = {name: {"type": kinds[kind]} for name, kind in fields.items()}
    text = {"title": "Payment", "type": "object", "properties": properties, "required": list(fields)}
    return JSONSerializer(json.dumps(text), registry, conf=options)


SERIALIZERS = {"avro": _avro, "protobuf": _protobuf, "json-schema": _json}


def _number_in_header(payload, context, schema_id):
    context.headers.append(("__value_schema_id", schema_id.id_to_bytes()))
    return payload


POSITIONS = {
    "number before the record": prefix_schema_id_serializer,
    "number in a header": _number_in_header,
    "GUID in a header": header_schema_id_serializer,
}


class MockClient:
    """Reads schemas of confluent-kafka's `mock://` registry."""

    def __init__(self, registry):
        self._registry = registry

    def schema(self, schema_id):
        by_number = isinstance(schema_id, int)
        found = (self._registry.get_schema if by_number else self._registry.get_schema_by_guid)(schema_id)
        return self._writer_schema(schema_id, found)

    def newest(self, subject):
        return self._writer_schema(subject, self._registry.get_latest_version(subject).schema)

    def _writer_schema(self, schema_id, found):
        kinds: dict[str, SchemaKind] = {"AVRO": "avro", "PROTOBUF": "protobuf", "JSON": "json-schema"}
        return WriterSchema(schema_id, kinds[found.schema_type], found.schema_str, tuple(self._references(found)))

    def _references(self, schema):
        for each in schema.references or ():
            inner = self._registry.get_version(each.subject, each.version).schema
            yield from self._references(inner)
            yield Reference(each.name, inner.schema_str)

    def close(self):
        """Nothing is open."""


class Producer:
    """Serializes events with any writer schema, and decodes them as a stream of this format does."""

    def __init__(self, form, position):
        self._form = form
        self._registry = SchemaRegistryClient.new_client({"url": f"mock://{form}-{position}"})
        self._options = {"schema.id.serializer": POSITIONS[position]}
        stream = {"bootstrap_servers": "localhost:1", "topics": [TOPIC], "format": form}
        registry = {"url": "http://localhost:1", "subject": f"{TOPIC}-value"}
        self._schemas = WriterSchemas(RegistrySettings.model_validate(registry), MockClient(self._registry))  # type: ignore[arg-type]
        settings = StreamSettings.model_validate({**stream, "registry": registry})
        self._format = make_format(settings, SCHEMA, self._schemas)

    def message(self, fields):
        """Return the value and the headers of a message."""
        headers: list[tuple[str, bytes]] = []
        context = SerializationContext(TOPIC, MessageField.VALUE, headers)
        serialize = SERIALIZERS[self._form](self._registry, fields, self._options)
        return serialize({name: VALUES[name] for name in fields}, context), headers

    def decode(self, *messages):
        values, headers = zip(*messages, strict=True)
        return self._format.decode(values, headers)

    def close(self):
        self._schemas.close()


@pytest.fixture
def produce():
    """`produce(format, position)`."""
    made: list[Producer] = []

    def produce(form, position):
        made.append(Producer(form, position))
        return made[-1]

    yield produce
    for each in made:
        each.close()


@pytest.mark.parametrize("evolution", EVOLUTIONS.values(), ids=EVOLUTIONS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("form", SERIALIZERS)
def test_old_and_new_messages_are_read_by_the_readers_rules(produce, form, position, evolution):
    producer = produce(form, position)
    old, new = producer.message(OLD), producer.message(evolution.new)
    decoded = producer.decode(old, new, old, new)
    assert decoded.columns["feature.amount"].tolist() == [3.0] * len(decoded.message)
    assert decoded.columns["label"].tolist() == [2] * len(decoded.message)
    assert len(set(decoded.columns["key_hash"].tolist())) == 1
    if evolution.reason is not None:
        assert decoded.message.tolist() == [0, 2]
        assert [reject.message for reject in decoded.rejects] == [1, 3]
        assert all(
            reject.reason.startswith("schema: ") and evolution.reason in reject.reason for reject in decoded.rejects
        )
    else:
        assert not decoded.rejects
        assert decoded.columns["feature.count"].tolist() == [5, evolution.count] * 2
        assert decoded.unknown_fields == (2 if evolution.unknown else 0)


@pytest.mark.parametrize("form", SERIALIZERS)
def test_ids_may_alternate_with_each_message_and_one_in_a_header_comes_first(produce, form):
    producer = produce(form, "number before the record")
    renamed = EVOLUTIONS["fields are renamed and in another order"].new
    (old, _), (new, _) = (producer.message(fields) for fields in (OLD, renamed))
    begin = 7 if form == "protobuf" else 5
    decoded = producer.decode(
        (old, []),
        (old, [("trace", b"1")]),
        (new, [("trace", b"2")]),
        (old, []),
        (old, []),
        (new, []),
        (new[begin:], [(HEADER, new[:begin])]),
    )
    assert not decoded.rejects
    assert decoded.columns["feature.count"].tolist() == [5, 5, 7, 5, 5, 7, 7]


def test_the_type_in_another_file_is_found_by_reference(produce):
    producer = produce("protobuf", "number before the record")
    shared = {"shared/kinds.proto": 'syntax = "proto3"; package shared; enum Class { ZERO = 0; ONE = 1; TWO = 2; }'}
    text = """syntax = "proto3"; import "shared/kinds.proto"; import "google/protobuf/wrappers.proto";
    message Payment { double amount = 1; shared.Class y = 2; string id = 3; google.protobuf.Int32Value count = 4; }"""
    payment = message_class(text, "Payment", shared)
    serializer = ProtobufSerializer(payment, producer._registry, {})
    value = serializer(payment(amount=3, y=1, id="k"), SerializationContext(TOPIC, MessageField.VALUE))
    decoded = producer.decode((value, []))
    assert not decoded.rejects
    assert decoded.columns["label"].tolist() == [1]
    assert decoded.columns["feature.count"].tolist() == [7]
