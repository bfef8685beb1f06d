"""The field by which labels find their events is read in each format of the registry, and has to be there."""

import io
import json

import fastavro
import pytest

from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.registry import make_decoder
from anabranch.ingest.schema_registry.writer_schema import UnfitSchemaError, WriterSchema
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.ingest.settings.stream import SchemaSettings

SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}, "key": {"name": "id"}}
    ),
    LabelStreamSettings(topics=("labels",), wait="1h", key="order"),
)
AVRO = {"type": "record", "name": "E", "fields": [{"name": "x", "type": "float"}, {"name": "id", "type": "string"}]}
AVRO_WITH_ORDER = AVRO | {"fields": [*AVRO["fields"], {"name": "order", "type": "long"}]}
CLOSED = {"properties": {"x": {}, "id": {}}, "additionalProperties": False}
EVENT = {"x": 1.0, "id": "a", "order": 7}


def avro_record():
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, fastavro.parse_schema(AVRO_WITH_ORDER), EVENT)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("kind", "text", "record"),
    [
        ("avro", json.dumps(AVRO_WITH_ORDER), avro_record()),
        (
            "protobuf",
            'syntax = "proto3"; message E { float x = 1; string id = 2; int64 order = 3; }',
            b"\x0d\0\0\x80\x3f\x12\x01a\x18\x07",
        ),
        ("json-schema", '{"type": "object"}', json.dumps(EVENT).encode()),
    ],
)
def test_it_is_read(kind, text, record):
    decoded = make_decoder(WriterSchema(1, kind, text), SCHEMA).decode([record])
    assert list(decoded.rejects) == []
    assert decoded.columns["join_hash"].tolist() == hash_texts([b"7"]).tolist()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("avro", json.dumps(AVRO)),
        ("protobuf", 'syntax = "proto3"; message E { float x = 1; string id = 2; }'),
        ("json-schema", json.dumps(CLOSED)),
    ],
)
def test_a_writer_schema_without_it_does_not_fit(kind, text):
    with pytest.raises(UnfitSchemaError, match="order"):
        make_decoder(WriterSchema(1, kind, text), SCHEMA)
