"""Where `anabranch produce` takes events from: JSON lines, CSV and Parquet, one record at a time.

JSON lines and CSV may be gzipped. Memory is bounded by a line, or by a row group of Parquet.
"""

import contextlib
import csv
import gzip
import io
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import msgspec
import numpy as np

from anabranch.core.errors import SettingsError
from ingest.events.schema import Schema

STDIN = Path("-")

SourceFormat = Literal["jsonl", "csv", "parquet"]

_SUFFIXES: dict[str, SourceFormat] = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".pq": "parquet"}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_PART = re.compile(r"(\w+?)((?:\.\d+)+|(?:\[\d+\])+)")
_PARQUET_ROWS = 1024
_LARGEST_CELL = 100_000_000


@dataclass(frozen=True)
class FileRecord:
    """One event, as the bytes of its JSON or as its fields, or what keeps it from being one."""

    place: str
    content: bytes | dict[str, Any]
    fault: str = ""


class EventFile(Protocol):
    """Records in the order of the file."""

    total: int | None
    """How much there is; None when that is not known."""
    left_out: list[str]
    """Columns that the schema does not know."""

    def done(self) -> int:
        """Return how much of `total` has been read."""
        ...

    def __iter__(self) -> Iterator[FileRecord]: ...


@contextlib.contextmanager
def open_source(
    path: Path, kind: SourceFormat | None, delimiter: str | None, schema: Schema, *, checked: bool
) -> Iterator[EventFile]:
    """Open a file, or stdin as `-`, and yield its records.

    Args:
        kind: by default what the suffix says, and else JSON lines.
        delimiter: of CSV; by default a tab for `.tsv`, else a comma.
        schema: names the field and the type of each column.
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
            file: BinaryIO = raw
            if path.suffix == ".gz":
                file = stack.enter_context(gzip.open(raw, "rb"))
            total = None if path == STDIN else path.stat().st_size
            if kind == "csv":
                delimiter = delimiter or ("\t" if stem.suffix.lower() == ".tsv" else ",")
                if len(delimiter) != 1:
                    raise SettingsError(f"--delimiter {delimiter!r}: it is one character")
                yield _Csv(file, raw, total, delimiter, name, schema, checked=checked)
            else:
                yield _JsonLines(file, raw, total, checked=checked)
        except (OSError, EOFError, zlib.error) as exc:
            raise SettingsError(f"{name} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc


class _JsonLines:
    def __init__(self, file: BinaryIO, raw: BinaryIO, total: int | None, *, checked: bool) -> None:
        self.left_out: list[str] = []
        self._file = file
        self._raw = raw
        self._checked = checked
        self.total = total

    def done(self) -> int:
        return self._raw.tell() if self.total is not None else 0

    def __iter__(self) -> Iterator[FileRecord]:
        for number, line in enumerate(self._file, start=1):
            content = line.rstrip(b"\r\n")
            if content.strip() or not self._checked:
                yield FileRecord(f"line {number}", content)


class _Csv:
    def __init__(
        self,
        file: BinaryIO,
        raw: BinaryIO,
        total: int | None,
        delimiter: str,
        name: str,
        schema: Schema,
        *,
        checked: bool,
    ) -> None:
        csv.field_size_limit(_LARGEST_CELL)
        self._raw = raw
        self._name = name
        self.total = total
        self._text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        self._rows = csv.reader(self._text, delimiter=delimiter, strict=True)
        self._line = 0
        header = self._next()
        if header is None:
            raise SettingsError(f"{name} is empty: the first line of CSV names the columns")
        self._width = len(header)
        self._columns = _Columns(schema, header, name, checked=checked)
        self._read = {field: _cell_reader(schema, field) for field in self._columns.fields}
        self._checked = checked
        self.left_out = self._columns.unknown

    def done(self) -> int:
        return self._raw.tell() if self.total is not None else 0

    def __iter__(self) -> Iterator[FileRecord]:
        while True:
            try:
                cells = self._next()
                if cells is None:
                    return
                if len(cells) != self._width:
                    fault = f"it has {len(cells)} cells, but the header has {self._width}"
                    yield FileRecord(f"line {self._line}", {}, fault)
                    continue
                event = self._columns.event(cells, "", self._value)
            except (csv.Error, ValueError) as exc:
                yield FileRecord(f"line {self._line}", {}, str(exc))
            else:
                yield FileRecord(f"line {self._line}", event)

    def _next(self) -> list[str] | None:
        """Return the next row that is not blank, and remember the line on which it begins."""
        while True:
            self._line = self._rows.line_num + 1
            try:
                cells = next(self._rows, None)
            except UnicodeDecodeError as exc:
                raise SettingsError(f"{self._name} is not UTF-8 text, near line {self._line}") from exc
            if cells != []:
                return cells

    def _value(self, field: str, cell: str, *, whole: bool) -> Any:
        try:
            return self._read[field](cell, whole)
        except (ValueError, msgspec.DecodeError) as exc:
            if not self._checked:
                return cell
            raise ValueError(f"{field} = {cell[:80]!r} {exc}") from exc


class _Parquet:
    def __init__(self, path: Path, name: str, schema: Schema, stack: contextlib.ExitStack, *, checked: bool) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as exc:
            raise SettingsError(f"{name}: Parquet needs pyarrow: pip install 'anabranch[arrow]'") from exc
        if path == STDIN:
            raise SettingsError("Parquet cannot be read from stdin, since its end is read first: name the file")
        self._errors = pyarrow.ArrowException
        self._name = name
        self._time = schema.time
        self._row = 0
        try:
            self._file = stack.enter_context(pyarrow.parquet.ParquetFile(path))
        except pyarrow.ArrowException as exc:
            raise SettingsError(f"{name} is not Parquet: {exc}") from exc
        self.total = self._file.metadata.num_rows
        self._columns = _Columns(schema, self._file.schema_arrow.names, name, checked=checked)
        self.left_out = self._columns.unknown

    def done(self) -> int:
        return self._row

    def __iter__(self) -> Iterator[FileRecord]:
        names = self._columns.names
        batches = self._file.iter_batches(_PARQUET_ROWS, columns=names)
        try:
            for batch in batches:
                found = [batch.column(name).to_pylist() for name in names]
                for cells in zip(*found, strict=True):
                    self._row += 1
                    row = dict(zip(names, cells, strict=True))
                    try:
                        event = self._columns.event([row.get(n) for n in self._columns.header], None, self._value)
                    except ValueError as exc:
                        yield FileRecord(f"row {self._row}", {}, str(exc))
                    else:
                        yield FileRecord(f"row {self._row}", event)
        except self._errors as exc:
            raise SettingsError(f"{self._name} is damaged after row {self._row}: {exc}") from exc

    def _value(self, field: str, cell: Any, *, whole: bool) -> Any:
        del whole
        return cell.timestamp() if field == self._time and isinstance(cell, datetime) else cell


class _Columns:
    """Which columns hold which field: `y`, or for a feature of shape `[64]` also `x.0` to `x.63`, or `x[0]` to `x[63]`.

    Raises:
        SettingsError: a column comes twice, a shape is not filled, or a field that events need has no column.
    """

    def __init__(self, schema: Schema, header: Sequence[str], name: str, *, checked: bool) -> None:
        self.header = [column.strip() for column in header]
        twice = {column for column in self.header if self.header.count(column) > 1}
        if twice:
            raise SettingsError(f"{name} has two columns named {min(twice)!r}")
        self._shapes = {feature.name: feature.shape for feature in schema.features}
        others = [schema.label.name, schema.key, schema.time, schema.weight, schema.group]
        self.fields = [*self._shapes, *(field for field in others if field)]
        self._whole: dict[str, int] = {}
        self._parts: dict[str, dict[tuple[int, ...], int]] = {}
        self.unknown: list[str] = []
        for place, column in enumerate(self.header):
            part = _PART.fullmatch(column)
            if column in self.fields:
                self._whole[column] = place
            elif part and self._shapes.get(part[1]):
                index = tuple(int(digits) for digits in re.findall(r"\d+", part[2]))
                self._parts.setdefault(part[1], {})[index] = place
            else:
                self.unknown.append(column)
        for field, parts in self._parts.items():
            self._check_parts(field, set(parts), name)
        required = [feature.name for feature in schema.features if feature.default is None]
        required += [field for field in others[1:] if field]
        lacking = [field for field in required if field not in self._whole and field not in self._parts]
        if lacking and checked:
            shape = self._shapes.get(lacking[0])
            hint = f", nor {lacking[0]}.0 and so on" if shape else ""
            raise SettingsError(f"{name} has no column {lacking[0]!r}{hint}; its columns are {', '.join(self.header)}")

    @property
    def names(self) -> list[str]:
        """The columns that are needed."""
        return [column for column in self.header if column not in self.unknown]

    def event(self, cells: Sequence[Any], missing: Any, value: Callable[..., Any]) -> dict[str, Any]:
        """Return the fields of a row; a cell that equals `missing` is none. Raises ValueError."""
        event = {
            field: value(field, cells[place], whole=True)
            for field, place in self._whole.items()
            if cells[place] != missing
        }
        for field, parts in self._parts.items():
            found = [cells[parts[index]] for index in np.ndindex(self._shapes[field])]
            empty = [
                index for index, cell in zip(np.ndindex(self._shapes[field]), found, strict=True) if cell == missing
            ]
            if len(empty) == len(found):
                continue
            if empty:
                raise ValueError(f"{self.header[parts[empty[0]]]} is empty")
            flat = [value(field, cell, whole=False) for cell in found]
            event[field] = _nested(flat, self._shapes[field])
        return event

    def _check_parts(self, field: str, found: set[tuple[int, ...]], name: str) -> None:
        shape = self._shapes[field]
        wrong = found ^ set(np.ndindex(shape))
        if wrong or field in self._whole:
            column = f"{field}.{'.'.join(map(str, min(wrong)))}" if wrong else field
            what = "is missing" if wrong and min(wrong) not in found else "is too much"
            raise SettingsError(f"{name}: the column {column} {what}: {field} has the shape {list(shape)}")


def _nested(flat: list[Any], shape: tuple[int, ...]) -> list[Any]:
    for size in reversed(shape[1:]):
        flat = [flat[begin : begin + size] for begin in range(0, len(flat), size)]
    return flat


def _cell_reader(schema: Schema, field: str) -> Callable[[str, bool], Any]:
    """Return what makes a value of a cell's text and whether it is the whole field; it raises ValueError."""
    feature = next((feature for feature in schema.features if feature.name == field), None)
    if feature is not None:
        scalar = str if feature.is_string else _READERS[feature.dtype.kind]
        shaped = bool(feature.shape)
        return lambda cell, whole: msgspec.json.decode(cell) if shaped and whole else scalar(cell)
    if field == schema.label.name and schema.label.multi:
        return lambda cell, _: msgspec.json.decode(cell)
    if field == schema.label.name:
        label = str if schema.label.names else _READERS["f" if schema.label.classes is None else "i"]
        return lambda cell, _: label(cell)
    if field in (schema.key, schema.group):
        return lambda cell, _: _number_or_text(cell)
    return lambda cell, _: _float(cell)


def _int(cell: str) -> int:
    try:
        return int(cell)
    except ValueError:
        # Tables that were once floats write 3.0.
        number = float(cell) if "_" not in cell else float("nan")
        if not number.is_integer() or abs(number) > 2**53:
            raise ValueError("is not a whole number") from None
        return int(number)


def _float(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ValueError("is not a number") from None


def _bool(cell: str) -> bool:
    try:
        return _BOOLEANS[cell.strip().lower()]
    except KeyError:
        raise ValueError("is not true or false") from None


def _number_or_text(cell: str) -> int | str:
    """Return a whole number of 64 bits where its text is that number's own: the format `rows` has no others."""
    number = int(cell) if re.fullmatch(r"-?\d{1,19}", cell, re.ASCII) else None
    return number if number is not None and str(number) == cell and -(2**63) <= number < 2**63 else cell


_READERS: dict[str, Callable[[str], Any]] = {"b": _bool, "i": _int, "u": _int, "f": _float}
