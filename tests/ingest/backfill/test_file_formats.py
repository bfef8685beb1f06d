"""Files have the same events for the history and for the commands, as JSON lines and as Parquet."""

import gzip
import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.commands.event_files.files import open_source
from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill import parquet_file
from anabranch.ingest.backfill.csv_file import CsvRows
from anabranch.ingest.backfill.csv_text import CsvText
from anabranch.ingest.backfill.history import FileHistory
from anabranch.ingest.backfill.parquet_file import ParquetRows
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.event_fields import document_of
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.settings.backfill import BackfillSettings
from anabranch.ingest.settings.stream import SchemaSettings
from tests.ingest.backfill.test_history import read

SCHEMA = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}})
)
LINES = [json.dumps({"x": n, "y": n % 3}).encode() for n in range(9)]
PLAIN = b"\n".join(LINES) + b"\n"
MARK = b"\xef\xbb\xbf"


def by_history(path):
    settings = BackfillSettings.model_validate({"files": [str(path)], "format": "jsonl"})
    history = FileHistory(settings, SCHEMA, seed=0, longest=1000)
    history.list_files(None)
    found = read(history)
    assert not [reject for rows in found for reject in rows.decoded.rejects]
    assert np.concatenate([rows.offset for rows in found]).tolist() == [*range(len(LINES))]
    return [float(x) for rows in found for x in rows.decoded.columns["feature.x"]]


def by_commands(path):
    with open_source(path, "jsonl", None, SCHEMA, checked=True) as source:
        return [json.loads(record.content)["x"] for record in source if isinstance(record.content, bytes)]


@pytest.mark.parametrize(
    "content",
    [
        PLAIN,
        PLAIN[:-1],
        gzip.compress(PLAIN, mtime=0),
        gzip.compress(PLAIN[:50], mtime=0) + gzip.compress(PLAIN[50:], mtime=0),
        b"\n\n" + PLAIN.replace(b"\n", b"\n\n") + b"\n",
        b"  \n" + PLAIN.replace(b"\n", b"\r\n \t\r\n\r\n") + b" ",
        MARK + PLAIN,
        MARK + b"\n" + PLAIN,
        gzip.compress(MARK + PLAIN, mtime=0),
    ],
)
@pytest.mark.parametrize("count_bytes", [1, 7, 1 << 20])
def test_a_file_has_the_same_events_for_both(tmp_path, content, count_bytes, monkeypatch):
    monkeypatch.setattr("anabranch.ingest.backfill.jsonl_file._COUNT_BYTES", count_bytes)
    path = tmp_path / "a.json.data"
    path.write_bytes(content)
    assert by_history(path) == by_commands(path) == [float(n) for n in range(9)]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[" + b",".join(LINES) + b"]", "it begins with a list"),
        (json.dumps([1, 2], indent=2).encode(), "it begins with a list"),
        (json.dumps({"x": 1, "y": 1}, indent=2).encode(), "its objects span several lines"),
        (PLAIN.decode().encode("utf-16"), "it is UTF-16; write it as UTF-8"),
        (PLAIN.decode().encode("utf-16-le"), "it is UTF-16 or UTF-32"),
        (PLAIN.decode().encode("utf-32-be"), "it is UTF-16 or UTF-32"),
        (gzip.compress(PLAIN.decode().encode("utf-16"), mtime=0), "it is UTF-16"),
        (b"\x28\xb5\x2f\xfd\x24...", "it is compressed with zstd"),
        (b"PAR1\x15\x04", "it is Parquet"),
    ],
)
def test_a_file_that_has_no_json_lines_is_refused_for_what_it_is(tmp_path, content, sentence):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    for read_it in (by_history, by_commands):
        with pytest.raises(SettingsError, match=rf"a\.jsonl cannot be read as JSON lines: {sentence}"):
            read_it(path)


def test_one_torn_line_is_no_reason_to_refuse_a_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": \n' + PLAIN)
    with open_source(path, "jsonl", None, SCHEMA, checked=True) as source:
        assert len(list(source)) == 10
    history = FileHistory(BackfillSettings(files=(str(path),)), SCHEMA, seed=0, longest=1000)
    history.list_files(None)
    assert [reject.message for rows in read(history) for reject in rows.decoded.rejects] == [0]


CELLS = {"features": {"x": {"dtype": "float32"}, "word": {"dtype": "string", "encode": {"hash": 64}, "default": ""}}}
TABLE = Schema(SchemaSettings.model_validate({**CELLS, "label": {"name": "y", "classes": 3}, "time": {"name": "t"}}))
ODD = (
    'x,y,word,t,extra\n1.5,0,"a, ""b""\nc",2026-01-02T03:04:05Z,?\n\n2.5,2,,1700000000,\n3.5,x,d,1,\n4.5,1\n'
    '5.5,,e,1,\n"6,1,f,1,\n7.5,1,\xe9,1,\n'
).encode()


