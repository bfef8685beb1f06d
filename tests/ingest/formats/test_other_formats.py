"""JSON messages in an envelope, or of another format, are rejected with what they are."""

import gzip
import json

import pytest

from anabranch.ingest.formats.base import Reject
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.formats.registry import make_format
from anabranch.ingest.schema_registry.cache import writer_schemas
from anabranch.ingest.settings.stream import StreamSettings
from tests.ingest.conftest import make_schema
from tests.support.formats import FORMATS

SCHEMA = make_schema({"x": {"dtype": "float32"}}, {"name": "y", "classes": 2})
ROW = {"x": 1.5, "y": 1}
CHANGE = {"before": None, "after": ROW, "source": {}, "op": "c", "ts_ms": 1}


def rejected(value):
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    decoded = JsonFormat(SCHEMA).decode([json.dumps(ROW).encode(), content])
    assert decoded.message.tolist() == [0]
    (reject,) = decoded.rejects
    assert reject.message == 1
    return reject.reason


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (CHANGE, 'it is an envelope of Debezium, with the row in "after": set stream.envelope = "debezium"'),
        (
            {"schema": {}, "payload": ROW},
            'it is an envelope of Kafka Connect, with the event in "payload": set stream.envelope = "connect"',
        ),
        ({"schema": {}, "payload": CHANGE}, 'within one of Kafka Connect: set stream.envelope = "debezium"'),
        (b"\0\0\0\0\7" + json.dumps(ROW).encode(), 'set stream.format = "json-schema", and [stream.registry]'),
        (b"\0\0\0\0\7\2\0\0\xc0\x3f", 'set stream.format = "avro" or "protobuf", and [stream.registry]'),
        (
            {"specversion": "1.0", "id": "1", "source": "/a", "type": "t", "data": ROW},
            'stream.envelope = "cloudevents"',
        ),
        (
            gzip.compress(json.dumps(ROW).encode(), mtime=0),
            "it is compressed with gzip: let the producer send events as they are",
        ),
        (b"\xef\xbb\xbf" + json.dumps(ROW).encode(), "it begins with a byte order mark"),
        (json.dumps(ROW).encode("utf-16"), "it is UTF-16"),
        (b"Obj\1abc", "it is an Avro file"),
    ],
)
def test_what_it_is_comes_before_the_reason_of_the_decoder(value, what):
    reason = rejected(value)
    assert what in reason
    assert "(Object missing required field `x`)" in reason or "(JSON is malformed" in reason or b"Obj" in value


@pytest.mark.parametrize("value", [{"y": 1}, {"schema": 1, "y": 2}, {"after": ROW}, b"\0\0", b"[", [ROW], b""])
def test_others_have_the_reason_of_the_decoder_alone(value):
    assert not rejected(value).startswith("it ")


@pytest.mark.parametrize("form", ["rows", "arrow"])
@pytest.mark.parametrize(
    ("value", "what"),
    [
        (json.dumps(ROW).encode(), 'it is a JSON object: set stream.format = "json"'),
        (json.dumps(CHANGE).encode(), "it is an envelope of Debezium, "),
        (gzip.compress(b"abc", mtime=0), "it is compressed with gzip"),
    ],
)
def test_binary_formats_know_them_too(form, value, what):
    assert FORMATS[form](SCHEMA).decode([value]).rejects[0].reason.startswith(what)


def test_a_format_of_a_registry_reads_json(registry):
    stream = StreamSettings.model_validate({"topics": ["t"], "format": "avro", "registry": {"url": registry.url}})
    schemas = writer_schemas(stream.resolved("test"))
    assert schemas is not None
    (reject,) = make_format(stream.resolved("test"), SCHEMA, schemas).decode([json.dumps(ROW).encode()]).rejects
    assert reject.reason == 'schema: it is a JSON object: set stream.format = "json"'
    schemas.close()


def test_an_event_whose_fields_are_those_of_an_envelope_is_an_event():
    schema = make_schema({name: {"dtype": "float32"} for name in ("before", "after")}, {"name": "op", "classes": 2})
    decoded = JsonFormat(schema).decode([b'{"before": 1, "after": 2, "op": 1}'])
    assert (decoded.message.tolist(), list[Reject](decoded.rejects)) == ([0], [])
