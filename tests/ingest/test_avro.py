"""Decoders of Avro: schemas that are hostile, and two decoders that must agree."""

import io
import json
import random
import resource
from decimal import Decimal
from typing import Any

import fastavro
import numpy as np
import pytest

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.avro import make_decoder
from anabranch.ingest.formats.avro_records.columns import AvroColumnsDecoder
from anabranch.ingest.formats.avro_records.fields import read_fields
from anabranch.ingest.formats.avro_records.rows import AvroRowsDecoder
from anabranch.ingest.formats.avro_records.schema import parse_avro
from anabranch.ingest.schema_registry.writer_schema import Reference, UnfitSchemaError, WriterSchema
from anabranch.ingest.settings.stream import SchemaSettings

SCHEMA = Schema(
    SchemaSettings.model_validate(
        {
            "features": {
                "x": {"dtype": "float32"},
                "words": {"dtype": "string", "encode": {"hash": 1000}, "default": ""},
                "pair": {"dtype": "int64", "shape": [2], "default": 0},
            },
            "label": {"name": "y", "classes": 2},
        }
    )
)


def record(*fields, name="Event"):
    return {"type": "record", "name": name, "fields": [{"name": n, "type": kind} for n, kind in fields]}


def decoder(schema, references=()):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return make_decoder(WriterSchema(7, "avro", text, references), SCHEMA)


def packed(schema, event):
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, fastavro.parse_schema(schema), event)
    return sink.getvalue()


def varint(number):
    coded, out = (number << 1) ^ (number >> 63), bytearray()
    while coded > 127:
        out.append(coded & 127 | 128)
        coded >>= 7
    return bytes([*out, coded])


class TestHostileSchemas:
    LIST = record(("v", "int"), ("next", ["null", "Node"]), name="Node")
    DEEP = '{"type": "array", "items": ' * 200 + '"int"' + "}" * 200

    @pytest.mark.parametrize(
        ("schema", "sentence"),
        [
            (record(("x", "double"), ("list", LIST)), "its Avro schema refers to itself in Node; recursive types"),
            (record(("x", "double"), ("deep", json.loads(DEEP))), "its Avro schema is nested more than 32 types deep"),
            ('{"type": "array", "items": ' * 50_000, "schema 7 is n"),
            (
                record(("x", "double"), ("a", {"type": "array", "items": "null"})),
                "an array of null, whose values have no",
            ),
            (
                record(("x", "double"), ("a", {"type": "array", "items": record(("b", "null"), name="Empty")})),
                "an array of record Empty, whose values have no bytes",
            ),
            ('{"type": "enum", "name": "E", "symbols": ["a"]}', "schema 7 is of Avro type enum E, not a record"),
            ('"double"', "schema 7 is of Avro type double, not a record"),
            ("{}", "schema 7 is not an Avro schema"),
            ("", "schema 7 is not an Avro schema"),
            ("[]", "schema 7 is not an Avro schema"),
            ('{"type": "record", "name": "E", "fields": 7}', "schema 7 is not an Avro schema"),
            (record(("x", "shop.Unknown")), "schema 7 is not an Avro schema (ValueError: the type shop.Unknown is not"),
            (record(("x", "double"), ("x", "double")), "two fields of Event have the same name"),
            (
                record(("x", "double"), ("c", {"type": "enum", "name": "C", "symbols": ["a", "a"]})),
                "its Avro schema cannot be used: All symbols in an enum must be unique",
            ),
        ],
    )
    def test_are_refused_with_one_sentence(self, schema, sentence):
        with pytest.raises(UnfitSchemaError) as raised:
            decoder(schema)
        assert sentence in str(raised.value)
        assert len(str(raised.value)) < 400

    def test_types_that_double_at_each_name_are_refused_before_they_fill_the_memory(self):
        kind: Any = "int"
        for level in range(30):
            pair = record(("a", kind), ("b", f"L{level - 1}" if level else "int"), name=f"L{level}")
            kind = pair
        with pytest.raises(UnfitSchemaError, match="its Avro schema is too large: it has more than 20000 types"):
            decoder(record(("x", "double"), ("tree", kind)))

    def test_a_null_record_of_many_fields_is_not_made_columns(self):
        """One byte would be 80 KB of columns."""
        huge = record(*((f"f{index}", "double") for index in range(9_000)), name="Huge")
        schema = record(("x", "double"), ("huge", ["null", huge]))
        made = decoder(schema)
        assert isinstance(made, AvroRowsDecoder)
        decoded = made.decode([packed(schema, {"x": 1.0, "huge": None})] * 10)
        assert decoded.columns["feature.x"].tolist() == [1.0] * 10

    def test_values_of_an_array_that_expand_are_not_made_columns(self):
        entry = record(*((f"f{index}", ["null", "double"]) for index in range(10)), name="Entry")
        nested = record(*((f"g{index}", ["null", entry | {"name": f"E{index}"}]) for index in range(4)), name="Nested")
        assert isinstance(decoder(record(("x", "double"), ("a", {"type": "array", "items": nested}))), AvroRowsDecoder)
        assert isinstance(
            decoder(record(("x", "double"), ("a", {"type": "array", "items": entry}))), AvroColumnsDecoder
        )


