"""Fields within objects, of any name, or of several meanings: each format reads the same events."""

import io
import json

import fastavro
import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from anabranch.ingest.backfill.row_decoder import RowDecoder
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.arrow import ArrowFormat
from anabranch.ingest.formats.avro import make_decoder
from anabranch.ingest.formats.avro_records.fields import read_fields
from anabranch.ingest.formats.avro_records.rows import AvroRowsDecoder
from anabranch.ingest.formats.avro_records.schema import parse_avro
from anabranch.ingest.formats.event_fields import document_of, event_of
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.schema_registry.writer_schema import WriterSchema
from anabranch.ingest.settings.stream import SchemaSettings

SECONDS = 1_700_000_000.5
MS = 1_700_000_000_500
ISO = "2023-11-14T22:13:20.500Z"
SETTINGS = {
    "features": {
        "amount": {"dtype": "float64", "field": "after.amount", "missing": "mean"},
        "device": {"dtype": "string", "encode": {"hash": 1000}, "field": ["after", "device-type"], "default": "none"},
        "at": {"dtype": "float64", "cycles": ["day"], "unit": "ms", "field": "after.at"},
        "account": {"dtype": "int64", "encode": {"learn": 16}, "field": "id"},
    },
    "label": {"name": "fraud", "classes": 2, "field": "after.fraud"},
    "time": {"name": "at", "field": "after.at", "unit": "ms"},
    "key": {"name": "who", "field": "id"},
}
FLAT = {
    "features": {
        name: {key: value for key, value in feature.items() if key not in ("field", "unit")}
        for name, feature in SETTINGS["features"].items()
    },
    "label": {"name": "fraud", "classes": 2},
    "time": {"name": "time"},
    "key": {"name": "who"},
}
GOOD = {"id": 7, "after": {"amount": 1.5, "device-type": "pos", "at": MS, "fraud": 1}}


def schema(settings=SETTINGS, **changes):
    return Schema(SchemaSettings.model_validate({**settings, **changes}))


def decoded(*messages, of=None):
    values = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in messages]
    return JsonFormat(of or schema()).decode(values)


def expected(amount=1.5, device="pos", fraud=1):
    event = {"amount": amount, "device": device, "at": SECONDS, "account": 7, "fraud": fraud, "time": SECONDS, "who": 7}
    return JsonFormat(schema(FLAT)).decode([msgspec.json.encode({k: v for k, v in event.items() if v is not None})])


def assert_same(found, correct):
    assert [each.reason for each in found.rejects] == []
    assert found.columns.keys() == correct.columns.keys()
    for name, column in correct.columns.items():
        np.testing.assert_array_equal(found.columns[name], column, err_msg=name)


class TestJson:
    @pytest.mark.parametrize("at", [MS, float(MS), ISO, "2023-11-14T23:13:20.5+01:00"])
    def test_reads_fields_in_objects_and_times_in_any_form(self, at):
        assert_same(decoded({**GOOD, "after": {**GOOD["after"], "at": at}}), expected())

    def test_null_or_absent_is_missing_where_the_schema_says_so(self):
        for change in ({"amount": None, "device-type": None, "fraud": None}, {}):
            message = {"id": 7, "after": {"at": MS, **change}}
            assert_same(decoded(message), expected(amount=None, device=None, fraud=None))

    @pytest.mark.parametrize(
        ("message", "reason"),
        [
            ({"after": GOOD["after"]}, "Object missing required field `id`"),
            ({"id": None, "after": GOOD["after"]}, "got `null` - at `$.id`"),
            ({"id": 1.5, "after": GOOD["after"]}, "at `$.id`"),
            ({"id": 7}, "Object missing required field `after`"),
            ({"id": 7, "after": None}, "Expected `object`, got `null` - at `$.after`"),
            ({"id": 7, "after": [GOOD["after"]]}, "Expected `object`, got `array` - at `$.after`"),
            ({"id": 7, "after": "text"}, "Expected `object`, got `str` - at `$.after`"),
            ({"id": 7, "after": {**GOOD["after"], "at": None}}, "got `null` - at `$.after.at`"),
            ({"id": 7, "after": {**GOOD["after"], "at": "noon"}}, "milliseconds since 1970 or an ISO time, got 'noon'"),
            ({"id": 7, "after": {**GOOD["after"], "at": MS * 1e6}}, "at is not a time in milliseconds since 1970"),
            ({"id": 7, "after": {**GOOD["after"], "fraud": 2}}, "at `$.after.fraud`"),
            (b'{"after":' * 250, "truncated"),
            (b'{"x":' * 2000 + b"1" + b"}" * 2000, "recursion"),
        ],
    )
    def test_what_does_not_fit_is_a_reject_that_names_the_field(self, message, reason):
        found = decoded(GOOD, message, GOOD)
        (reject,) = found.rejects
        assert reject.message == 1
        assert reason in reject.reason
        assert found.message.tolist() == [0, 2]

    def test_of_a_key_that_occurs_twice_the_last_one_counts(self):
        value = b'{"id":7,"after":{"amount":9,"device-type":"pos","at":%d,"fraud":1,"amount":1.5}}' % MS
        assert_same(decoded(value), expected())

    def test_null_says_what_to_set(self):
        of = schema(FLAT, features={"amount": {"dtype": "float64"}, "n": {"dtype": "int8", "default": 0}})
        (reject,) = decoded({"amount": None, "time": 1, "who": 1}, of=of).rejects
        assert reject.reason.endswith("at `$.amount`; where it may be null, set schema.features.amount.missing")

    def test_whole_seconds_of_a_feature_are_those_before_a_time(self):
        features = {"at": {"dtype": "int64", "cycles": ["day"], "unit": "us", "shape": [2]}}
        of = schema(features=features, time=None, key=None, label={"name": "y", "classes": 2})
        found = decoded({"at": [1_999_999, "1970-01-01T00:00:02.9Z"], "y": 1}, of=of)
        assert found.columns["feature.at"].tolist() == [[1, 2]]

    @given(
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.integers(),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(
                    st.sampled_from(["id", "after", "amount", "at", "fraud", "device-type"]), inner, max_size=5
                )
            ),
            max_leaves=12,
        )
    )
    def test_any_json_is_an_event_or_a_reject(self, message):
        found = decoded(json.dumps(message).encode())
        assert len(found.message) + len(found.rejects) == 1

    def test_a_message_and_its_event_are_made_of_each_other(self):
        event = {"amount": 1.5, "device": "pos", "at": MS, "account": 7, "fraud": 1, "who": 7}
        assert document_of(schema(), event) == GOOD
        assert event_of(schema(), GOOD) == event


