"""Decodes Arrow tables of rows: the schema's columns, record times, and the reason for each row that cannot be used.

Legend: K rows.
"""

import contextlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types
from typing_extensions import override

from anabranch.ingest.backfill.row_tables import Decoder
from anabranch.ingest.events.block import Array, BlockLayout
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.arrow_columns import (
    ArrowField,
    Faults,
    columns_of,
    fields_of,
    is_text,
    sizes_of,
    times_in_seconds,
)
from anabranch.ingest.formats.base import Decoded, Reject, reject_unusable_numbers

_PER_MS = {"us": 1_000, "ns": 1_000_000}


class RowDecoder(Decoder):
    """Decodes rows of Arrow tables, whose types have been checked by `problem`."""

    def __init__(self, schema: Schema, time: str | None, longest: int) -> None:
        """Take `time`, the column of record times if there is one; rows with a text of more than `longest` bytes are
        rejected."""
        super().__init__(schema)
        self._longest = longest
        self._fields: tuple[ArrowField, ...] = tuple(fields_of(schema, in_files=True))
        self._layout = BlockLayout(schema)
        self._time = time
        self._time_unit = schema.time_unit if time == schema.time else "s"
        self._time_field = None if time is None else ArrowField(time, "", bool, path=schema.path(time))

    @override
    def columns_in(self, schema: Any) -> list[str]:
        fields = (*self._fields, self._time_field) if self._time_field is not None else self._fields
        return list(dict.fromkeys(name for field in fields if (name := field.column_in(schema.names)) is not None))

    @override
    def problem(self, schema: Any) -> str | None:
        for field in self._fields:
            column, dotted = field.column_in(schema.names), ".".join(field.path)
            if column is not None and schema.names.count(column) > 1:
                return f"two of its columns are named {column}"
            kind = field.type_in(schema)
            if kind is None:
                if field.required:
                    return f"it has no column {dotted}"
            elif sizes_of(kind, field) is None:
                return f"its column {dotted} is of Arrow type {kind}, not {field.expected}"
        if self._time_field is not None:
            kind = self._time_field.type_in(schema)
            if kind is None:
                return f"it has no column {self._time}, which stream.backfill.time names"
            numbers = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
            if not (types.is_timestamp(kind) or numbers or is_text(kind)):
                return (
                    f"its column {self._time} is of Arrow type {kind}, not a timestamp, ISO time or number of seconds"
                )
        return None

    @override
    def decode(self, table: Any) -> Decoded:
        rows = table.num_rows
        found = {field.name: field.array_in(table) for field in self._fields}
        arrays = {name: array for name, array in found.items() if array is not None}
        flat = pa.table(list(arrays.values()), list(arrays))
        invalid, long = _invalid_rows(flat), _rows_with_texts(flat, self._longest)
        if invalid.any() or long.any():
            good = np.flatnonzero(~(invalid | long))
            decoded = self.decode(table.take(pa.array(good))).at(good.astype(np.int32))
            rejects = [
                Reject(int(row), 0, "it is not valid Arrow data, such as text that is not UTF-8")
                for row in np.flatnonzero(invalid)
            ]
            rejects += [
                Reject(int(row), 0, f"oversized: a text of more than {self._longest} bytes")
                for row in np.flatnonzero(long & ~invalid)
            ]
            return replace(decoded, rejects=sorted([*decoded.rejects, *rejects]))
        faults = Faults(rows)
        columns = columns_of(self._schema, self._fields, arrays, faults)
        decoded = Decoded(np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32), columns, ())
        bad = np.flatnonzero(faults.first)
        if len(bad):
            good = np.flatnonzero(faults.first == 0)
            rejects = [Reject(int(row), 0, faults.reasons[faults.first[row]]) for row in bad]
            kept: dict[str, Array] = {name: column[good] for name, column in columns.items()}
            decoded = Decoded(good.astype(np.int32), np.zeros(len(good), np.int32), kept, rejects)
        return reject_unusable_numbers(decoded, self._schema)

    @override
    def times_ms(self, table: Any) -> NDArray[np.int64]:
        if self._time is None:
            return np.zeros(table.num_rows, np.int64)
        assert self._time_field is not None
        array = self._time_field.array_in(table)
        if types.is_timestamp(array.type):
            whole: NDArray[np.int64] = array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
            unit = array.type.unit
            if unit in _PER_MS:
                return (whole + _PER_MS[unit] // 2) // _PER_MS[unit]
            return whole * 1000 if unit == "s" else whole
        times, known = times_in_seconds(self._time_unit)(array)
        seconds: NDArray[np.float64] = np.where(known, times, 0.0)
        with np.errstate(invalid="ignore", over="ignore"):
            ms: NDArray[np.float64] = seconds * 1000
            if not -(2.0**62) < ms.min(initial=0.0) <= ms.max(initial=0.0) < 2.0**62:  # NaN is no bound
                ms = np.nan_to_num(ms, nan=0.0, posinf=0.0, neginf=0.0)
                ms = np.where(ms > -(2.0**62), np.minimum(ms, 2.0**62), 0)
            return np.rint(ms).astype(np.int64)

    @override
    def text(self, table: Any, row: int) -> bytes:
        cells = table.slice(row, 1)
        values = {name: _shortened(_value(cells.column(name)), self._longest) for name in cells.column_names}
        return json.dumps(values, default=str).encode()


def _value(cell: Any) -> Any:
    """Return the value of a column with one row, as text where Python has no such value."""
    # A time of nanoseconds or beyond the year 9999, and text that is not UTF-8.
    with contextlib.suppress(ValueError, OverflowError, pa.ArrowException):
        return cell.to_pylist()[0]
    with contextlib.suppress(pa.ArrowException):
        if types.is_temporal(cell.type):
            return cell.cast(pa.string()).to_pylist()[0]
        return cell.cast(pa.binary()).to_pylist()[0].decode(errors="replace")
    return f"a value of Arrow type {cell.type} that cannot be written"


def _shortened(value: Any, longest: int) -> Any:
    return value[:longest] if isinstance(value, str) else value


def _rows_with_texts(table: Any, longest: int) -> NDArray[np.bool_]:
    """Return which rows have a text of more than `longest` bytes, bool `[K]`."""
    found = np.zeros(table.num_rows, np.bool_)
    for name, kind in zip(table.schema.names, table.schema.types, strict=True):
        if types.is_string(kind) or types.is_large_string(kind):
            found |= pc.greater(pc.binary_length(table.column(name)), longest).fill_null(False).to_numpy()
    return found


def _invalid_rows(table: Any) -> NDArray[np.bool_]:
    """Return which rows have values that pyarrow could not read, bool `[K]`."""
    invalid = np.zeros(table.num_rows, np.bool_)
    texts = [name for name, kind in zip(table.schema.names, table.schema.types, strict=True) if not _is_plain(kind)]
    if not texts:
        return invalid
    checked = table.select(texts)
    try:
        checked.validate(full=True)
    except pa.ArrowInvalid:
        for row in range(table.num_rows):
            try:
                # A copy, since a slice validates all values of a dictionary and all bytes before it.
                checked.slice(row, 1).take(pa.array([0])).validate(full=True)
            except pa.ArrowInvalid:
                invalid[row] = True
    return invalid


def _is_plain(kind: Any) -> bool:
    """Return whether any bytes are a valid value of an Arrow type."""
    return bool(types.is_primitive(kind) or types.is_null(kind))
