"""Messages of confluent-kafka's own serializers: each is read, whatever version of the schema it was written with."""

import io
import json
import uuid
from typing import Any

import fastavro
import numpy as np
import pytest
from confluent_kafka import schema_registry as confluent
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext

from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.avro_records import columns as avro_columns
from anabranch.ingest.formats.registry import make_format
from anabranch.ingest.schema_registry.cache import writer_schemas
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings

SUBJECT = "payments-value"
SCHEMA = Schema(
    SchemaSettings.model_validate(
        {
            "features": {
                "amount": {"dtype": "float64"},
                "count": {"dtype": "int64", "default": 7},
                "country": {"dtype": "string", "encode": {"vocab": ["DE", "FR"]}, "default": "FR"},
                "history": {"dtype": "float32", "shape": [3]},
            },
            "label": {"name": "fraud", "classes": 2},
            "key": {"name": "account"},
            "time": {"name": "at"},
        }
    )
)
FLOATS = {"type": "array", "items": "float"}
TYPES: dict[str, Any] = {
    "amount": "double",
    "count": "int",
    "country": "string",
    "history": FLOATS,
    "fraud": ["null", "int"],
    "account": "string",
    "at": {"type": "long", "logicalType": "timestamp-millis"},
}
EVENT = {
    "amount": 12.0,
    "count": 3,
    "country": "DE",
    "history": [1.0, 2.0, 3.0],
    "fraud": 1,
    "account": "17",
    "at": 1_700_000_000_500,
}
READ = {"amount": 12.0, "count": 3, "country": 1, "history": [1, 2, 3], "fraud": 1, "labelled": True, "unknown": 0}
Changes = dict[str, Any]
EVOLUTIONS: dict[str, tuple[Changes, Changes, Changes]] = {
    "the same": ({}, {}, {}),
    "fields that the pipeline lacks": (
        {"channel": "string", "tags": {"type": "map", "values": "int"}, "digest": {"type": "bytes"}},
        {"channel": "web", "tags": {"a": 1}, "digest": b"abc"},
        {"unknown": 1},
    ),
    "fields that the writer lacks": (
        {"count": None, "country": None, "fraud": None},
        {},
        {"count": 7, "country": 2, "fraud": -1, "labelled": False},
    ),
    "promoted numbers": (
        {"amount": "int", "count": "long", "history": {"type": "array", "items": "long"}, "fraud": "long"},
        {"amount": 12, "history": [1, 2, 3]},
        {},
    ),
    "nullable fields, enums, booleans, microseconds": (
        {
            "amount": ["null", "float"],
            "count": ["int", "null"],
            "country": ["null", {"type": "enum", "name": "Country", "symbols": ["FR", "DE"]}],
            "history": {"type": "array", "items": ["null", "double"]},
            "fraud": ["null", "boolean"],
            "account": ["null", "long"],
            "at": ["null", {"type": "long", "logicalType": "timestamp-micros"}],
        },
        {"count": None, "fraud": True, "account": 17, "at": 1_700_000_000_500_000},
        {"count": 7},
    ),
    "null where a default or a label is": (
        {"country": ["null", "string"], "count": "null"},
        {"country": None, "count": None, "fraud": None},
        {"country": 2, "count": 7, "fraud": -1, "labelled": False},
    ),
}
"""What a version changes: types of fields (None: it lacks the field), values of the event, and what is read of it."""
ID_SOURCES = ("number in the value", "guid in the value", "guid in a header")