class TestTables:
    STRUCT = pa.struct(
        [("amount", pa.float64()), ("device-type", pa.string()), ("at", pa.timestamp("us")), ("fraud", pa.int64())]
    )

    @pytest.mark.parametrize(
        "columns",
        [
            {"id": pa.array([7]), "after": pa.array([{**GOOD["after"], "at": MS * 1000}], STRUCT)},
            {"id": pa.array([7]), **{f"after.{name}": pa.array([value]) for name, value in GOOD["after"].items()}},
            {"id": pa.array([7]), "after": pa.array([{**GOOD["after"], "at": ISO}])},
        ],
    )
    def test_read_structs_and_columns_with_dots(self, columns):
        table = pa.table(columns)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        assert_same(ArrowFormat(schema()).decode([sink.getvalue().to_pybytes()]), expected())
        decoder = RowDecoder(schema(), "at", 1000)
        assert decoder.problem(table.schema) is None
        assert_same(decoder.decode(table.select(decoder.columns_in(table.schema))), expected())
        assert decoder.times_ms(table).tolist() == [MS]

    def test_a_null_struct_has_no_fields(self):
        table = pa.table({"id": pa.array([7]), "after": pa.array([None], self.STRUCT)})
        (reject,) = RowDecoder(schema(), None, 1000).decode(table).rejects
        assert reject.reason == "at is null"

    def test_a_column_that_is_no_struct_is_named(self):
        problem = RowDecoder(schema(), None, 1000).problem(pa.schema([("id", pa.int64()), ("after", pa.string())]))
        assert problem == "it has no column after.at"


AVRO = {
    "type": "record",
    "name": "Change",
    "fields": [
        {"name": "source", "type": "string"},
        {"name": "id", "type": "long"},
        {
            "name": "after",
            "type": [
                "null",
                {
                    "type": "record",
                    "name": "Row",
                    "fields": [
                        {"name": "skipped", "type": ["null", "string"]},
                        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
                        {"name": "amount", "type": ["null", "double"]},
                        {"name": "fraud", "type": ["null", "int"]},
                    ],
                },
            ],
        },
    ],
}


@pytest.mark.parametrize("columns", [False, True])
def test_avro_reads_records_in_records(columns):
    of = schema(features={name: each for name, each in SETTINGS["features"].items() if name != "device"})
    writer = WriterSchema(1, "avro", json.dumps(AVRO))
    decoder = make_decoder(writer, of) if columns else AvroRowsDecoder(read_fields(of, parse_avro(writer)))
    rows = [{"skipped": "x", "at": MS, "amount": 1.5, "fraud": 1}, {"at": MS, "amount": None, "fraud": None}, None]
    records = []
    for row in rows:
        sink = io.BytesIO()
        fastavro.schemaless_writer(sink, fastavro.parse_schema(AVRO), {"source": "s", "id": 7, "after": row})
        records.append(sink.getvalue())
    found = decoder.decode(records)
    assert found.message.tolist() == [0, 1]
    assert [each.message for each in found.rejects] == [2]
    assert "at" in found.rejects[0].reason
    np.testing.assert_array_equal(found.columns["feature.amount"], [1.5, np.nan])
    assert found.columns["time"].tolist() == found.columns["feature.at"].tolist() == [SECONDS] * 2
    assert found.columns["feature.account"].tolist() == [7, 7]
    assert found.columns["label"].tolist() == [1, -1]


class TestSettings:
    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"label": {"name": "y", "classes": 2, "field": "id"}}, "account is read from id, which is the label y"),
            ({"key": {"name": "fraud"}}, "two fields are named 'fraud'"),
            ({"key": {"name": "amount"}}, "two fields are named 'amount': after.amount, amount"),
            ({"key": {"name": "who", "field": "after"}}, "after is a field, and has the field after."),
            ({"key": {"name": "who", "field": "after..id"}}, "with dots between"),
            ({"key": {"name": "who", "field": ["x"] * 17}}, "names of 1 to 16 fields"),
        ],
    )
    def test_paths_that_contradict_are_refused(self, changes, sentence):
        with pytest.raises(ValidationError, match=sentence):
            schema(**changes)

    def test_a_unit_is_for_times(self):
        with pytest.raises(ValidationError, match="is for a time, which has cycles"):
            schema(features={"x": {"dtype": "float32", "unit": "ms"}})

    def test_paths_and_units_change_no_stored_event(self):
        assert schema(FLAT, time={"name": "at"}).digest == schema().digest
