"""Reads events from JSON lines, CSV and Parquet, one record at a time.

JSON lines and CSV may be gzipped. Memory is bounded by a line, or by some rows of Parquet, which the reader of the
history reads.
"""

import contextlib
import itertools
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Protocol

import msgspec
import typer

from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.ingest.backfill.csv_text import CsvText
from anabranch.ingest.backfill.table_columns import Columns, values_of
from anabranch.ingest.backfill.text_files import BYTE_ORDER_MARK, other_than_lines, unpacked
from anabranch.ingest.events.schema import UNITS, Schema
from anabranch.ingest.formats.envelopes.change_events import Delete, RowEnvelope
from anabranch.ingest.formats.event_fields import value_at
from anabranch.ingest.formats.json_text import decoded

STDIN = Path("-")

SourceFormat = Literal["jsonl", "csv", "parquet"]

_SUFFIXES: dict[str, SourceFormat] = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_PARQUET_ROWS = 1024


FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="JSON lines, CSV (both also as .gz) or Parquet; - is stdin.")
]
FileFormat = Annotated[
    SourceFormat | None,
    typer.Option("--format", metavar="FORMAT", help="jsonl, csv or parquet; by default from the suffix, else jsonl."),
]
Delimiter = Annotated[
    str | None, typer.Option(metavar="CHARACTER", help="Between the cells of CSV; by default a comma.")
]


def is_named_as_file(path: Path) -> bool:
    """Return whether a name ends as that of a file of events."""
    stem = path.with_suffix("") if path.suffix == ".gz" else path
    return stem.suffix.lower() in {*_SUFFIXES, ".json", ".jsonl", ".ndjson", ".txt"}


@dataclass(frozen=True)
class FileRecord:
    """One event, as the bytes of its JSON or as its fields; or why the record is no event.

    Attributes:
        location: in the file, such as `line 3`.
        content: the event.
        fault: why it is no event; empty when it is one.
    """

    location: str
    content: bytes | dict[str, Any]
    fault: str = ""


class EventFile(Protocol):
    """Records in the order of the file."""

    total: int | None
    """Bytes or rows of the file; None when unknown."""
    left_out: list[str]
    """Columns that the schema does not know."""

    def done(self) -> int:
        """Return how many bytes or rows have been read."""
        ...

    def __iter__(self) -> Iterator[FileRecord]: ...