class Producer:
    """confluent-kafka's serializers, with its registry in memory; its schemas are copied to the test's registry."""

    def __init__(self, registry):
        self._client = confluent.SchemaRegistryClient.new_client({"url": "mock://"})
        self._registry = registry

    def message(self, changes, values, id_source=ID_SOURCES[0]):
        """Return value and headers of the event, written with the changed types."""
        text = json.dumps(record(TYPES | changes))
        in_header = id_source == "guid in a header"
        serializer = confluent.header_schema_id_serializer if in_header else confluent.prefix_schema_id_serializer
        serialize = AvroSerializer(self._client, text, conf={"schema.id.serializer": serializer})
        headers: list[tuple[str, bytes]] = [("trace", b"abc")]
        event = {name: value for name, value in (EVENT | values).items() if (TYPES | changes)[name] is not None}
        value = serialize(event, SerializationContext("payments", MessageField.VALUE, headers))
        registered = self._client.lookup_schema(SUBJECT, confluent.Schema(text, "AVRO"))
        self._registry.schemas[registered.schema_id] = {"schema": text, "guid": registered.guid}
        self._registry.subjects[SUBJECT] = sorted(self._registry.schemas)
        if id_source == "guid in the value":
            value = b"\x01" + uuid.UUID(registered.guid).bytes + value[5:]
        return value, headers


def record(types):
    fields = [{"name": name, "type": kind} for name, kind in types.items() if kind is not None]
    return {"type": "record", "name": "Payment", "namespace": "shop.events", "fields": fields}


@pytest.fixture(params=["columns", "rows"])
def decoder(request, monkeypatch):
    """Which decoder is used: pyruhvro's, or fastavro's as without pyruhvro."""
    if request.param == "rows":
        monkeypatch.setattr(avro_columns, "suits_columns", lambda reading: False)
    return str(request.param)


@pytest.fixture
def make(registry):
    """`make(**settings)` makes the format of a stream with the registry."""
    made = []

    def make_avro(schema=SCHEMA, kind="avro", **settings):
        stream = {"topics": ["payments"], "format": kind, "registry": {"url": registry.url, **settings}}
        schemas = writer_schemas(StreamSettings.model_validate(stream).resolved("test"))
        made.append(schemas)
        return make_format(StreamSettings.model_validate(stream), schema, schemas)

    yield make_avro
    for schemas in made:
        schemas.close()


def read(decoded, row=0):
    """Return an event, with the names of `READ`."""
    columns = {name.removeprefix("feature."): column[row].tolist() for name, column in decoded.columns.items()}
    assert columns["time"] == pytest.approx(1_700_000_000.5, abs=1e-6)
    assert columns["key_hash"] == hash_texts([b"17"])[0]
    names = ("amount", "count", "country", "history", "labelled")
    return {name: columns[name] for name in names} | {"fraud": columns["label"], "unknown": decoded.unknown_fields}


@pytest.mark.parametrize("id_source", ID_SOURCES)
@pytest.mark.parametrize("evolution", EVOLUTIONS)
def test_a_record_is_read_by_the_readers_rules(registry, make, decoder, evolution, id_source):
    types, values, expected = EVOLUTIONS[evolution]
    value, headers = Producer(registry).message(types, values, id_source)
    decoded = make().decode([value], [headers])
    assert list(decoded.rejects) == []
    assert read(decoded) == READ | expected