class TestHostileRecords:
    @pytest.fixture(params=[AvroColumnsDecoder, AvroRowsDecoder])
    def kind(self, request):
        return request.param

    @pytest.mark.parametrize(
        "spoiled",
        [
            varint(10**9),
            varint(2**62),
            varint(-(2**62)) + varint(2**40),
            varint(10**9) + b"\0" * 100,
            b"\xff" * 30,
        ],
    )
    def test_claims_of_any_number_of_values_take_no_memory(self, kind, spoiled):
        schema = record(("pair", {"type": "array", "items": "long"}), ("x", "double"))
        made = kind(read_fields(SCHEMA, parse_avro(WriterSchema(7, "avro", json.dumps(schema)))))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        decoded = made.decode([spoiled])
        (reject,) = decoded.rejects
        assert reject.reason.startswith("schema: the record cannot be read: ")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB

    def test_text_that_is_not_utf_8_is_rejected_alone(self, kind):
        schema = record(("words", "string"), ("x", "double"))
        made = kind(read_fields(SCHEMA, parse_avro(WriterSchema(7, "avro", json.dumps(schema)))))
        good = packed(schema, {"words": "abc", "x": 1.0})
        decoded = made.decode([good, good.replace(b"abc", b"a\xffc"), good])
        assert [reject.message for reject in decoded.rejects] == [1]
        assert decoded.message.tolist() == [0, 2]


@pytest.mark.parametrize(("share", "most_calls"), [(1 / 20, 70), (1 / 20_000, 20)])
def test_bad_records_among_many_cost_few_groups(monkeypatch, share, most_calls):
    """Halving down to each bad record costs more than decoding one by one."""
    schema = record(("x", "double"), ("y", "int"))
    made = decoder(schema)
    assert isinstance(made, AvroColumnsDecoder)
    good = packed(schema, {"x": 1.0, "y": 1})
    bad = set(range(7, 20_000, int(1 / share)))
    read, calls = made._read, []
    monkeypatch.setattr(made, "_read", lambda records: calls.append(len(records)) or read(records))
    decoded = made.decode([good[:-3] if index in bad else good for index in range(20_000)])
    assert [reject.message for reject in decoded.rejects] == sorted(bad)
    assert decoded.message.tolist() == [index for index in range(20_000) if index not in bad]
    assert 2 <= len(calls) <= most_calls


