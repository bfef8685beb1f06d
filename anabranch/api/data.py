"""Data as notebooks have it, as the columns of events.

Arrays and data frames become the events that messages of the same values would be, under the same rules: fields of
numbers at once, others through the decoder of JSON messages.

Legend: N events.
"""

import sys
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Feature, Label, Schema
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.worker.value_decoder import ValueDecoder

_MISSING = ("NAType", "NaTType")
"""Types of the values that pandas has for none."""


def arrays_of(data: Any) -> dict[str, NDArray[Any]]:
    """Return the columns of data by name, each `[N, ...]`, without a copy where that is possible.

    Args:
        data: a mapping of arrays or lists; a data frame of pandas or polars, or a table of Arrow; with pyarrow also
            whatever has `__arrow_c_stream__` or `__dataframe__`.

    Raises:
        SettingsError: it is something else, or its columns are not of one length.
    """
    if isinstance(data, Mapping):
        arrays = {str(name): _array(name, column) for name, column in data.items()}
    elif (names := getattr(data, "column_names", None) or getattr(data, "columns", None)) is not None:
        arrays = {str(name): _array(name, data[name]) for name in list(names)}
    elif hasattr(data, "__arrow_c_stream__") or hasattr(data, "__dataframe__"):
        with needs(f"data of type {type(data).__name__}", "pyarrow", "arrow"):
            import pyarrow
            import pyarrow.interchange
        is_stream = hasattr(data, "__arrow_c_stream__")
        return arrays_of(pyarrow.table(data) if is_stream else pyarrow.interchange.from_dataframe(data))
    else:
        raise SettingsError(
            f"data is {_kind(data)}, and has to be a dict of arrays by name, or a data frame of pandas, polars or Arrow"
        )
    lengths = {name: len(column) for name, column in arrays.items()}
    if len({*lengths.values()}) > 1:
        shown = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise SettingsError(f"the columns of the data have different lengths: {shown}")
    return arrays


def _array(name: object, column: Any) -> NDArray[Any]:
    try:
        array = column.to_numpy() if hasattr(column, "to_numpy") else np.asarray(column)
    except (ValueError, TypeError, RuntimeError) as exc:  # the latter two of tensors that numpy cannot have
        raise SettingsError(f"the column {name} is no array: {exc}") from exc
    if array.ndim == 0:
        raise SettingsError(f"the column {name} is {_kind(column)}, and has to be an array with a value for each event")
    return np.asarray(array)


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"


def rows_of(arrays: Mapping[str, NDArray[Any]], most: int | None = None) -> list[dict[str, Any]]:
    """Return the events as JSON has them, values by name: all, or the first ones."""
    lists = [_values(array[:most]) for array in arrays.values()]
    return [dict(zip(arrays, cells, strict=True)) for cells in zip(*lists, strict=True)]


def _values(array: NDArray[Any]) -> list[Any]:
    if array.dtype.kind == "M":
        return list(array.astype("datetime64[us]").tolist())  # `None` is what is no time
    values = list(array.tolist())
    return [_plain(value) for value in values] if array.dtype.kind == "O" else values


def _plain(value: Any) -> Any:
    """Return a value of a column of objects as JSON has it: None where it is missing."""
    if value is None or type(value).__name__ in _MISSING:
        return None
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, datetime):
        return value.to_pydatetime() if hasattr(value, "to_pydatetime") else value
    return value.tolist() if hasattr(value, "tolist") else value