@pytest.mark.parametrize("content", [ODD, MARK + ODD, gzip.compress(ODD, mtime=0), ODD.replace(b"\n", b"\r\n")])
@pytest.mark.parametrize("chunk_rows", [1, 3, 1000])
def test_csv_has_the_same_events_for_both(tmp_path, content, chunk_rows, monkeypatch):
    monkeypatch.setattr("anabranch.ingest.backfill.csv_file.CHUNK_ROWS", chunk_rows)
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with open_source(path, None, None, TABLE, checked=True) as source:
        records = list(source)
    good = [record.content for record in records if not record.fault]
    decoded = JsonFormat(TABLE).decode([json.dumps(document_of(TABLE, content)).encode() for content in good])
    history = FileHistory(BackfillSettings(files=(str(path),)), TABLE, seed=0, longest=1000)
    history.list_files(None)
    found = read(history)
    rows = [(rows, int(rows.offset[row])) for rows in found for row in rows.decoded.message]
    assert [row for _, row in rows] == [n for n, record in enumerate(records) if not record.fault]
    for name, column in decoded.columns.items():
        np.testing.assert_array_equal(np.concatenate([rows.decoded.columns[name] for rows in found]), column)
    rejects = [
        (int(rows.offset[each.message]), each.reason, rows.text(each.message))
        for rows in found
        for each in rows.decoded.rejects
    ]
    assert [(n, why) for n, why, _ in rejects] == [(n, each.fault) for n, each in enumerate(records) if each.fault]
    assert json.loads(rejects[0][2])["y"] == "x"
    assert found[0].time_ms[0] == 1_767_323_045_000


@pytest.mark.parametrize("end", ["", '6,1,"f",1,\n'])
@pytest.mark.parametrize("most", [20, 1000])
def test_a_quote_that_does_not_end_takes_its_own_row_alone(end, most, monkeypatch):
    monkeypatch.setattr("anabranch.ingest.backfill.csv_text._MOST_ROW_BYTES", most)
    lines = ["x,y,word,t,extra\n", '1,0,"a\nb",1,\n', '2,0,"c,1,\n', *(f"{n},0,d,1,\n" for n in range(3, 9)), end]
    text = CsvText(io.BytesIO("".join(lines).encode()), "a.csv", ",", TABLE)
    rows = list(text)
    assert [row.line for row in rows] == [2, 4, *range(5, 11 + bool(end))]
    assert [bool(row.fault) for row in rows] == [False, True, *[False] * (len(rows) - 2)]
    assert [row.cells[0] for row in rows[2:8]] == [str(n) for n in range(3, 9)]


def test_a_history_of_csv_begins_again_at_any_row(tmp_path, monkeypatch):
    monkeypatch.setattr("anabranch.ingest.backfill.csv_file.CHUNK_ROWS", 2)
    path = tmp_path / "a.csv"
    path.write_bytes(ODD)
    whole = list(opened(path).tables([], 0))
    lines = [line for part in whole for line in part.table.column("line").to_pylist()]
    for row in range(len(lines)):
        hint = max((part.hint for part in whole if part.row <= row), key=lambda seek: seek.row)
        for begin in (None, hint):
            parts = opened(path).tables([], row, begin)
            assert [line for part in parts for line in part.table.column("line").to_pylist()] == lines[row:]


def opened(path):
    return CsvRows(io.BytesIO(path.read_bytes()), path.name, ",", TABLE, "t", 1000)


@pytest.mark.parametrize(
    ("content", "settings", "sentence"),
    [
        (b"", {}, "a.csv is empty: the first line of CSV names the columns"),
        (b"y,t\n", {}, "a.csv has no column 'x'; its columns are y, t"),
        (b"x;y;t\n1;1;1\n", {}, "a.csv has no column 'x'; its columns are x;y;t"),
        (b"x,y,t\n1,1,1\n", {"time": "when"}, "a.csv has no column when, which stream.backfill.time names"),
        (b"x,t\n1,1\n", {}, "no file has a value in the column y of"),
        ("x,y,t\n".encode("utf-16"), {}, "a.csv cannot be read as CSV: it is UTF-16; write it as UTF-8"),
        (b"x,y,t\r1,1,1\r", {}, "a.csv cannot be read as CSV: line 1: new-line character seen in unquoted field"),
    ],
)
def test_a_history_that_is_no_table_of_the_schema_is_refused(tmp_path, content, settings, sentence):
    (tmp_path / "a.csv").write_bytes(content)
    backfill = BackfillSettings.model_validate({"files": [str(tmp_path / "a.csv")], **settings})
    with pytest.raises(SettingsError, match=sentence):
        FileHistory(backfill, TABLE, seed=0, longest=1000, need_label=True).list_files(None)