class TestTypes:
    def test_named_types_come_from_references_too(self):
        money = Reference("shop.Money", json.dumps(record(("units", "long"), name="shop.Money")))
        country = Reference(
            "shop.Country", '{"type": "enum", "name": "Country", "namespace": "shop", "symbols": ["DE"]}'
        )
        schema = record(("x", "double"), ("paid", "shop.Money"), ("words", "Country"), name="shop.Event")
        made = decoder(schema, (money, country))
        inline = record(
            ("x", "double"),
            ("paid", record(("units", "long"), name="Money")),
            ("words", {"type": "enum", "name": "Country", "symbols": ["DE"]}),
        )
        decoded = made.decode([packed(inline, {"x": 2.0, "paid": {"units": 5}, "words": "DE"})])
        assert decoded.columns["feature.x"].tolist() == [2.0]
        assert decoded.unknown_fields == 1

    @pytest.mark.parametrize(
        ("logical", "value"),
        [
            ("timestamp-millis", 1_700_000_000_250),
            ("timestamp-micros", 1_700_000_000_250_000),
            ("timestamp-nanos", 1_700_000_000_250_000_000),
            ("local-timestamp-millis", 1_700_000_000_250),
        ],
    )
    @pytest.mark.parametrize("kind", [AvroColumnsDecoder, AvroRowsDecoder])
    def test_timestamps_of_any_unit_are_seconds(self, make_schema, kind, logical, value):
        schema = make_schema({"x": {"dtype": "float32"}}, {"name": "y", "classes": 2}, time={"name": "at"})
        writer = record(("x", "double"), ("at", ["null", {"type": "long", "logicalType": logical}]))
        made = kind(read_fields(schema, parse_avro(WriterSchema(7, "avro", json.dumps(writer)))))
        plain = record(("x", "double"), ("at", ["null", "long"]))
        decoded = made.decode([packed(plain, {"x": 1.0, "at": value})])
        assert decoded.columns["time"].tolist() == pytest.approx([1_700_000_000.25], abs=1e-6)

    @pytest.mark.parametrize("logical", ["date", "time-millis"])
    def test_a_date_is_no_time_of_an_event_and_is_a_whole_number_elsewhere(self, make_schema, logical):
        kind = {"type": "int", "logicalType": logical}
        features = {"x": {"dtype": "int64"}}
        timed = make_schema(features, {"name": "y", "classes": 2}, time={"name": "at"})
        parsed = parse_avro(WriterSchema(7, "avro", json.dumps(record(("x", "int"), ("at", kind)))))
        with pytest.raises(UnfitSchemaError, match=f"at is of Avro type {logical}, not a timestamp or a number"):
            read_fields(timed, parsed)
        plain = make_schema(features, {"name": "y", "classes": 2})
        made = make_decoder(WriterSchema(7, "avro", json.dumps(record(("x", kind)))), plain)
        assert made.decode([varint(19_000)]).columns["feature.x"].tolist() == [19_000]

    def test_what_pyruhvro_does_not_take_is_read_one_by_one(self):
        schema = record(("x", "double"), ("a", [["null", "int"]]))
        made = decoder(schema)
        assert isinstance(made, AvroRowsDecoder)
        value = packed(record(("x", "double")), {"x": 1.5}) + varint(0) + varint(1) + varint(7)
        assert made.decode([value]).columns["feature.x"].tolist() == [1.5]

    @pytest.mark.parametrize(
        "kind", [{"type": "bytes"}, {"type": "fixed", "name": "Amount", "size": 8}], ids=["bytes", "fixed"]
    )
    def test_decimals_are_numbers(self, kind):
        schema = record(("x", ["null", {**kind, "logicalType": "decimal", "precision": 10, "scale": 2}]))
        decoded = decoder(schema).decode([packed(schema, {"x": Decimal("12.25")})])
        assert decoded.columns["feature.x"].tolist() == [12.25]

    def test_integers_of_more_than_64_bits_cannot_be_written_and_others_are_read_whole(self):
        schema = record(("x", "double"), ("pair", {"type": "array", "items": "long"}))
        pair = [2**63 - 1, -(2**63)]
        decoded = decoder(schema).decode([packed(schema, {"x": 1.0, "pair": pair})])
        assert decoded.columns["feature.pair"].tolist() == [pair]


