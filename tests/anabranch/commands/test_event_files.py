"""CSV and Parquet as sources of events: what ingest decodes is what the file holds."""

import csv
import decimal
import gzip
import io
import json
import math
import sys
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.commands.event_files.files import STDIN, open_source
from anabranch.commands.produce import send_events
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill import parquet_file
from anabranch.ingest.backfill.history import FileHistory
from anabranch.ingest.events.encoders import HashEncoder
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.kafka.producer import create_topics
from anabranch.ingest.settings.backfill import BackfillSettings
from anabranch.ingest.settings.stream import SchemaSettings

SCHEMA = {
    "features": {
        "amount": {"dtype": "float64"},
        "small": {"dtype": "int8"},
        "large": {"dtype": "int64"},
        "huge": {"dtype": "uint64"},
        "flag": {"dtype": "bool"},
        "country": {"dtype": "string", "encode": {"hash": 1000}},
        "history": {"dtype": "float32", "shape": [2, 2], "default": 0},
    },
    "label": {"name": "y", "classes": ["good", "bad"]},
    "key": {"name": "id"},
}
ROW = {
    "amount": 1.5,
    "small": -128,
    "large": -(2**63),
    "huge": 2**64 - 1,
    "flag": True,
    "country": 'a,"b"\nc',
    "history": [[1.0, 2.0], [3.0, 4.0]],
    "y": "bad",
    "id": "k-1",
}


@pytest.fixture(scope="session")
def schema():
    return Schema(SchemaSettings.model_validate(SCHEMA))


def read(path, schema, kind=None, *, checked=True, delimiter=None):
    with open_source(path, kind, delimiter, schema, checked=checked) as source:
        return list(source)


def table(path, header, *rows, delimiter=",", encoding="utf-8"):
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerows([header, *rows])
    path.write_bytes(text.getvalue().encode(encoding))
    return path


def cells(row):
    return [json.dumps(row[field]) if isinstance(row[field], list) else row[field] for field in ROW]