def test_a_delimiter_is_that_of_the_settings_or_of_the_name(tmp_path):
    settings = BackfillSettings(files=("a.csv",), delimiter=";")
    assert (settings.delimiter_of("a.csv"), settings.delimiter_of("a.tsv.gz")) == (";", ";")
    settings = BackfillSettings(files=("a.csv",))
    assert (settings.delimiter_of("a.csv.gz"), settings.delimiter_of("a.tsv.gz")) == (",", "\t")


@pytest.mark.parametrize(("name", "known"), [("a.jsonl.gz", True), ("a.ndjson.gz", True), ("a.parquet.gz", False)])
def test_a_suffix_of_gzip_is_one_of_json_lines(name, *, known):
    if known:
        assert BackfillSettings(files=(name,)).format_of(name) == "jsonl"
    else:
        with pytest.raises(ValueError, match="does not end with"):
            BackfillSettings(files=(name,))


ROWS = 65_536


def written(table, **options):
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd", **options)
    return ParquetRows(file, 32_768)


def same_text(text, rows=ROWS):
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([text]))


@pytest.mark.parametrize("has_arrow_schema", [True, False])
def test_a_text_that_is_stored_once_for_all_rows_takes_little_memory(has_arrow_schema):
    table = pa.table({"a.s": same_text("x" * 60_000), "y": np.arange(ROWS)})
    rows = written(table, store_schema=has_arrow_schema)
    before, most, seen = pa.total_allocated_bytes(), 0, 0
    for part in rows.tables(["a.s", "y"], 10):
        assert part.table.column("y")[0].as_py() == part.row == seen + 10
        assert part.table.schema.field("a.s").type == rows.schema.field("a.s").type
        seen += part.table.num_rows
        most = max(most, pa.total_allocated_bytes() - before)
        if seen > 10_000:
            break
    assert most < 100_000_000


def test_lists_of_such_texts_come_in_small_tables(monkeypatch):
    monkeypatch.setattr(parquet_file, "_EXPANDED_BYTES", 1_000_000)
    monkeypatch.setattr(parquet_file, "_TABLE_BYTES", 1_000_000)
    table = pa.table({"s": [["x" * 20_000] * 8] * 20})
    parts = [part.table for part in written(table, store_schema=False).tables(["s"], 0)]
    assert [part.num_rows for part in parts] == [6, 6, 6, 2]
    assert pa.concat_tables(parts).to_pylist() == table.to_pylist()


def test_a_row_that_fills_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(parquet_file, "_MOST_ROW_BYTES", 100_000)
    monkeypatch.setattr(parquet_file, "_EXPANDED_BYTES", 100_000)
    rows = written(pa.table({"s": [["x" * 60_000] * 2, ["x"]]}))
    with pytest.raises(ValueError, match=r"a row takes 0.0 GB of memory"):
        list(rows.tables(["s"], 0))


@pytest.mark.parametrize("expanded_bytes", [0, 10**12])
@pytest.mark.parametrize("has_dictionary", [True, False])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.list_(pa.string()), pa.list_(pa.string(), 2)])
def test_texts_are_those_of_the_file_in_either_way_of_reading(expanded_bytes, has_dictionary, kind, monkeypatch):
    monkeypatch.setattr(parquet_file, "_EXPANDED_BYTES", expanded_bytes)
    values: list[Any] = [None, "a", "b", None, "a"]
    if pa.types.is_nested(kind):
        values = [["a", "b"], ["c", None], None, ["d", "e"], ["a", "a"]]
    table = pa.table({"s": pa.array(values, kind), "y": [1, 2, 3, 4, 5]})
    parts = written(table, use_dictionary=has_dictionary, row_group_size=2).tables(["s", "y"], 1)
    assert pa.concat_tables([part.table for part in parts]).to_pylist() == table.slice(1).to_pylist()


def test_a_row_group_that_would_fill_the_memory_is_not_read_as_a_whole(monkeypatch):
    monkeypatch.setattr(parquet_file, "_MOST_GROUP_BYTES", 1_000_000)
    rows = written(pa.table({"s": same_text("x" * 60_000), "y": np.arange(ROWS)}))
    assert rows.group(0, ["y"]).num_rows == ROWS
    with pytest.raises(ValueError, match=r"row group 0 takes 3.9 GB of memory"):
        rows.group(0, ["s"])


def test_a_line_of_csv_that_is_too_long_is_one_reject_and_is_not_kept(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,y\n1,0\n" + "9" * 3_000_000 + ",1\n2,1\n" + "8" * 2000)
    history = FileHistory(BackfillSettings(files=(str(path),)), SCHEMA, seed=0, longest=1000)
    history.list_files(None)
    found = read(history)
    assert np.concatenate([rows.decoded.columns["feature.x"] for rows in found]).tolist() == [1, 2]
    rejects = [(int(rows.offset[each.message]), each.reason) for rows in found for each in rows.decoded.rejects]
    assert rejects == [(1, "oversized: more than 1000 bytes"), (3, "oversized: more than 1000 bytes")]
    assert all(len(rows.text(each.message)) < 2000 for rows in found for each in rows.decoded.rejects)