class RandomRecords:
    """Random types, and values of them."""

    def __init__(self, seed):
        self._dice = random.Random(seed)
        self._names = 0

    def named(self):
        self._names += 1
        return f"n{self._names}"

    def schema(self):
        dice = self._dice
        fields = [
            ("x", dice.choice(["int", "long", "float", "double", ["null", "double"]])),
            ("y", dice.choice(["int", ["null", "long"]])),
            ("pair", dice.choice([{"type": "array", "items": "int"}, ["null", {"type": "array", "items": "long"}]])),
            ("words", dice.choice(["string", {"type": "enum", "name": "Z", "symbols": ["q", "r"]}])),
            *((self.named(), self.kind()) for _ in range(dice.randint(0, 4))),
        ]
        dice.shuffle(fields)
        return record(*fields)

    def kind(self, depth=0):
        dice = self._dice
        plain = ["boolean", "int", "long", "float", "double", "bytes", "string"]
        kind = dice.choice(plain if depth > 3 else [*plain, "null", "enum", "array", "map", "record", "union", "union"])
        if kind == "enum":
            return {"type": "enum", "name": self.named(), "symbols": ["A", "B", "C"]}
        if kind in ("array", "map"):
            values = self.kind(depth + 1)
            return {"type": kind, "items" if kind == "array" else "values": "int" if values == "null" else values}
        if kind == "record":
            return record(*((self.named(), self.kind(depth + 1)) for _ in range(3)), ("last", "int"), name=self.named())
        return dice.choice([["null", self.kind(4)], [self.kind(4), "null"]]) if kind == "union" else kind

    def value(self, kind):
        dice = self._dice
        if isinstance(kind, list):
            return self.value(dice.choice(kind))
        name = kind["type"] if isinstance(kind, dict) else kind
        match name:
            case "record":
                return {field["name"]: self.value(field["type"]) for field in kind["fields"]}
            case "array":
                return [self.value(kind["items"]) for _ in range(dice.randint(0, 3))]
            case "map":
                return {f"k{index}": self.value(kind["values"]) for index in range(dice.randint(0, 3))}
            case "enum":
                return dice.choice(kind["symbols"])
        values: dict[str, list[Any]] = {"null": [None], "boolean": [True, False], "bytes": [b"", b"\xff\0"]}
        values |= {"int": [0, -1, 2**31 - 1], "long": [0, 1, -(2**63)], "string": ["", "abc", "\u00e9"]}
        return dice.choice(values.get(name, [0.5, -3.0, 1e9]))

    def spoiled(self, value):
        spoiled, at = bytearray(value), self._dice.randrange(len(value))
        match self._dice.randrange(3):
            case 0:
                return value[:at]
            case 1:
                return value + b"\x02"
        spoiled[at] = self._dice.randrange(256)
        return bytes(spoiled)


@pytest.mark.parametrize("items", ["float", "boolean", {"type": "fixed", "name": "F", "size": 4}])
@pytest.mark.parametrize("columns", [True, False])
def test_a_skipped_array_that_claims_more_values_than_there_are_bytes_ends_with_the_record(items, columns):
    schema = record(("x", "float"), ("skipped", {"type": "array", "items": items}), ("y", "int"))
    reading = read_fields(SCHEMA, parse_avro(WriterSchema(7, "avro", json.dumps(schema))))
    begin = bytes(4) + varint(2**62)  # fastavro alone skips for centuries, and no time limit ends it
    decoded = (AvroColumnsDecoder if columns else AvroRowsDecoder)(reading).decode([begin, begin + bytes(8)])
    assert [reject.message for reject in decoded.rejects] == [0, 1]


def test_a_skipped_text_of_negative_length_does_not_go_back():
    schema = record(("x", "float"), ("skipped", {"type": "array", "items": "string"}), ("y", "int"))
    reading = read_fields(SCHEMA, parse_avro(WriterSchema(7, "avro", json.dumps(schema))))
    decoded = AvroRowsDecoder(reading).decode([bytes(4) + varint(2**62) + varint(-1) * 3])
    assert [reject.reason for reject in decoded.rejects] == ["schema: the record cannot be read: it ends too early"]


@pytest.mark.parametrize("seed", range(40))
def test_both_decoders_read_the_same_and_neither_rejects_a_good_record(seed, capfd):
    records = RandomRecords(seed)
    schema = records.schema()
    reading = read_fields(SCHEMA, parse_avro(WriterSchema(7, "avro", json.dumps(schema))))
    events = [records.value(schema) | {"pair": [1, 2], "x": 1.0 if seed % 2 else 3, "y": 1} for _ in range(8)]
    kinds = {field["name"]: field["type"] for field in schema["fields"]}
    events = [event | {"x": int(event["x"]) if kinds["x"] in ("int", "long") else event["x"]} for event in events]
    good = [packed(schema, event) for event in events]
    values = [*good, *map(records.spoiled, good)]
    columns, rows = AvroColumnsDecoder(reading).decode(values), AvroRowsDecoder(reading).decode(values)
    for decoded in (columns, rows):
        assert decoded.message[:8].tolist() == list(range(8)), decoded.rejects
        assert len(decoded.message) + len(decoded.rejects) == len(values)
    both = np.intersect1d(columns.message, rows.message)
    for name, column in columns.columns.items():
        of_rows = rows.columns[name][np.isin(rows.message, both)]
        np.testing.assert_array_equal(column[np.isin(columns.message, both)], of_rows, name)
    assert "panicked" not in capfd.readouterr().err