@contextlib.contextmanager
def open_source(
    path: Path,
    kind: SourceFormat | None,
    delimiter: str | None,
    schema: Schema | None,
    *,
    checked: bool,
    envelope: str = "none",
) -> Iterator[EventFile]:
    """Open a file, or stdin as `-`, and yield its records.

    Args:
        kind: by default by the suffix, else JSON lines.
        delimiter: of CSV; by default a tab for `.tsv`, else a comma.
        schema: names the field and the type of each column; None: rows are as the file has them.
        envelope: that of the stream: JSON lines may be in it, and their rows are the events.
        checked: whether a cell that is not of its field's type is a fault; else its text stays as it is.

    Raises:
        SettingsError: it cannot be read, or its columns do not fit the schema.
    """
    stem = path.with_suffix("") if path.suffix == ".gz" else path
    kind = kind or _SUFFIXES.get(stem.suffix.lower(), "jsonl")
    name = "stdin" if path == STDIN else str(path)
    with contextlib.ExitStack() as stack:
        try:
            if kind == "parquet":
                yield _Parquet(path, name, schema, stack, checked=checked)
                return
            raw = sys.stdin.buffer if path == STDIN else stack.enter_context(path.open("rb"))
            file = unpacked(raw, path.name)
            total = None if path == STDIN else path.stat().st_size
            if kind == "csv":
                delimiter = delimiter or ("\t" if stem.suffix.lower() == ".tsv" else ",")
                if len(delimiter) != 1:
                    raise SettingsError(f"--delimiter {delimiter!r}: it is one character")
                yield _Csv(CsvText(file, name, delimiter, schema, checked=checked), raw, total)
            else:
                yield _JsonLines(file, raw, total, name, checked=checked, envelope=envelope)
        except (OSError, EOFError, zlib.error) as exc:
            raise SettingsError(f"{name} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc


def sample_of(path: Path, kind: SourceFormat | None, delimiter: str | None, rows: int) -> list[dict[str, Any]]:
    """Return the first rows of a file as they are, those of CSV with the values that their texts say.

    A cell is None where it is empty, and where not all of a column's texts are numbers, all remain texts.

    Raises:
        SettingsError: as `open_source`; or a row cannot be read.
    """
    found: list[dict[str, Any]] = []
    is_csv = False
    with open_source(path, kind, delimiter, None, checked=True) as source:
        for record in itertools.islice(source, rows):
            if record.fault:
                raise SettingsError(f"{path}, {record.location}: {record.fault}")
            if isinstance(record.content, bytes):
                found.append(_object(path, record))
            else:
                found.append(record.content)
                is_csv = isinstance(source, _Csv)
    if is_csv:
        for name in found[0]:
            parsed = values_of([row[name] for row in found])
            for row, value in zip(found, parsed, strict=True):
                row[name] = value
    return found


def _object(path: Path, record: FileRecord) -> dict[str, Any]:
    try:
        return decoded(partial(msgspec.json.decode, type=dict[str, Any]), record.content)  # type: ignore[arg-type]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise SettingsError(f"{path}, {record.location}: it is not a JSON object: {exc}") from exc


class _JsonLines:
    def __init__(
        self, file: BinaryIO, raw: BinaryIO, total: int | None, name: str, *, checked: bool, envelope: str
    ) -> None:
        self._envelope = RowEnvelope(envelope)
        self.left_out: list[str] = []
        self._name = name
        self._file = file
        self._raw = raw
        self._checked = checked
        self.total = total

    def done(self) -> int:
        return self._raw.tell() if self.total is not None else 0

    def __iter__(self) -> Iterator[FileRecord]:
        if not self._checked:
            for number, line in enumerate(self._file, start=1):
                yield FileRecord(f"line {number}", line.rstrip(b"\r\n"))
            return
        lines, ahead = self._lines(), list[tuple[int, bytes]]()
        first = next(lines, None)
        if first is None:
            return

        def following() -> bytes | None:
            ahead.extend(itertools.islice(lines, 1))
            return ahead[0][1] if ahead else None

        why = other_than_lines(first[1], following)
        if why is not None:
            raise SettingsError(f"{self._name} cannot be read as JSON lines: {why}")
        for number, line in itertools.chain([first], ahead, lines):
            try:
                row = self._envelope.row(line)
            except ValueError as exc:
                yield FileRecord(f"line {number}", line, str(exc))
            else:
                content, fault = (line, row.reason) if isinstance(row, Delete) else (row, "")
                yield FileRecord(f"line {number}", content, fault)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that are not blank, with their numbers."""
        for number, line in enumerate(self._file, start=1):
            content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if content.strip():
                yield number, content.rstrip(b"\r\n")


class _Csv:
    def __init__(self, text: CsvText, raw: BinaryIO, total: int | None) -> None:
        self._raw, self._text = raw, text
        self.total = total
        self.left_out = [] if text.columns is None else text.columns.unknown

    def done(self) -> int:
        return self._raw.tell() if self.total is not None else 0

    def __iter__(self) -> Iterator[FileRecord]:
        for line, cells, fault in self._text:
            event: dict[str, Any] = {}
            try:
                if not fault and self._text.columns is not None:
                    event = self._text.event(cells)
                elif not fault:
                    event = {name: cell or None for name, cell in zip(self._text.header, cells, strict=True)}
            except ValueError as exc:
                fault = str(exc)
            yield FileRecord(f"line {line}", event, fault)


class _Parquet:
    def __init__(
        self, path: Path, name: str, schema: Schema | None, stack: contextlib.ExitStack, *, checked: bool
    ) -> None:
        with needs(f"{name}: Parquet", "pyarrow", "arrow"):
            from pyarrow import ArrowException

            from anabranch.ingest.backfill.parquet_file import ParquetRows
        if path == STDIN:
            raise SettingsError("Parquet cannot be read from stdin, since its end is read first: name the file")
        self._errors = ArrowException, ValueError
        self._name = name
        self._row = 0
        try:
            file = stack.enter_context(path.open("rb"))
            self._file = stack.enter_context(contextlib.closing(ParquetRows(file, _PARQUET_ROWS)))
        except self._errors as exc:
            raise SettingsError(f"{name} cannot be read as Parquet: {exc}") from exc
        self.total: int | None = self._file.rows
        self._paths = list(_leaves(self._file.schema))
        header = [".".join(path) for path in self._paths]
        self._columns: Columns | None = None
        self.left_out: list[str] = []
        if schema is None:
            return
        times = [(feature.name, feature.unit) for feature in schema.features if feature.is_time]
        times += [(schema.time, schema.time_unit)] if schema.time is not None else []
        self._times = {time: UNITS[unit][0] for time, unit in times}
        self._whole = {feature.name for feature in schema.features if feature.dtype.kind in "iu"}
        self._class = schema.label.name if schema.label.one_of else None
        self._columns = Columns(schema, header, name, checked=checked)
        self.left_out = self._columns.unknown

    def done(self) -> int:
        return self._row

    def __iter__(self) -> Iterator[FileRecord]:
        try:
            yield from self._events(self._columns) if self._columns is not None else self._rows()
        except self._errors as exc:
            raise SettingsError(f"{self._name} is damaged after row {self._row}: {exc}") from exc

    def _rows(self) -> Iterator[FileRecord]:
        names = [name for name in self._file.schema.names if name not in self._file.index]
        for part in self._file.tables(names, 0):
            for row in part.table.to_pylist():
                self._row += 1
                yield FileRecord(f"row {self._row}", row)

    def _events(self, columns: Columns) -> Iterator[FileRecord]:
        read = [
            path if column in columns.names else None for path, column in zip(self._paths, columns.header, strict=True)
        ]
        names = list(dict.fromkeys(path[0] for path in read if path is not None))
        for part in self._file.tables(names, 0):
            found = [part.table.column(name).to_pylist() for name in names]
            for cells in zip(*found, strict=True):
                self._row += 1
                row = dict(zip(names, cells, strict=True))
                try:
                    values = [None if path is None else value_at(row, path) for path in read]
                    event = columns.event(values, None, self._value)
                except ValueError as exc:
                    yield FileRecord(f"row {self._row}", {}, str(exc))
                else:
                    yield FileRecord(f"row {self._row}", event)

    def _value(self, field: str, cell: Any, *, whole: bool) -> Any:
        del whole
        if field in self._times and isinstance(cell, datetime):
            seconds = (cell if cell.tzinfo else cell.replace(tzinfo=UTC)).timestamp()
            return round(seconds * self._times[field]) if field in self._whole else seconds * self._times[field]
        if field == self._class and isinstance(cell, float) and cell.is_integer():
            return int(cell)  # pandas writes labels as floats where some are missing
        return _plain(cell)


def _leaves(fields: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the columns of an Arrow schema, and for a struct those in it."""
    from pyarrow import types

    for field in fields:
        path = (*above, field.name)
        if types.is_struct(field.type):
            yield from _leaves(field.type, path)
        else:
            yield path


def _plain(cell: Any) -> Any:
    """Return decimals as the numbers that they are."""
    if isinstance(cell, list):
        return [_plain(each) for each in cell]
    if not isinstance(cell, Decimal):
        return cell
    return int(cell) if cell.as_tuple().exponent == 0 else float(cell)
