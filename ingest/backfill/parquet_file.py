"""Rows of a Parquet file, some tens of thousands at a time: memory does not grow with row groups or files."""

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from ingest.backfill.row_tables import FileRows, RowTables, Seek

_BUFFER_BYTES = 1 << 20
"""Bytes of a column that are read at once: without it, all of a row group's columns are in memory."""


class ParquetRows(RowTables):
    """An open Parquet file."""

    def __init__(self, file: BinaryIO, chunk_rows: int) -> None:
        """Read the footer; raises ArrowInvalid or OSError. Tables have at most `chunk_rows` rows."""
        self._chunk_rows = chunk_rows
        self._file = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES)
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
        return self._file.schema_arrow

    @override
    def tables(self, columns: Sequence[str], row: int, hint: Seek | None = None) -> Iterator[FileRows]:
        if row >= self._rows:
            return
        first = int(np.searchsorted(self._ends, row, side="right"))
        begin = int(self._ends[first - 1]) if first else 0
        for group in range(first, len(self._ends)):
            # A reader of several row groups keeps the bytes of all until it ends.
            for batch in self._file.iter_batches(self._chunk_rows, row_groups=[group], columns=list(columns)):
                end = begin + batch.num_rows
                if end > row:
                    skipped = max(0, row - begin)
                    yield FileRows(pa.Table.from_batches([batch.slice(skipped)]), begin + skipped)
                begin = end

    def group_rows(self) -> list[int]:
        """Return the number of rows of each row group."""
        return [int(rows) for rows in np.diff(self._ends, prepend=0)]

    def group(self, group: int, columns: Sequence[str]) -> Any:
        """Return all rows of a row group as a table."""
        return self._file.read_row_group(group, columns=list(columns))

    def statistics(self, group: int, column: str) -> tuple[Any, Any] | None:
        """Return the lowest and the highest value of a column in a row group, where the file has them."""
        index = self._file.schema_arrow.get_field_index(column)
        leaf = [i for i in range(self._file.metadata.num_columns) if self._file.schema.column(i).path == column]
        if index < 0 or not leaf:
            return None
        found = self._file.metadata.row_group(group).column(leaf[0]).statistics
        return (found.min, found.max) if found is not None and found.has_min_max and not found.null_count else None

    @override
    def close(self) -> None:
        self._file.close()
