"""Rows of CSV, for the history and for the commands that read files, so that a file has the same events for each.

A row that is none has a reason and hurts no other one: the next row begins with the next line.
"""

import csv
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import msgspec

from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.table_columns import Columns, cell_reader, column_names
from anabranch.ingest.backfill.text_files import BYTE_ORDER_MARK, other_format, start_of
from anabranch.ingest.events.schema import Schema

_MOST_CELL_BYTES = 100_000_000
_REST_BYTES = 1 << 20
_MOST_ROW_BYTES = 4_000_000
"""Of a row of several lines."""


class CsvRow(NamedTuple):
    """A row that is not blank: its first line, counted from 1, its cells, and why it has none if so."""

    line: int
    cells: list[str]
    fault: str = ""


class _Line(NamedTuple):
    """A line, of one that is too long the first bytes, and where it begins and ends in its file."""

    content: bytes
    begin: int
    end: int
    is_whole: bool


class _Lines:
    """Lines of a file as texts, which know the byte that follows them."""

    def __init__(self, file: BinaryIO, longest: int) -> None:
        self._file, self._longest = file, longest
        self.byte = self.number = 0
        self.row: list[_Line] = []
        """The lines of the last row so far."""
        self._again: list[_Line] = []
        """Lines that were read, and are to be returned again, the next one last."""

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        """Return the next line; raises ValueError where it is too long or no text, or the row is too long."""
        line = self._again.pop() if self._again else self._read()
        if not line.content:
            raise StopIteration
        self.number, self.byte = self.number + 1, line.end
        self.row.append(line)
        if not line.is_whole:
            raise ValueError(f"oversized: more than {self._longest} bytes")
        if len(self.row) > 1 and line.end - self.row[0].begin > _MOST_ROW_BYTES:
            raise ValueError(f"a quote in it does not end within {_MOST_ROW_BYTES} bytes")
        try:
            return (line.content.removeprefix(BYTE_ORDER_MARK) if line.begin == 0 else line.content).decode()
        except UnicodeDecodeError:
            raise ValueError("it is not UTF-8 text") from None

    def _read(self) -> _Line:
        content = self._file.readline(self._longest + 2)
        is_whole = content.endswith(b"\n") or len(content) <= self._longest
        size = len(content)
        while not is_whole and (rest := self._file.readline(_REST_BYTES)):
            size += len(rest)
            if rest.endswith(b"\n"):
                break
        return _Line(content, self.byte, self.byte + size, is_whole)

    def seek(self, byte: int) -> None:
        """Continue with the line that begins at a byte."""
        self._file.seek(byte)
        self.byte, self._again = byte, []

    def leave_row(self) -> None:
        """Continue with the second line of the last row: a quote that does not end would take all that follow."""
        self._again += reversed(self.row[1:])
        self.number -= len(self.row[1:])
        del self.row[1:]
        self.byte = self.row[0].end


class CsvText:
    """An open file of CSV, whose header is read. Used by one thread."""

    def __init__(
        self,
        file: BinaryIO,
        name: str,
        delimiter: str,
        schema: Schema | None,
        *,
        checked: bool = True,
        longest: int = _MOST_CELL_BYTES,
    ) -> None:
        """Read the header.

        Args:
            file: unpacked, of which nothing was read.
            name: of the file, for errors.
            delimiter: between cells.
            schema: names the field and the type of each column; None: there are rows and no events.
            checked: whether a cell that is not of its field's type is a fault; else its text stays as it is.
            longest: most bytes of a line.

        Raises:
            SettingsError: it is no CSV, or its columns do not fit the schema.
        """
        csv.field_size_limit(_MOST_CELL_BYTES)
        what = other_format(start_of(file))
        if what is not None:
            raise SettingsError(f"{name} cannot be read as CSV: it is {what}; write it as UTF-8")
        self._checked = checked
        self._lines = _Lines(file, longest)
        self._reader = csv.reader(self._lines, delimiter=delimiter, strict=True)
        first = next(iter(self), None)
        if first is None:
            raise SettingsError(f"{name} is empty: the first line of CSV names the columns")
        if first.fault:
            raise SettingsError(f"{name} cannot be read as CSV: line {first.line}: {first.fault}")
        self.header = column_names(first.cells, name)
        self.begin = self.byte
        """The byte of the first row."""
        self.columns = None if schema is None else Columns(schema, self.header, name, checked=checked)
        self._read = {} if schema is None else {field: cell_reader(schema, field) for field in schema.names}

    @property
    def byte(self) -> int:
        """The byte at which the next row begins."""
        return self._lines.byte

    @property
    def last_line(self) -> str:
        """The last line that was read, as far as it is text."""
        return self._lines.row[-1].content.decode(errors="replace").rstrip("\r\n")

    def seek(self, byte: int) -> None:
        """Continue with the row that begins at a byte."""
        self._lines.seek(byte)

    def __iter__(self) -> Iterator[CsvRow]:
        """Yield the rows that are left; those after the header have as many cells as that, or a fault."""
        while True:
            line = self._lines.number + 1
            self._lines.row = []
            try:
                cells = next(self._reader, None)
            except (csv.Error, ValueError) as exc:
                self._lines.leave_row()
                yield CsvRow(line, [], str(exc))
                continue
            if cells is None:
                return
            if cells:
                width = len(getattr(self, "header", cells))
                fault = "" if len(cells) == width else f"it has {len(cells)} cells, but the header has {width}"
                yield CsvRow(line, cells, fault)

    def event(self, cells: list[str]) -> dict[str, Any]:
        """Return the fields of a row's cells; raises ValueError where one is not of its field's type."""
        assert self.columns is not None
        return self.columns.event(cells, "", self._value)

    def _value(self, field: str, cell: str, *, whole: bool) -> Any:
        try:
            return self._read[field](cell, whole)
        except (ValueError, msgspec.DecodeError) as exc:
            if not self._checked:
                return cell
            raise ValueError(f"{field} = {cell[:80]!r} {exc}") from exc
