"""Rows of a Parquet file, some tens of thousands at a time: memory does not grow with row groups or files.

Nor does it with what a small file expands to: a text that is stored once for many rows is kept once until few rows at a
time are returned, and rows of long lists are read few at a time.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import types
from typing_extensions import override

from anabranch.ingest.backfill.row_tables import FileRows, RowTables, Seek

_BUFFER_BYTES = 1 << 20
"""Bytes of a column that are read at once: without it, all of a row group's columns are in memory."""
_BATCH_BYTES = 32_000_000
"""Bytes of rows that are read together, by what the footer says of their mean."""
_EXPANDED_BYTES = 256_000_000
"""Bytes that the texts of a batch may take when each is as long as the longest in their dictionary."""
_TABLE_BYTES = 8_000_000
"""Bytes of a table with such texts, unless it has one row."""
_MOST_ROW_BYTES = 256_000_000
"""Bytes of a row that is read."""
_MOST_GROUP_BYTES = 4_000_000_000
"""Bytes of a row group that is read as a whole."""
_NUMBER_BYTES = 8


def _without_views(column: Any) -> Any:
    """Return a column of views of strings, as polars and DataFusion write it, as one of strings.

    pyarrow can neither take nor filter views.
    """
    return column.with_type(pa.string()) if types.is_string_view(column.type) else column


def pandas_index(schema: Any) -> set[str]:
    """Return the columns that are the index of the table that pandas wrote, which says so in the file."""
    try:
        named = json.loads((schema.metadata or {}).get(b"pandas", b"{}")).get("index_columns", ())
        return {name for name in named if isinstance(name, str)}
    except (ValueError, AttributeError, TypeError):  # the file's own text, which may be anything
        return set()