def test_versions_may_be_mixed_and_the_order_is_that_of_the_messages(registry, make, decoder):
    producer = Producer(registry)
    messages = [
        producer.message(types, values | {"amount": at}, ID_SOURCES[at // 6 % 3])
        for at, (types, values, _) in enumerate(list(EVOLUTIONS.values()) * 4)
    ]
    decoded = make().decode([value for value, _ in messages], [headers for _, headers in messages])
    assert list(decoded.rejects) == []
    assert decoded.message.tolist() == list(range(24))
    assert decoded.columns["feature.amount"].tolist() == list(range(24))
    assert decoded.unknown_fields == 4
    requests = [path for path in registry.paths() if "latest" not in path]
    assert len(requests) == 6 + 6, "a schema is fetched once by its number, and once by its GUID"


class TestRenamedFields:
    """The subject's newest schema has aliases, by which its fields were named before."""

    def messages(self, registry, **aliases):
        """Return a message of the fields' old names, and one of the newest schema, which has the aliases."""
        old = {aliases.get(name, name): kind for name, kind in TYPES.items()}
        values: list[bytes] = []
        for types, amount in ((old, 100.0), (TYPES, 200.0)):
            text = record(types)
            for field in text["fields"] if types is TYPES else ():
                if field["name"] in aliases:
                    field["aliases"] = ["unused", aliases[field["name"]]]
            number = registry.register(SUBJECT, text)
            event = {aliases.get(k, k) if types is old else k: v for k, v in (EVENT | {"amount": amount}).items()}
            content = io.BytesIO()
            fastavro.schemaless_writer(content, fastavro.parse_schema(text), event)
            values.append(number.to_bytes(5) + content.getvalue())
        return values

    def test_are_read_from_old_messages_and_no_default_replaces_them(self, registry, make, decoder):
        decoded = make().decode(self.messages(registry, amount="amt", count="n", fraud="is_fraud"))
        assert list(decoded.rejects) == []
        assert [read(decoded, row) for row in range(2)] == [READ | {"amount": 100.0}, READ | {"amount": 200.0}]

    def test_are_read_from_new_messages_where_the_schema_has_the_old_name(self, registry, make, decoder):
        settings = {
            "features": {"amt": {"dtype": "float64", "default": 7.0}},
            "label": {"name": "fraud", "classes": 2},
        }
        schema = Schema(SchemaSettings.model_validate(settings))
        decoded = make(schema).decode(self.messages(registry, amount="amt"))
        assert list(decoded.rejects) == []
        assert decoded.columns["feature.amt"].tolist() == [100.0, 200.0]

    def test_wait_for_the_newest_schema_while_the_registry_is_away(self, registry, make, decoder, monkeypatch):
        old, new = self.messages(registry, count="n")
        answer = registry.answer
        monkeypatch.setattr(registry, "answer", lambda path: (500, {}) if "latest" in path else answer(path))
        assert make().decode([new, old]).deferred == [1]

    def test_are_not_asked_for_where_the_registry_has_no_such_subject(self, registry, make, decoder):
        old, new = self.messages(registry, count="n")
        form = make(subject="other")
        for _ in range(2):
            decoded = form.decode([old, new])
            assert decoded.columns["feature.count"].tolist() == [7, 3]
        assert sum("latest" in path for path in registry.paths()) <= 2


class TestBadMessages:
    @pytest.fixture
    def good(self, registry):
        return Producer(registry).message({}, {})[0]

    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [
            (lambda value: b"\0\0\0\0\x63" + value[5:], "the registry at {url} has no schemas/ids/99"),
            (lambda value: b"\x01" + b"a" * 16, "has no schemas/guids/61616161-6161-6161-6161-616161616161"),
            (
                lambda value: b"\x07" + value[1:],
                "it has no schema id: neither the header __value_schema_id, nor a value",
            ),
            (lambda value: b'{"amount": 12}', 'it is a JSON object: set stream.format = "json"'),
            (lambda value: b"", "it has no schema id"),
            (lambda value: value[:3], "the id of its schema has 3 of 5 bytes"),
            (lambda value: value[:-1], "the record cannot be read: "),
            (lambda value: value[:5], "the record cannot be read: "),
            (lambda value: value + b"\0", "bytes follow the record; it was written with another schema than its id"),
        ],
    )
    def test_are_rejected_alone_with_a_reason(self, registry, make, decoder, good, spoil, reason, monkeypatch):
        monkeypatch.setattr("anabranch.ingest.schema_registry.cache._LAGGING_SECONDS", 0.0)
        decoded = make().decode([good, spoil(good), good])
        (reject,) = decoded.rejects
        assert reject.message == 1
        assert reject.reason.startswith("schema: ")
        assert reason.format(url=registry.url) in reject.reason
        assert "\n" not in reject.reason
        assert decoded.message.tolist() == [0, 2]
        assert [read(decoded, row) for row in range(2)] == [READ, READ]

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"amount": "string"}, "amount is of Avro type string, not float64"),
            ({"amount": None}, "the writer's record has no field amount, which has no default"),
            ({"amount": "null"}, "the writer's record has only null in amount, which has no default"),
            ({"account": None}, "the writer's record has no field account, which has no default"),
            ({"count": "double"}, "count is of Avro type double, not int64"),
            ({"history": "float"}, "history is of Avro type float, not float32 of shape [3]"),
            ({"history": {"type": "array", "items": FLOATS}}, "history is of Avro type array of array of float"),
            ({"country": "int"}, "country is of Avro type int, not string"),
            ({"amount": {"type": "map", "values": "double"}}, "amount is of Avro type map of double, not float64"),
            (
                {"amount": {"type": "record", "name": "Money", "fields": [{"name": "units", "type": "double"}]}},
                "amount is of Avro type record Money, not float64",
            ),
            ({"fraud": "string"}, "fraud is of Avro type string, not a whole number or a boolean"),
            ({"at": "string"}, "at is of Avro type string, not a timestamp or a number of seconds"),
            (
                {"at": ["null", TYPES["at"], "double"]},
                "at is of Avro type union of null, timestamp-millis, double, whose numbers have several units",
            ),
            (
                {"at": [TYPES["at"], {"type": "int", "logicalType": "date"}]},
                "at is of Avro type union of timestamp-millis",
            ),
            ({"amount": ["null", "string"]}, "amount is of Avro type union of null, string, not float64"),
        ],
    )
    def test_of_a_writer_whose_fields_never_fit_are_rejected_by_name(self, registry, make, changes, reason):
        number = registry.register(SUBJECT, record(TYPES | changes))
        (reject,) = make().decode([b"\0" + number.to_bytes(4) + b"abc"]).rejects
        assert reject.reason.startswith(f"schema: {reason}")

    @pytest.mark.parametrize(
        ("changes", "good", "bad", "reason"),
        [
            ({"amount": ["null", "string", "double"]}, {}, {"amount": "twelve"}, "Expected `float`, got `str`"),
            ({"amount": ["null", "double"]}, {}, {"amount": None}, "amount"),
            ({"at": [TYPES["at"], "string"]}, {}, {"at": "noon"}, "Expected `float"),
            ({"at": ["long", "double", "string"]}, {"at": 1_700_000_000.5}, {"at": "noon"}, "Expected `float"),
            ({}, {}, {"history": [1.0, 2.0]}, "history"),
            ({"history": {"type": "array", "items": ["null", "float"]}}, {}, {"history": [1.0, None, 3.0]}, "history"),
        ],
    )
    def test_whose_value_does_not_fit_are_rejected_alone(self, registry, make, decoder, changes, good, bad, reason):
        producer = Producer(registry)
        values = [producer.message(changes, each)[0] for each in (good, bad, good)]
        decoded = make().decode(values)
        (reject,) = decoded.rejects
        assert reject.message == 1
        assert reject.reason.startswith("schema: ")
        assert reason in reject.reason
        assert [read(decoded, row) for row in range(2)] == [READ, READ]

    def test_numbers_out_of_range_are_rejected(self, registry, make, decoder):
        producer = Producer(registry)
        values = [producer.message({"fraud": "int"}, {"fraud": label})[0] for label in (0, 2, -1)]
        decoded = make().decode(values)
        assert decoded.message.tolist() == [0]
        assert [reject.message for reject in decoded.rejects] == [1, 2]

    def test_of_another_format_are_named(self, registry, make):
        number = registry.register(SUBJECT, 'syntax = "proto3";', "PROTOBUF")
        (reject,) = make().decode([b"\0" + number.to_bytes(4) + b"\0abc"]).rejects
        expected = f'schema: schema {number} is of the format "protobuf", but stream.format = "avro"'
        assert reject.reason == expected


