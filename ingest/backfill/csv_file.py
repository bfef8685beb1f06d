"""Rows of a CSV file for the history: each becomes the line of JSON that has the same event."""

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.csv_text import CsvRow, CsvText
from anabranch.ingest.backfill.jsonl_file import FAULT, LINE, LINES_BYTES
from anabranch.ingest.backfill.row_tables import CHUNK_ROWS, FileRows, RowTables, Seek
from anabranch.ingest.backfill.text_files import unpacked
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.event_fields import document_of

_SCHEMA = pa.schema([(LINE, pa.large_binary()), (FAULT, pa.string())])


class CsvRows(RowTables):
    """An open CSV file."""

    def __init__(
        self, file: BinaryIO, name: str, delimiter: str, schema: Schema, time: str | None, longest: int
    ) -> None:
        """Read the header; `time` is the column of record times, which need not be a field.

        Raises:
            SettingsError: as `CsvText` does, or there is no column `time`.
        """
        self._text = CsvText(unpacked(file, name), name, delimiter, schema, longest=longest)
        self._schema = schema
        columns = self._text.columns
        assert columns is not None
        self._columns = columns
        self._time = None if time is None or time in schema.names else time
        if self._time is not None and self._time not in columns.header:
            raise SettingsError(f"stream.backfill.files: {name} has no column {time}, which stream.backfill.time names")

    @property
    @override
    def rows(self) -> int:
        """Number of rows that are not blank; reads them all."""
        self._text.seek(self._text.begin)
        return sum(1 for _ in self._text)

    @property
    @override
    def schema(self) -> Any:
        return _SCHEMA

    @override
    def is_null(self, column: str) -> bool:
        return not self._columns.has(column)

    @override
    def tables(self, columns: Sequence[str], row: int, hint: Seek | None = None) -> Iterator[FileRows]:
        at, byte = (hint.row, hint.byte) if hint is not None else (0, self._text.begin)
        self._text.seek(byte)
        rows = iter(self._text)
        while at < row and next(rows, None) is not None:
            at, byte = at + 1, self._text.byte
        lines: list[tuple[bytes, str]] = []
        for each in rows:
            lines.append(self._line(each))
            if len(lines) == CHUNK_ROWS or self._text.byte - byte >= LINES_BYTES:
                yield _table(lines, at, byte)
                at, byte, lines = at + len(lines), self._text.byte, []
        if lines:
            yield _table(lines, at, byte)

    def _line(self, row: CsvRow) -> tuple[bytes, str]:
        """Return the event of a row as JSON; of one that is none the cells, and why."""
        fault = row.fault
        if not fault:
            try:
                document = document_of(self._schema, self._text.event(row.cells))
                if self._time is not None:
                    document[self._time] = _number_or_text(row.cells[self._columns.header.index(self._time)])
                return msgspec.json.encode(document), ""
            except ValueError as exc:
                fault = str(exc)
        same = len(row.cells) == len(self._columns.header)
        shown = dict(zip(self._columns.header, row.cells, strict=True)) if same else {"csv": self._text.last_line}
        return msgspec.json.encode(shown), fault

    @override
    def close(self) -> None:
        """Do nothing: the file is closed by who opened it."""


def _number_or_text(cell: str) -> float | str | None:
    try:
        return float(cell)
    except ValueError:
        return cell or None


def _table(lines: list[tuple[bytes, str]], row: int, byte: int) -> FileRows:
    contents, faults = zip(*lines, strict=True)
    return FileRows(pa.table([list(contents), list(faults)], _SCHEMA), row, Seek(row, byte))
