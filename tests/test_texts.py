"""Texts with a tokenizer: each message format and serving give the same ids, and malformed texts are rejected alone."""

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest

from anabranch.ingest.backfill.row_decoder import RowDecoder
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.arrow import pack_batch
from anabranch.ingest.formats.base import Decoded
from anabranch.ingest.formats.registry import make_decoder
from anabranch.ingest.schema_registry.writer_schema import WriterSchema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.serving.protocol.codec import Signature
from anabranch.serving.protocol.tensors import TensorSpec
from tests.support.formats import FORMATS
from tests.support.protobuf import message_class
from tests.support.tokenizer import write_tokenizer

TEXTS = ["A good film", "", "bad " * 20, "unseen \0 words", "\N{PILE OF POO} fun", "a" * 100_000, "A good film"]
IDS = [
    [2, 11, 4, 6, 3, 0],
    [2, 3, 0, 0, 0, 0],
    [2, 5, 5, 5, 5, 3],
    [2, 1, 1, 1, 3, 0],
    [2, 1, 10, 3, 0, 0],
    [2, 1, 3, 0, 0, 0],
    [2, 11, 4, 6, 3, 0],
]
AVRO = {"type": "record", "name": "E", "fields": [{"name": "text", "type": "string"}]}
PROTOBUF = 'syntax = "proto3"; package t; message E { string text = 1; }'
JSON_SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}


def schema_of(tmp_path, **text):
    path = write_tokenizer(tmp_path / "tokenizer.json")
    feature = {"dtype": "string", "encode": {"tokenizer": str(path), "length": 6}} | text
    return Schema(SchemaSettings.model_validate({"features": {"text": feature}, "label": {"name": "y", "classes": 2}}))


def by_json(schema, texts):
    return FORMATS["json"](schema).decode([json.dumps({"text": text}).encode() for text in texts])


def by_arrow(schema, texts):
    return FORMATS["arrow"](schema).decode([pack_batch(schema, [{"text": text} for text in texts])])


def by_arrow_dictionary(schema, texts):
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"text": pa.array(texts).dictionary_encode()})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return FORMATS["arrow"](schema).decode([sink.getvalue().to_pybytes()])


def by_registry(schema, kind, text, records):
    return make_decoder(WriterSchema(7, kind, text), schema).decode(records)


def by_avro(schema, texts):
    records = []
    for text in texts:
        sink = io.BytesIO()
        fastavro.schemaless_writer(sink, fastavro.parse_schema(AVRO), {"text": text})
        records.append(sink.getvalue())
    return by_registry(schema, "avro", json.dumps(AVRO), records)


def by_protobuf(schema, texts):
    message = message_class(PROTOBUF, "t.E")
    return by_registry(schema, "protobuf", PROTOBUF, [message(text=text).SerializeToString() for text in texts])


def by_json_schema(schema, texts):
    records = [json.dumps({"text": text}).encode() for text in texts]
    return by_registry(schema, "json-schema", json.dumps(JSON_SCHEMA), records)


def by_file(schema, texts):
    return RowDecoder(schema, None, 1_000_000).decode(pa.table({"text": pa.array(texts), "y": [0] * len(texts)}))


READ: dict[str, Callable[[Schema, Sequence[str]], Decoded]] = {
    "json": by_json,
    "arrow": by_arrow,
    "arrow dictionary": by_arrow_dictionary,
    "avro": by_avro,
    "protobuf": by_protobuf,
    "json-schema": by_json_schema,
    "backfill file": by_file,
}


@pytest.mark.parametrize("name", READ)
def test_each_format_gives_the_ids_of_the_tokenizer(tmp_path, name):
    decoded = READ[name](schema_of(tmp_path), TEXTS)
    column = decoded.columns["feature.text"]
    assert (column.dtype, list(decoded.rejects)) == (np.int32, [])
    assert column.tolist() == IDS


@pytest.mark.parametrize("binary", [False, True])
def test_serving_gives_the_same_ids(tmp_path, binary):
    signature = Signature(schema_of(tmp_path), [TensorSpec("prediction", np.dtype(np.int64), ())], max_rows=10)
    assert signature.inputs["text"].metadata() == {"name": "text", "datatype": "BYTES", "shape": [-1]}
    blob = b"".join(len(text.encode()).to_bytes(4, "little") + text.encode() for text in TEXTS)
    tensor: dict[str, Any] = {"name": "text", "shape": [len(TEXTS)], "datatype": "BYTES"}
    tensor |= {"parameters": {"binary_data_size": len(blob)}} if binary else {"data": TEXTS}
    header = json.dumps({"inputs": [tensor]}).encode()
    body = header + blob if binary else header
    request = signature.decode(body, len(header) if binary else None)
    assert request.features["text"].tolist() == IDS


