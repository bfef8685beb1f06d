"""Files as other programs write them: by the pipeline that `init` makes, commands and history read the same events.

The cases are from bug reports on other projects.
"""

import gzip
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.commands.event_files.files import open_source
from anabranch.commands.init.command import write_sampled
from anabranch.commands.init.sample import sample_of_file
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.build import history_of
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.event_fields import document_of
from anabranch.ingest.formats.json import JsonFormat
from tests.ingest.backfill.test_history import read

ROWS = 60
X = [n % 7 + n / 64 for n in range(ROWS)]
Y = [n % 3 == 0 for n in range(ROWS)]
EVENTS = [{"x": x, "y": int(y)} for x, y in zip(X, Y, strict=True)]
START = datetime(2026, 1, 1, tzinfo=UTC)


def lines(rows, end="\n"):
    return "".join(f"{json.dumps(row)}{end}" for row in rows)


def parquet(path, table):
    pq.write_table(table, path)


def text(content):
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def table(**columns):
    return pa.table({"x": X, "y": pa.array([int(y) for y in Y]), **columns})


def pandas_frame():
    order = [ROWS * 3 - 2 * n for n in range(ROWS)]
    metadata = {b"pandas": json.dumps({"index_columns": ["__index_level_0__"]}).encode()}
    return table(__index_level_0__=order).replace_schema_metadata(metadata)


def decimals():
    cents = pa.array([Decimal(n % 97) / 4 for n in range(ROWS)], pa.decimal128(12, 2))
    visits = pa.array([Decimal(n % 5) for n in range(ROWS)], pa.decimal128(38, 0))
    return pa.table({"x": cents, "visits": visits, "y": pa.array([Decimal(y) for y in Y], pa.decimal128(38, 0))})


def coded():
    month, word = pa.array([n % 12 for n in range(ROWS)]), pa.array(["ab"[n % 2] for n in range(ROWS)])
    views = {
        "view": word.cast(pa.string_view()),
        "large": word.cast(pa.large_string()),
        "word": word.dictionary_encode(),
    }
    return table(month=month.dictionary_encode(), half=pa.array(np.array(X, np.float16)), **views)


def unsigned():
    return table(**{f"u{bits}": pa.array([n % 9 for n in range(ROWS)], f"uint{bits}") for bits in (8, 16, 32, 64)})


def stamped():
    times = [START + timedelta(hours=n) for n in range(ROWS)]
    return table(at=pa.array(times, pa.timestamp("us")), inner=pa.array([{"z": x} for x in X]))


FILES = {
    "pandas.parquet": (lambda path: parquet(path, pandas_frame()), {"x"}),
    "decimals.parquet": (lambda path: parquet(path, decimals()), {"x", "visits"}),
    "coded.parquet": (lambda path: parquet(path, coded()), {"x", "month", "half", "word", "view", "large"}),
    "unsigned.parquet": (lambda path: parquet(path, unsigned()), {"x", "u8", "u16", "u32", "u64"}),
    "stamped.parquet": (lambda path: parquet(path, stamped()), {"x", "at", "z"}),
    "nan.jsonl": (text(lines(EVENTS).replace('"x": 0.0,', '"x": NaN,')), {"x"}),
    "floats.jsonl": (text(lines([{**row, "n": float(n % 5)} for n, row in enumerate(EVENTS)])), {"x", "n"}),
    "sink.json.gz": (text(gzip.compress(lines(EVENTS).encode(), mtime=0)), {"x"}),
    "blank.jsonl": (text("\ufeff\n" + lines(EVENTS, "\r\n \t\r\n")), {"x"}),
    "excel.csv": (text("\ufeffx,y\r\n" + "".join(f"{x},{int(y)}\r\n\r\n" for x, y in zip(X, Y, strict=True))), {"x"}),
    "spaces.csv": (text("x , y\n" + "".join(f"{x}, {int(y)}\n" for x, y in zip(X, Y, strict=True))), {"x"}),
    "tabs.tsv": (text("x\ty\tnote\n" + "".join(f'{x}\t{y}\t"a\tb"\n' for x, y in zip(X, Y, strict=True))), {"x"}),
    "connect.jsonl": (text(lines([{"schema": {"type": "struct"}, "payload": row} for row in EVENTS])), {"x"}),
    "changes.jsonl": (
        text(lines([{"op": "c", "before": None, "after": row, "source": {}, "ts_ms": 1} for row in EVENTS])),
        {"x"},
    ),
    "wrapped.jsonl": (
        text(lines([{"schema": {}, "payload": {"op": "r", "before": None, "after": row}} for row in EVENTS])),
        {"x"},
    ),
    "units.jsonl": (
        text(lines([{**row, "created": (1_767_225_600 + 3600 * n) * 1000} for n, row in enumerate(EVENTS)])),
        {"x", "created"},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_commands_and_history_read_the_same_events(tmp_path, name):
    path = tmp_path / name
    write, features = FILES[name]
    write(path)
    paths, _ = write_sampled(tmp_path / "pipe", sample_of_file(path), "y")
    pipeline = load_config(paths[0], {}).pipeline
    schema, stream = Schema(pipeline.events), pipeline.stream
    assert {feature.name for feature in schema.features} == features
    with open_source(path, None, None, schema, checked=True, envelope=stream.envelope) as source:
        records = list(source)
    assert not [record.fault for record in records if record.fault]
    values = [
        each.content if isinstance(each.content, bytes) else json.dumps(document_of(schema, each.content)).encode()
        for each in records
    ]
    decoded = JsonFormat(schema).decode(values)
    assert (len(decoded.message), list(decoded.rejects)) == (ROWS, [])
    kind = {"format": "jsonl"} if ".json" in name else {}
    backfill = type(stream).model_validate({"topics": ["t"], "backfill": {"files": [str(path)], **kind}}).backfill
    history = history_of(stream.model_copy(update={"backfill": backfill}), schema, 0)
    history.list_files(None)
    rows = read(history)
    assert not [reject for each in rows for reject in each.decoded.rejects]
    for column, expected in decoded.columns.items():
        np.testing.assert_array_equal(np.concatenate([each.decoded.columns[column] for each in rows]), expected)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("semicolons.csv", "x;y\n1;0\n", "--label y is no field of .*, which has x;y"),
        ("twice.csv", "x,y, x\n1,0,1\n", "has two columns named 'x'"),
        ("list.json", json.dumps(EVENTS), "it begins with a list"),
        ("wide.json", json.dumps(EVENTS[0], indent=2) + "\n", "its objects span several lines"),
        ("utf16.csv", "x,y\n1,0\n".encode("utf-16"), "it is UTF-16; write it as UTF-8"),
        ("excel.csv", b"PK\x03\x04....", "it is a zip archive"),
    ],
)
def test_what_is_no_table_of_events_is_named(tmp_path, name, content, sentence):
    text(content)(tmp_path / name)
    with pytest.raises(SettingsError, match=sentence):
        write_sampled(tmp_path / "pipe", sample_of_file(tmp_path / name), "y")