class TestCsv:
    def test_a_row_becomes_an_event_by_the_types_of_the_schema(self, tmp_path, schema):
        (record,) = read(table(tmp_path / "a.csv", list(ROW), cells(ROW)), schema)
        assert (record.location, record.content, record.fault) == ("line 2", ROW, "")

    @pytest.mark.parametrize("name", ["history.{}.{}", "history[{}][{}]"])
    def test_a_shape_may_be_spread_over_columns_in_any_order(self, tmp_path, schema, name):
        flat = {name.format(i, j): ROW["history"][i][j] for i in (1, 0) for j in (0, 1)}
        row = {**flat, **{field: value for field, value in ROW.items() if field != "history"}}
        (record,) = read(table(tmp_path / "a.csv", list(row), list(row.values())), schema)
        assert record.content == ROW

    @pytest.mark.parametrize(("cell", "label"), [('"[""red"", ""blue""]"', ["red", "blue"]), ("[]", []), ("", None)])
    def test_a_label_of_several_classes_is_a_list(self, tmp_path, cell, label):
        fields = {"features": {"x": {"dtype": "int8"}}, "label": {"name": "y", "classes": ["red", "blue"]}}
        fields["label"]["multi"] = True
        several = Schema(SchemaSettings.model_validate(fields))
        (tmp_path / "events.csv").write_text(f"x,y\n1,{cell}\n")
        (event,) = read(tmp_path / "events.csv", several)
        assert event.content.get("y") == label

    def test_an_empty_cell_is_a_missing_field(self, tmp_path, schema):
        row = ROW | {"history": "", "y": ""}
        (record,) = read(table(tmp_path / "a.csv", list(row), cells(row)), schema)
        assert record.content == {field: value for field, value in ROW.items() if field not in ("history", "y")}

    def test_a_shape_that_is_half_empty_is_a_fault(self, tmp_path, schema):
        header = [
            *(field for field in ROW if field != "history"),
            *(f"history.{i}.{j}" for i in (0, 1) for j in (0, 1)),
        ]
        row = [*(value for field, value in ROW.items() if field != "history"), 1, "", 3, 4]
        (record,) = read(table(tmp_path / "a.csv", header, row), schema)
        assert record.fault == "history.0.1 is empty"

    @pytest.mark.parametrize(
        ("field", "cell", "fault"),
        [
            ("amount", "x", "amount = 'x' is not a number"),
            ("small", "1.5", "small = '1.5' is not a whole number"),
            ("flag", "maybe", "flag = 'maybe' is not true or false"),
            ("history", "[1", "history = '[1' Input data was truncated"),
        ],
    )
    def test_a_cell_of_another_type_is_named_with_its_line(self, tmp_path, schema, field, cell, fault):
        path = table(tmp_path / "a.csv", list(ROW), cells(ROW), cells(ROW | {field: cell}))
        good, bad = read(path, schema)
        # The row before has a line feed in a cell.
        assert (good.fault, bad.location, bad.fault) == ("", "line 4", fault)
        assert read(path, schema, checked=False)[1].content[field] == cell

    def test_whole_numbers_may_have_been_floats(self, tmp_path, schema):
        (record,) = read(table(tmp_path / "a.csv", list(ROW), cells(ROW | {"small": "3.0"})), schema)
        assert record.content["small"] == 3

    def test_a_row_of_another_length_is_a_fault(self, tmp_path, schema):
        (record,) = read(table(tmp_path / "a.csv", list(ROW), ["1"]), schema)
        assert record.fault == "it has 1 cells, but the header has 9"

    def test_delimiter_byte_order_mark_and_gzip(self, tmp_path, schema):
        plain = table(tmp_path / "a.tsv", list(ROW), cells(ROW), delimiter="\t", encoding="utf-8-sig")
        packed = tmp_path / "a.tsv.gz"
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        semicolons = table(tmp_path / "a.csv", list(ROW), cells(ROW), delimiter=";")
        for records in (read(plain, schema), read(packed, schema), read(semicolons, schema, delimiter=";")):
            assert [record.content for record in records] == [ROW]

    def test_columns_that_are_not_in_the_schema_are_left_out_and_reported(self, tmp_path, schema):
        path = table(tmp_path / "a.csv", ["extra", *ROW], ["?", *cells(ROW)])
        with open_source(path, None, None, schema, checked=True) as source:
            assert source.left_out == ["extra"]
            assert [record.content for record in source] == [ROW]

    @pytest.mark.parametrize(
        ("header", "sentence"),
        [
            ([], "is empty: the first line of CSV names the columns"),
            (["amount", "amount"], "has two columns named 'amount'"),
            (["amount"], "has no column 'small'; its columns are amount"),
            ([*ROW, "history.0.0"], "the column history.0.1 is missing: history has the shape \\[2, 2\\]"),
            ([*ROW, "history.2.0"], "the column history.0.0 is missing: history has the shape"),
        ],
    )
    def test_columns_that_do_not_fit_the_schema_are_one_sentence(self, tmp_path, schema, header, sentence):
        path = table(tmp_path / "a.csv", header) if header else tmp_path / "a.csv"
        path.touch()
        with pytest.raises(SettingsError, match=sentence):
            read(path, schema)

    @pytest.mark.parametrize(
        ("name", "content", "sentence"),
        [
            ("a.csv", b"am\xffount\n", "cannot be read as CSV: line 1: it is not UTF-8 text"),
            ("a.csv.gz", b"amount\n", "cannot be read: Not a gzipped file"),
            ("a.csv.gz", gzip.compress(b"amount\n" * 99, mtime=0)[:-12], "cannot be read: Compressed file ended"),
            ("a.parquet", b"amount", "cannot be read as Parquet"),
        ],
    )
    def test_a_file_that_is_not_what_its_name_says(self, tmp_path, schema, name, content, sentence):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SettingsError, match=sentence):
            read(tmp_path / name, schema, checked=False)

    def test_a_misplaced_quote_is_a_fault(self, tmp_path, schema):
        path = table(tmp_path / "a.csv", list(ROW), cells(ROW))
        path.write_bytes(path.read_bytes() + b'"a"b\n')
        assert "expected after" in read(path, schema)[1].fault