class EventReader:
    """Makes the columns of events of data. Used by one thread."""

    def __init__(self, schema: Schema) -> None:
        """Read the fields of a schema; others are left out, as those of messages."""
        self._schema = schema
        self._decoder = ValueDecoder(JsonFormat(schema), schema, sys.maxsize)
        others = (schema.key, schema.time, schema.weight, schema.group, schema.label.names)
        names = [*(feature.name for feature in schema.features), schema.label.name]
        self._is_plain = (
            not any(others)
            and not schema.label.is_list
            and all(map(_is_number, schema.features))
            and all(len(schema.path(name)) == 1 for name in names)
        )
        self._whole = {schema.path(each.name) for each in schema.features if each.dtype.kind in "iu"}
        if schema.label.classes is not None:
            self._whole.add(schema.path(schema.label.name))

    def read(self, data: Any, *, labelled: bool = False, copy: bool = True) -> dict[str, Array]:
        """Return the columns of N events: those of `Schema.payload`, and hashes of key and group.

        Args:
            data: as `arrays_of` takes it.
            labelled: whether each event needs a label.
            copy: whether the columns must not be the arrays of the data.

        Raises:
            SettingsError: a field is missing, or has a value that the schema does not allow; nothing is read.
        """
        arrays = arrays_of(data)
        columns = self._at_once(arrays) if self._is_plain else None
        if columns is None:
            columns = self._decoded(arrays)
        elif copy:
            columns = {name: column.copy() if _is_of(column, arrays) else column for name, column in columns.items()}
        known = columns["labelled"]
        if labelled and not known.all():
            raise SettingsError(
                f"event {int(np.argmin(known))} of the data has no {self._schema.label.name}, its label"
            )
        return columns

    def _at_once(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Array] | None:
        """Return the columns of events that have numbers alone; None where the decoder has to see each."""
        columns: dict[str, Array] = {}
        for feature in self._schema.features:
            column = _numbers(feature, arrays.get(self._schema.path(feature.name)[0]))
            if column is None:
                return None
            columns[f"feature.{feature.name}"] = column
        rows = len(next(iter(columns.values())))
        given = arrays.get(self._schema.path(self._schema.label.name)[0])
        if given is None:
            label: Array | None = np.full(rows, self._schema.label.missing, self._schema.label.dtype)
        else:
            label = _labels(self._schema.label, given)
        if label is None:
            return None
        known = np.full(rows, given is not None)
        return {**columns, "label": label, "labelled": known, "weight": np.ones(rows, np.float32)}

    def _decoded(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Array]:
        rows = rows_of(arrays)
        for name in (path[0] for path in self._whole if len(path) == 1 and path[0] in arrays):
            if (
                arrays[name].dtype.kind == "f" and arrays[name].ndim == 1
            ):  # as pandas has whole numbers where some are missing
                for row in rows:
                    row[name] = int(value) if (value := row[name]).is_integer() else value
        try:
            values = [msgspec.json.encode(row) for row in rows]
        except TypeError as exc:
            raise SettingsError(f"the data has values that are no fields of an event: {exc}") from exc
        decoded, _ = self._decoder.decode(values, [()] * len(values), {})
        if decoded.rejects:
            first, count = decoded.rejects[0], len(decoded.rejects)
            others = f", and {count - 1} others" if count > 1 else ""
            raise SettingsError(f"event {first.message} of the data cannot be used{others}: {first.reason}")
        return dict(decoded.columns)


def _is_number(feature: Feature) -> bool:
    """Return whether a value of a feature is the number of the message, which has to be there."""
    return feature.encoder is None and not (feature.is_time or feature.may_be_nan)


def _numbers(feature: Feature, array: NDArray[Any] | None) -> Array | None:
    """Return the column of an array of allowed numbers; None where the decoder has to see each."""
    if array is None or array.shape[1:] != feature.shape:
        return None
    kinds = {"b": "b", "f": "iuf"}.get(feature.dtype.kind, "iu")
    if array.dtype.kind not in kinds or (feature.dtype.kind in "iu" and not np.can_cast(array.dtype, feature.dtype)):
        return None
    with np.errstate(over="ignore"):
        column = np.ascontiguousarray(array, feature.dtype)
    if feature.dtype.kind == "f" and not _all_finite(column):
        return None
    return column if feature.outside(column) is None else None


def _all_finite(column: NDArray[Any]) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        # Two thirds of the time of the exact test, which decides where the sum of squares is too large.
        if column.dtype != np.float16 and np.isfinite(np.vdot(column, column)):
            return True
    return bool(np.isfinite(column).all())


def _labels(label: Label, array: NDArray[Any]) -> Array | None:
    """Return the column of labels, those of a class as int64; None where the decoder has to see each."""
    if array.ndim != 1 or not len(array):
        return None
    if label.classes is None:
        with np.errstate(over="ignore"):
            column = np.ascontiguousarray(array, label.dtype) if array.dtype.kind in "iuf" else None
        is_allowed = column is not None and _all_finite(column) and label.min is None and label.max is None
        return column if is_allowed else None
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= label.classes:
        return None
    return np.ascontiguousarray(array, np.int64)


def _is_of(column: Array, arrays: Mapping[str, NDArray[Any]]) -> bool:
    return any(np.may_share_memory(column, array) for array in arrays.values())