class ParquetRows(RowTables):
    """An open Parquet file."""

    def __init__(self, file: BinaryIO, chunk_rows: int) -> None:
        """Read the footer; raises ArrowInvalid, ValueError or OSError. Tables have at most `chunk_rows` rows."""
        self._chunk_rows = chunk_rows
        self._file = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES)
        self._schema = pa.schema([_without_views(column) for column in self._file.schema_arrow])
        twice = next((name for name in self._schema.names if self._schema.names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two columns are named {twice!r}")
        self.index = pandas_index(self._file.schema_arrow)
        """Columns that are an index of pandas, and no data."""
        self._texts = [name for name in self._schema.names if _has_texts(self._schema.field(name).type)]
        leaves = [self._file.schema.column(index).path for index in range(self._file.metadata.num_columns)]
        self._coded = pq.ParquetFile(
            file,
            metadata=self._file.metadata,
            buffer_size=_BUFFER_BYTES,
            read_dictionary=[leaf for leaf in leaves if _name_of(leaf, self._texts) is not None],
        )
        """The same file; texts stay in the dictionary that they are stored in."""
        metadata = self._file.metadata
        self._rows: int = metadata.num_rows
        self._ends = np.cumsum([metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)])

    @property
    @override
    def rows(self) -> int:
        return self._rows

    @property
    @override
    def schema(self) -> Any:
        return self._schema

    @override
    def tables(self, columns: Sequence[str], row: int, hint: Seek | None = None) -> Iterator[FileRows]:
        if row >= self._rows:
            return
        first = int(np.searchsorted(self._ends, row, side="right"))
        begin = int(self._ends[first - 1]) if first else 0
        for group in range(first, len(self._ends)):
            # A reader of several row groups keeps the bytes of all until it ends.
            together = self._rows_together(group, columns)
            expands = self._expands(group, columns)
            file = self._coded if expands else self._file
            for batch in file.iter_batches(together, row_groups=[group], columns=list(columns)):
                end = begin + batch.num_rows
                if end > row:
                    skipped = max(0, row - begin)
                    table = pa.Table.from_batches([batch.slice(skipped)])
                    begin += skipped
                    for part in self._pieces(table) if expands else [self._plain(table)]:
                        yield FileRows(part, begin)
                        begin += part.num_rows
                begin = end

    def _expands(self, group: int, columns: Sequence[str]) -> bool:
        """Return whether texts of a row group may take far more memory than in the file, being stored once for many."""
        found = self._file.metadata.row_group(group)
        for index in range(found.num_columns):
            column = found.column(index)
            name = _name_of(column.path_in_schema, [name for name in self._texts if name in columns])
            if name is None or not column.has_dictionary_page:
                continue
            first = next(self._coded.iter_batches(1, row_groups=[group], columns=[name])).column(0)
            while not types.is_dictionary(first.type):
                first = first.values
            lengths = pc.binary_length(first.dictionary)
            is_flat = column.path_in_schema == name
            values = min(self._chunk_rows, found.num_rows) if is_flat else column.num_values
            if not len(lengths) or (pc.max(lengths).as_py() or 0) * values > _EXPANDED_BYTES:
                return True
        return False

    def _rows_together(self, group: int, columns: Sequence[str]) -> int:
        """Return how many rows of a row group are read together."""
        found = self._file.metadata.row_group(group)
        largest = 1
        for index in range(found.num_columns):
            column = found.column(index)
            if _name_of(column.path_in_schema, columns) is not None:
                largest = max(largest, column.total_uncompressed_size, _NUMBER_BYTES * column.num_values)
        return max(1, min(self._chunk_rows, int(_BATCH_BYTES * max(1, found.num_rows) // largest)))

    def _pieces(self, table: Any) -> Iterator[Any]:
        """Yield the rows of a table in tables of few bytes, with the types of the file."""
        sizes = _sizes(table)
        if sizes.max(initial=0) > _MOST_ROW_BYTES:
            raise ValueError(f"a row takes {sizes.max() / 1e9:.1f} GB of memory")
        schema, ends, begin = self._schema_of(table), np.cumsum(sizes), 0
        while begin < len(table):
            before = ends[begin - 1] if begin else 0.0
            end = max(begin + 1, int(np.searchsorted(ends, before + _TABLE_BYTES, side="right")))
            yield table.slice(begin, end - begin).cast(schema)
            begin = end

    def _plain(self, table: Any) -> Any:
        schema = self._schema_of(table)
        return table if table.schema.types == schema.types else table.cast(schema)

    def _schema_of(self, table: Any) -> Any:
        return pa.schema([self._schema.field(name) for name in table.schema.names])

    def group_rows(self) -> list[int]:
        """Return the number of rows of each row group."""
        return [int(rows) for rows in np.diff(self._ends, prepend=0)]

    def group(self, group: int, columns: Sequence[str]) -> Any:
        """Return all rows of a row group as a table; raises ValueError where they would fill the memory."""
        table = self._coded.read_row_group(group, columns=list(columns))
        size = float(_sizes(table).sum())
        if size > _MOST_GROUP_BYTES:
            raise ValueError(
                f"row group {group} takes {size / 1e9:.1f} GB of memory, more than {_MOST_GROUP_BYTES / 1e9:.0f} GB; "
                "write smaller row groups"
            )
        return table.cast(self._schema_of(table))

    def statistics(self, group: int, column: str) -> tuple[Any, Any] | None:
        """Return the lowest and the highest value of a column in a row group, where the file has them."""
        index = self._file.schema_arrow.get_field_index(column)
        leaf = [i for i in range(self._file.metadata.num_columns) if self._file.schema.column(i).path == column]
        if index < 0 or not leaf:
            return None
        found = self._file.metadata.row_group(group).column(leaf[0]).statistics
        return (found.min, found.max) if found is not None and found.has_min_max and not found.null_count else None

    @override
    def is_null(self, column: str) -> bool:
        if column in self._schema.names and types.is_null(self._schema.field(column).type):
            return True
        metadata = self._file.metadata
        leaf = [i for i in range(metadata.num_columns) if self._file.schema.column(i).path == column]
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        found = [(group.column(leaf[0]).statistics, group.num_rows) for group in groups] if leaf else []
        return bool(found) and all(
            each is not None and each.has_null_count and each.null_count == rows for each, rows in found
        )

    @override
    def close(self) -> None:
        self._file.close()
        self._coded.close()


def _name_of(path: str, names: Sequence[str]) -> str | None:
    """Return which column a leaf of the file's schema belongs to; names may have dots, as paths of lists do."""
    return next((name for name in names if path == name or path.startswith(f"{name}.")), None)


def _has_texts(kind: Any) -> bool:
    """Return whether values of an Arrow type are texts, or lists of them, that are not in a dictionary."""
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _sizes(table: Any) -> NDArray[np.float64]:
    """Return about how many bytes each row takes, `[K]`."""
    return sum((_bytes_of(column.combine_chunks()) for column in table.columns), np.zeros(table.num_rows))


def _bytes_of(array: Any) -> NDArray[np.float64]:
    """Return about how many bytes each value takes once texts are not in a dictionary any more, `[K]`."""
    kind = array.type
    if types.is_dictionary(kind) and (types.is_string(kind.value_type) or types.is_large_string(kind.value_type)):
        lengths = pc.binary_length(array.dictionary).fill_null(0).to_numpy(zero_copy_only=False)
        codes = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return lengths[codes].astype(np.float64) if len(lengths) else np.zeros(len(array))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = np.concatenate([[0.0], np.cumsum(_bytes_of(array.flatten()))])
        counts = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        ends = np.cumsum(counts)
        return np.asarray(inner[ends] - inner[ends - counts])
    return np.full(len(array), float(_NUMBER_BYTES))