class TestParquet:
    def write(self, path, rows, **options):
        pq.write_table(pa.Table.from_pylist(rows, self.types(rows)), path, **options)
        return path

    def types(self, rows):
        types = {"huge": pa.uint64(), "small": pa.int8()}
        found = pa.Table.from_pylist([{k: v for k, v in row.items() if k not in types} for row in rows]).schema
        return pa.schema([pa.field(name, types.get(name) or found.field(name).type) for name in rows[0]])

    def test_rows_are_events(self, tmp_path, schema):
        path = self.write(tmp_path / "a.parquet", [ROW, ROW | {"history": None, "y": None}])
        first, second = read(path, schema)
        assert (first.location, first.content) == ("row 1", ROW)
        assert second.content == {field: value for field, value in ROW.items() if field not in ("history", "y")}

    def test_row_groups_are_read_one_by_one(self, tmp_path, schema):
        rows = [ROW | {"large": number} for number in range(5000)]
        path = self.write(tmp_path / "a.parquet", rows, row_group_size=700)
        with open_source(path, None, None, schema, checked=True) as source:
            records = iter(source)
            assert next(records).content == rows[0]
            assert (source.done(), source.total) == (1, 5000)
            assert [record.content["large"] for record in records] == list(range(1, 5000))

    def test_columns_that_are_not_needed_are_not_read(self, tmp_path, schema):
        path = self.write(tmp_path / "a.parquet", [{"extra": "x"} | ROW])
        with open_source(path, None, None, schema, checked=True) as source:
            assert (source.left_out, [record.content for record in source]) == (["extra"], [ROW])

    def test_two_columns_of_one_name_are_refused(self, tmp_path, schema):
        pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["y", "y"]), tmp_path / "a.parquet")
        with pytest.raises(SettingsError, match=r"cannot be read as Parquet: two columns are named 'y'"):
            read(tmp_path / "a.parquet", schema)

    def test_a_text_that_would_fill_the_memory_is_refused(self, tmp_path, schema, monkeypatch):
        monkeypatch.setattr(parquet_file, "_EXPANDED_BYTES", 100_000)
        monkeypatch.setattr(parquet_file, "_MOST_ROW_BYTES", 50_000)
        path = self.write(tmp_path / "a.parquet", [ROW | {"country": "x" * 60_000}] * 3)
        with pytest.raises(SettingsError, match=r"is damaged after row 0: a row takes .* of memory"):
            read(path, schema)

    def test_stdin_is_refused(self, schema):
        with pytest.raises(SettingsError, match="cannot be read from stdin"):
            read(STDIN, schema, "parquet")

    def test_without_pyarrow_the_way_out_is_named(self, tmp_path, schema, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(SettingsError, match=r"pip install 'anabranch\[arrow\]'"):
            read(tmp_path / "a.parquet", schema)


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1, max_size=20)
EVENTS = st.fixed_dictionaries(
    {
        "amount": st.floats(allow_nan=False, allow_infinity=False),
        "small": st.integers(-128, 127),
        "large": st.integers(-(2**63), 2**63 - 1),
        "huge": st.integers(0, 2**64 - 1),
        "flag": st.booleans(),
        "country": WORDS,
        "history": st.lists(
            st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
            min_size=2,
            max_size=2,
        ),
        "y": st.sampled_from(["good", "bad"]),
        "id": WORDS | st.integers(-(2**63), 2**63 - 1).map(str),
    }
)


def assert_decoded(schema, values, rows):
    decoded = JsonFormat(schema).decode(values)
    assert decoded.rejects == []
    for name in ("amount", "small", "large", "huge", "flag", "history"):
        column = decoded.columns[f"feature.{name}"]
        np.testing.assert_array_equal(column, np.array([row[name] for row in rows], column.dtype))
    encoder = HashEncoder(schema.settings.features["country"].encode)
    assert decoded.columns["feature.country"].tolist() == encoder.encode([row["country"] for row in rows]).tolist()
    assert decoded.columns["label"].tolist() == [["good", "bad"].index(row["y"]) for row in rows]


class TestEveryValue:
    """Whatever the types of the schema hold goes through a file unchanged."""

    @pytest.mark.slow
    @given(rows=st.lists(EVENTS, min_size=1, max_size=5))
    def test_by_csv(self, tmp_path_factory, schema, rows):
        path = table(tmp_path_factory.mktemp("csv") / "a.csv", list(ROW), *map(cells, rows))
        records = read(path, schema)
        assert [record.fault for record in records] == [""] * len(rows)
        assert [str(record.content["id"]) for record in records] == [row["id"] for row in rows]
        assert_decoded(schema, [json.dumps(record.content).encode() for record in records], rows)

    @pytest.mark.slow
    @given(rows=st.lists(EVENTS, min_size=1, max_size=5))
    def test_by_parquet(self, tmp_path_factory, schema, rows):
        path = TestParquet().write(tmp_path_factory.mktemp("parquet") / "a.parquet", rows)
        assert [record.content for record in read(path, schema)] == rows


@pytest.fixture
def pipeline(kafka, request, example, tmp_path):
    """A pipeline of SCHEMA on a topic of three partitions."""
    topic = f"source-{tmp_path.name}-{request.node.name[:20]}".replace("[", "-").replace("]", "")
    text = "\n".join(
        f"[schema.features.{name}]\n" + "\n".join(f"{key} = {toml(value)}" for key, value in feature.items())
        for name, feature in SCHEMA["features"].items()
    )
    (example / "pipeline.toml").write_text(
        f'name = "d"\n[stream]\nbootstrap_servers = "{kafka.bootstrap}"\ntopics = ["{topic}"]\n{text}\n'
        '[schema.label]\nname = "y"\nclasses = ["good", "bad"]\n[schema.key]\nname = "id"\n'
        '[model]\nfactory = "my_model:build"\n'
    )
    config = load_config(example / "pipeline.toml", {})
    create_topics(config.pipeline.stream, {topic: 3, f"{topic}.dead": 1})
    return config


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