@pytest.mark.parametrize("garbage", [b"\0\xde\xad\xbe\xef garbage", b"\1 seventeen bytes or more"])
def test_garbage_that_begins_as_an_id_holds_no_message_back(registry, make, garbage):
    registry.has_guids = False
    value, _ = Producer(registry).message({}, {})
    decoded = make().decode([garbage, value])
    assert [reject.message for reject in decoded.rejects] == [0]
    assert (decoded.message.tolist(), list(decoded.deferred)) == ([1], [])
    (reject,) = make(fallback=True).decode([garbage, value]).rejects
    assert "the record cannot be read" in reject.reason


class TestMessagesWithoutAnId:
    def test_are_read_with_the_newest_of_the_subject_if_so_configured(self, registry, make, decoder):
        producer = Producer(registry)
        producer.message({"amount": "int"}, {"amount": 1})
        value, _ = producer.message({}, {})
        decoded = make(fallback=True).decode([value[5:], value])
        assert list(decoded.rejects) == []
        assert [read(decoded, row) for row in range(2)] == [READ, READ]
        assert "/subjects/payments-value/versions/latest" in registry.paths()

    def test_may_begin_with_a_byte_0_as_an_id_does(self, registry, make, decoder):
        """Their first bytes are then an id that does not exist."""
        producer = Producer(registry)
        value, _ = producer.message({}, {"amount": 0.0})
        assert value[5] == 0
        decoded = make(fallback=True).decode([value[5:], value, value[5:]])
        assert list(decoded.rejects) == []
        assert decoded.columns["feature.amount"].tolist() == [0.0, 0.0, 0.0]

    def test_wait_while_the_registry_is_away(self, registry, make):
        registry.faults.away = True
        assert make(fallback=True).decode([b"abc", b"abd"]).deferred == [0, 1]


