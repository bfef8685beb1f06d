"""Rows of Parquet files, also of those that are small on the disk and large in memory."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.ingest.backfill import parquet_file
from anabranch.ingest.backfill.parquet_file import ParquetRows

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