@pytest.mark.services
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_what_ingest_decodes_is_what_the_file_held(kind, pipeline, schema, kafka, consume_all, tmp_path):
    rows = [
        ROW
        | {"large": number, "amount": math.pi * number, "country": f'{number}, "é"\n{number}', "id": f"k{number % 7}"}
        for number in range(600)
    ]
    path = tmp_path / f"events.{kind}"
    if kind == "csv":
        table(path, list(ROW), *map(cells, rows))
    else:
        TestParquet().write(path, rows, row_group_size=100)
    produced = send_events(pipeline, path, topic=None, rate=None, partitions=None, checked=True)
    assert (produced.events, produced.skipped, produced.unknown_fields) == (600, 0, 0)
    records = consume_all(kafka.bootstrap, produced.topic, 600)
    records.sort(key=lambda record: json.loads(record.value)["large"])
    assert_decoded(schema, [record.value for record in records], rows)
    pairs = {(record.key, record.partition) for record in records}
    assert len(pairs) == 7, "the events of a key are in one partition"
    assert {key for key, _ in pairs} == {b"k%d" % number for number in range(7)}


@pytest.mark.services
def test_a_bad_row_of_csv_is_named_with_its_line(pipeline, tmp_path):
    path = table(tmp_path / "a.csv", list(ROW), cells(ROW), cells(ROW | {"small": 128}))
    with pytest.raises(
        SettingsError, match=r"a\.csv, line 4: Expected `int` <= 127 - at `\$\.small`; events sent before it: 1"
    ):
        send_events(pipeline, path, topic=None, rate=None, partitions=None, checked=True)


def test_a_parquet_file_has_the_same_events_for_commands_and_for_the_history(tmp_path):
    """Decimals, labels that are floats or true, views of strings and times without a zone."""
    described = {
        "features": {
            "amount": {"dtype": "float32"},
            "count": {"dtype": "int64"},
            "word": {"dtype": "string", "encode": {"hash": 99}},
        },
        "label": {"name": "y", "classes": 2},
        "key": {"name": "k"},
        "time": {"name": "at"},
    }
    schema = Schema(SchemaSettings.model_validate(described))
    decimals = {
        "amount": pa.array([decimal.Decimal("1.25")] * 3, pa.decimal128(12, 2)),
        "count": pa.array([decimal.Decimal(3)] * 3, pa.decimal128(38, 0)),
        "word": pa.array(["a", "b", "c"]).cast(pa.string_view()),
        "k": pa.array([decimal.Decimal(2**60)] * 3, pa.decimal128(38, 0)),
        "at": pa.array([1_764_000_000_123] * 3, pa.timestamp("ms")),
    }
    for labels in ([True, False, None], [1.0, 0.0, None], [1, 0, None]):
        pq.write_table(pa.table({**decimals, "y": labels}), tmp_path / "a.parquet")
        records = read(tmp_path / "a.parquet", schema)
        decoded = JsonFormat(schema).decode([json.dumps(record.content).encode() for record in records])
        history = FileHistory(BackfillSettings(files=(str(tmp_path / "a.parquet"),)), schema, 0, 1000)
        history.list_files(None)
        rows = history.poll(timedelta(seconds=20))
        history.close()
        assert rows is not None
        assert not [*decoded.rejects, *rows.decoded.rejects]
        for name, column in decoded.columns.items():
            np.testing.assert_array_equal(column, rows.decoded.columns[name], err_msg=name)


def test_a_time_in_csv_is_a_number_or_an_iso_time(tmp_path):
    label, time = {"name": "y", "classes": 2}, {"name": "at"}
    described = {"features": {"x": {"dtype": "float32"}}, "label": label, "time": time}
    schema = Schema(SchemaSettings.model_validate(described))
    (tmp_path / "a.csv").write_text(
        "x,y,at\n1,TRUE,1.5\n1,0,1970-01-01T00:00:02Z\n1,false,1970-01-01 00:00:03\n1,1,soon\n"
    )
    *good, bad = read(tmp_path / "a.csv", schema)
    assert [(record.content["at"], record.content["y"]) for record in good] == [(1.5, True), (2, 0), (3, False)]
    assert bad.fault == "at = 'soon' is neither seconds since 1970 nor an ISO time"