def test_a_signature_says_whether_decoding_takes_the_time_of_a_tokenizer(tmp_path):
    word = {"dtype": "string", "encode": {"hash": 9}}
    plain = Schema(SchemaSettings.model_validate({"features": {"w": word}, "label": {"name": "y", "classes": 2}}))
    assert [Signature(schema, [], 1).tokenizes for schema in (schema_of(tmp_path), plain)] == [True, False]


@pytest.mark.parametrize("name", ["json", "arrow", "avro", "json-schema"])
def test_several_texts_of_an_event_have_a_row_of_ids_each(tmp_path, name):
    schema = schema_of(tmp_path, shape=[2])
    events = [["A good film", "bad"], ["", "fun"]]
    if name == "arrow":
        message = pack_batch(schema, [{"text": each} for each in events])
        decoded = FORMATS["arrow"](schema).decode([message])
    elif name == "avro":
        writer = {"type": "record", "name": "E", "fields": [
            {"name": "text", "type": {"type": "array", "items": "string"}}
        ]}  # fmt: skip
        records = []
        for event in events:
            sink = io.BytesIO()
            fastavro.schemaless_writer(sink, fastavro.parse_schema(writer), {"text": event})
            records.append(sink.getvalue())
        decoded = by_registry(schema, "avro", json.dumps(writer), records)
    else:
        records = [json.dumps({"text": event}).encode() for event in events]
        kind = {"type": "object", "properties": {"text": {"type": "array"}}}
        decoded = (
            FORMATS["json"](schema).decode(records)
            if name == "json"
            else by_registry(schema, "json-schema", json.dumps(kind), records)
        )
    assert decoded.columns["feature.text"].tolist() == [[IDS[0], [2, 5, 3, 0, 0, 0]], [IDS[1], [2, 10, 3, 0, 0, 0]]]


@pytest.mark.parametrize("name", ["json", "arrow"])
def test_an_event_without_text_has_the_ids_of_the_default(tmp_path, name):
    schema = schema_of(tmp_path, default="good")
    if name == "json":
        decoded = FORMATS["json"](schema).decode([b"{}", b'{"text": "A good film"}'])
    else:
        sink = pa.BufferOutputStream()
        batch = pa.record_batch({"text": pa.array([None, "A good film"])})
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        decoded = FORMATS["arrow"](schema).decode([sink.getvalue().to_pybytes()])
    assert decoded.columns["feature.text"].tolist() == [[2, 4, 3, 0, 0, 0], IDS[0]]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(b'{"text": "\xff\xfe"}', id="not UTF-8"),
        pytest.param(b'{"text": "\\ud800"}', id="lone surrogate"),
        pytest.param(b'{"text": "\xed\xa0\x80"}', id="surrogate as UTF-8"),
        pytest.param(b'{"text": 5}', id="number"),
        pytest.param(b'{"text": null}', id="null"),
        pytest.param(b'{"text": ["good"]}', id="list"),
        pytest.param(b'{"text": "good', id="torn"),
    ],
)
def test_what_is_no_text_is_rejected_alone(tmp_path, bad):
    decoded = FORMATS["json"](schema_of(tmp_path)).decode([b'{"text": "A good film"}', bad, b'{"text": ""}'])
    assert decoded.columns["feature.text"].tolist() == IDS[:2]
    assert [reject.message for reject in decoded.rejects] == [1]


@pytest.mark.parametrize("text", [b"\xff\xfe", b"\xed\xa0\x80"])
@pytest.mark.parametrize("kind", ["avro", "protobuf"])
def test_bytes_that_are_not_utf8_are_rejected_alone(tmp_path, kind, text):
    schema = schema_of(tmp_path)
    tag, writer = (b"", json.dumps(AVRO)) if kind == "avro" else (b"\x0a", PROTOBUF)

    def record(value):
        return tag + bytes([len(value) * 2 if kind == "avro" else len(value)]) + value

    decoded = by_registry(schema, kind, writer, [record(b"A good film"), record(text), record(b"fun")])
    assert decoded.columns["feature.text"].tolist() == [IDS[0], [2, 10, 3, 0, 0, 0]]
    assert [reject.message for reject in decoded.rejects] == [1]
