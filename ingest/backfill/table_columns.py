"""The columns of tables of events: which field each one holds, and how text becomes the value of a field."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import UNITS, Schema
from anabranch.ingest.formats.base import nested, seconds_of

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_PART = re.compile(r"(.+?)((?:\.\d+)+|(?:\[\d+\])+)")


def column_names(header: Sequence[str], name: str) -> list[str]:
    """Return the names of the columns of a file; raises SettingsError where two are the same."""
    names = [column.strip() for column in header]
    twice = {column for column in names if names.count(column) > 1}
    if twice:
        raise SettingsError(f"{name} has two columns named {min(twice)!r}")
    return names


class Columns:
    """Which columns hold which field: `y`, or for a feature of shape `[64]` also `x.0` to `x.63`, or `x[0]` to `x[63]`.

    Raises:
        SettingsError: a column name occurs twice, a shape is not filled, or a field that events need has no column.
    """

    def __init__(self, schema: Schema, header: Sequence[str], name: str, *, checked: bool) -> None:
        self.header = column_names(header, name)
        self._shapes = {feature.name: feature.shape for feature in schema.features}
        self.fields = [*schema.names]
        paths: dict[str, list[str]] = {}
        for field in self.fields:
            paths.setdefault(".".join(schema.path(field)), []).append(field)
        self._whole: dict[str, int] = {}
        self._parts: dict[str, dict[tuple[int, ...], int]] = {}
        self.unknown: list[str] = []
        for i, column in enumerate(self.header):
            part = _PART.fullmatch(column)
            shaped = [field for field in paths.get(part[1], ()) if self._shapes.get(field)] if part else []
            if column in paths:
                self._whole.update(dict.fromkeys(paths[column], i))
            elif part and shaped:
                index = tuple(int(digits) for digits in re.findall(r"\d+", part[2]))
                for field in shaped:
                    self._parts.setdefault(field, {})[index] = i
            else:
                self.unknown.append(column)
        for field, parts in self._parts.items():
            self._check_parts(field, set(parts), name)
        required = [feature.name for feature in schema.features if feature.default is None]
        required += [field for field in (schema.key, schema.time, schema.weight, schema.group) if field]
        absent = [field for field in required if not self.has(field)]
        if absent and checked:
            shape = self._shapes.get(absent[0])
            hint = f", nor {absent[0]}.0 and so on" if shape else ""
            dotted = ".".join(schema.path(absent[0]))
            raise SettingsError(f"{name} has no column {dotted!r}{hint}; its columns are {', '.join(self.header)}")

    @property
    def names(self) -> list[str]:
        """The columns that are needed."""
        return [column for column in self.header if column not in self.unknown]

    def has(self, field: str) -> bool:
        """Return whether a column holds a field, or several do."""
        return field in self._whole or field in self._parts

    def event(self, cells: Sequence[Any], missing: Any, value: Callable[..., Any]) -> dict[str, Any]:
        """Return the fields of a row; a cell that equals `missing` is none. Raises ValueError."""
        event = {field: value(field, cells[i], whole=True) for field, i in self._whole.items() if cells[i] != missing}
        for field, parts in self._parts.items():
            columns = [parts[index] for index in np.ndindex(self._shapes[field])]
            empty = [column for column in columns if cells[column] == missing]
            if len(empty) == len(columns):
                continue
            if empty:
                raise ValueError(f"{self.header[empty[0]]} is empty")
            flat = [value(field, cells[column], whole=False) for column in columns]
            event[field] = nested(flat, self._shapes[field])
        return event

    def _check_parts(self, field: str, found: set[tuple[int, ...]], name: str) -> None:
        shape = self._shapes[field]
        wrong = found ^ set(np.ndindex(shape))
        if wrong or field in self._whole:
            column = f"{field}.{'.'.join(map(str, min(wrong)))}" if wrong else field
            what = "is missing" if wrong and min(wrong) not in found else "is too much"
            raise SettingsError(f"{name}: the column {column} {what}: {field} has the shape {list(shape)}")


def cell_reader(schema: Schema, field: str) -> Callable[[str, bool], Any]:
    """Return what makes a value of a cell's text and whether it is the whole field; it raises ValueError."""
    feature = next((feature for feature in schema.features if feature.name == field), None)
    if feature is not None:
        scalar: Callable[[str], Any] = str if feature.is_string else _READERS[feature.dtype.kind]
        if feature.is_time:
            scalar = partial(_time, count=UNITS[feature.unit][0], number=scalar)
        shaped = bool(feature.shape)
        return lambda cell, whole: msgspec.json.decode(cell) if shaped and whole else scalar(cell)
    if field == schema.label.name and schema.label.is_list:
        return lambda cell, _: msgspec.json.decode(cell)
    if field == schema.label.name:
        label: Callable[[str], Any] = _READERS["f" if schema.label.classes is None else "i"]
        if schema.label.one_of == 2 and not schema.label.names:
            return lambda cell, _: int(_BOOLEANS[cell.lower()]) if cell.lower() in _BOOLEANS else label(cell)
        return lambda cell, _: cell if schema.label.names else label(cell)
    if field in (schema.key, schema.group):
        return lambda cell, _: _number_or_text(cell)
    if field == schema.time:
        count = UNITS[schema.time_unit][0]
        return lambda cell, _: _time(cell, count=count, number=_float)
    return lambda cell, _: _float(cell)


def values_of(cells: Sequence[str | None]) -> Sequence[Any]:
    """Return the values of a column of a table of texts: all are numbers or booleans, or they remain texts."""
    for read in (int, float, _BOOLEANS_ALONE.__getitem__):
        try:
            return [None if cell is None else read(cell) for cell in cells]
        except (ValueError, KeyError):
            continue
    return cells


_BOOLEANS_ALONE = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


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


def _time(cell: str, *, count: int, number: Callable[[str], Any]) -> Any:
    """Return a number of units, of which a second has `count`, of its text or of an ISO time."""
    try:
        return number(cell)
    except ValueError:
        pass
    try:
        return number(str(seconds_of(cell) * count))
    except ValueError:
        unit = next(words for each, words in UNITS.values() if each == count)
        raise ValueError(f"is neither {unit} since 1970 nor an ISO time") from None


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