def test_a_registry_that_is_away_defers_messages_of_unknown_schemas_and_rejects_none(registry, make):
    producer = Producer(registry)
    known, _ = producer.message({}, {})
    format_ = make()
    format_.decode([known])
    unknown, headers = producer.message({"amount": "int"}, {"amount": 1}, "guid in a header")
    for fault in ({"away": True}, {"away": False, "status": 500}, {"status": 401}, {"status": 404}):
        for name, value in fault.items():
            setattr(registry.faults, name, value)
        decoded = format_.decode([unknown, known, b"bad", unknown], [headers, (), (), headers])
        assert decoded.deferred == [0, 3]
        assert decoded.message.tolist() == [1]
        assert [reject.message for reject in decoded.rejects] == [2]


def test_schemas_are_asked_for_in_the_order_of_the_messages(registry, make):
    make().decode([b"\0" + number.to_bytes(4) + b"abc" for number in (70, 60, 50)])
    assert registry.paths()[:3] == [f"/schemas/ids/{number}" for number in (70, 60, 50)]


def test_nothing_is_decoded_to_nothing(make):
    decoded = make().decode([])
    assert (len(decoded.message), list(decoded.rejects), list(decoded.deferred)) == (0, [], [])
    assert decoded.columns["feature.history"].shape == (0, 3)


def test_a_label_of_several_classes_is_an_array(registry, make, make_schema, decoder):
    schema = make_schema(
        {"x": {"dtype": "float32", "shape": [2, 2]}}, {"name": "topics", "classes": ["a", "b", "c"], "multi": True}
    )
    types = {"x": FLOATS, "topics": ["null", {"type": "array", "items": "string"}]}
    number = registry.register(SUBJECT, record(types))

    def message(event):
        sink = io.BytesIO()
        fastavro.schemaless_writer(sink, fastavro.parse_schema(record(types)), event)
        return b"\0" + number.to_bytes(4) + sink.getvalue()

    x = [1.0, 2.0, 3.0, 4.0]
    decoded = make(schema).decode(
        [message({"x": x, "topics": topics}) for topics in (["c", "a"], [], None, ["d"], ["a", "a"])]
    )
    assert decoded.columns["label"].tolist() == [[True, False, True], [False] * 3, [False] * 3]
    assert decoded.columns["labelled"].tolist() == [True, True, False]
    assert decoded.columns["feature.x"].tolist() == [[[1, 2], [3, 4]]] * 3
    assert [reject.message for reject in decoded.rejects] == [3, 4]
    assert np.all(decoded.columns["weight"] == 1)

    types["topics"] = {"type": "array", "items": ["null", "string"]}
    number = registry.register(SUBJECT, record(types))
    schema = make_schema(
        {"x": {"dtype": "float32", "shape": [2, 2]}}, {"name": "topics", "classes": ["a", "b", "c"], "length": 2}
    )
    decoded = make(schema).decode([message({"x": x, "topics": topics}) for topics in ([None, "c"], ["a", "b", "c"])])
    assert decoded.columns["label"].tolist() == [[-100, 2], [0, 1]]
