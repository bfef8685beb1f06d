"""Data as notebooks have it, as the columns of events.

Arrays and data frames become the events that messages of the same values would be, under the same rules: fields of
numbers at once, others through the decoder of JSON messages.

Legend: N events.
"""

import sys
from collections.abc import Callable, Mapping
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

_PREDICTED = 1024
"""Events of one pass of the model."""
NO_EVENT = "the data has no event to predict"
_FRAMES = ("pandas", "polars")
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
    other = f"data is {_kind(data)}, and has to be a dict of arrays by name, or a data frame of pandas, polars or Arrow"
    if isinstance(data, Mapping):
        names = list(data)
    elif hasattr(data, "collect"):
        raise SettingsError(f"{other}: collect it first")
    elif (found := getattr(data, "column_names", None) or getattr(data, "columns", None)) is not None:
        names = list(found)
    elif hasattr(data, "__arrow_c_stream__") or hasattr(data, "__dataframe__"):
        with needs(f"data of type {type(data).__name__}", "pyarrow", "arrow"):
            import pyarrow
            import pyarrow.interchange
        is_stream = hasattr(data, "__arrow_c_stream__")
        try:
            table = pyarrow.table(data) if is_stream else pyarrow.interchange.from_dataframe(data)
        except pyarrow.ArrowException as exc:  # such as of a single column
            raise SettingsError(other) from exc
        return arrays_of(table)
    else:
        raise SettingsError(other)
    if len({*names}) < len(names):
        raise SettingsError(f"the data has two columns named {next(each for each in names if names.count(each) > 1)}")
    arrays = {str(name): _array(name, data[name]) for name in names}
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


def frame_like(data: Any, columns: Mapping[str, NDArray[Any]], *, same_rows: bool = True) -> Any:
    """Return columns, each `[n, ...]`, as data comes: arrays by name for a mapping, else a frame of the kind of `data`.

    A frame has a column for each number of a row, such as `probabilities.0`. `same_rows`: the rows are those of `data`,
    so that a frame of pandas has its index.
    """
    if isinstance(data, Mapping):
        return dict(columns)
    flat = {
        ".".join([name, *map(str, index)]): column[(slice(None), *index)]
        for name, column in columns.items()
        for index in np.ndindex(column.shape[1:])
    }
    flat = {name: column.tolist() if column.dtype.kind == "O" else column for name, column in flat.items()}
    library = next((each for kind in type(data).__mro__ if (each := kind.__module__.split(".")[0]) in _FRAMES), None)
    if library is None:
        with needs("a frame", "pyarrow", "arrow"):
            import pyarrow
        return pyarrow.table(flat)
    index = {"index": data.index} if library == "pandas" and same_rows else {}
    return sys.modules[library].DataFrame(flat, **index)


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
    return [plain(value) for value in values] if array.dtype.kind == "O" else values


def plain(value: Any) -> Any:
    """Return a value of a column of objects as JSON has it: None where it is missing."""
    if value is None or type(value).__name__ in _MISSING:
        return None
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, datetime):
        return value.to_pydatetime() if hasattr(value, "to_pydatetime") else value
    return value.tolist() if hasattr(value, "tolist") else value


def predicted(
    schema: Schema,
    reader: "EventReader",
    data: Any,
    run: Callable[[Mapping[str, Array]], Mapping[str, NDArray[Any]]],
) -> Any:
    """Return the predictions for N events as `frame_like` does, with the name of the predicted class where it has one.

    Args:
        schema: of the events.
        reader: that of `without_label`.
        data: as `arrays_of` takes it; a label is not read.
        run: returns the task's predictions, `[B, ...]` each, for the columns of at most 1,024 events.

    Raises:
        SettingsError: there is no event, or one cannot be used.
    """
    arrays = arrays_of(data)
    arrays.pop(schema.path(schema.label.name)[0], None)
    columns = reader.read(arrays)
    found: dict[str, list[NDArray[Any]]] = {}
    if not len(columns["label"]):
        raise SettingsError(NO_EVENT)
    for begin in range(0, len(columns["label"]), _PREDICTED):
        part = {name: column[begin : begin + _PREDICTED] for name, column in columns.items()}
        for name, values in run(part).items():
            found.setdefault(name, []).append(values)
    predictions = {name: np.concatenate(parts) for name, parts in found.items()}
    if (names := schema.label.names) and schema.label.one_of:
        predictions["prediction"] = np.array(names)[predictions["prediction"]]
    return frame_like(data, predictions)


def without_label(schema: Schema) -> Schema:
    """Return the schema of requests, which have the features alone."""
    none = dict.fromkeys(("key", "time", "weight", "group"))
    return Schema(schema.settings.model_copy(update=none))


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
        self._constants: dict[str, Array] = {}
        """Columns of ones, of as many events as the last that were read at once; nobody changes them."""
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
        if len(self._constants.get("weight", ())) != rows:
            self._constants = {"labelled": np.ones(rows, np.bool_), "weight": np.ones(rows, np.float32)}
        given = arrays.get(self._schema.path(self._schema.label.name)[0])
        if given is None:
            missing = np.full(rows, self._schema.label.missing, self._schema.label.dtype)
            return {**columns, **self._constants, "label": missing, "labelled": np.zeros(rows, np.bool_)}
        label = _labels(self._schema.label, given)
        return None if label is None else {**columns, "label": label, **self._constants}

    def rows(self, arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """Return the events as messages of JSON have them, values by name."""
        rows = rows_of(arrays)
        for name in (path[0] for path in self._whole if len(path) == 1 and path[0] in arrays):
            if (
                arrays[name].dtype.kind == "f" and arrays[name].ndim == 1
            ):  # as pandas has whole numbers where some are missing
                for row in rows:
                    row[name] = int(value) if (value := row[name]).is_integer() else value
        return rows

    def _decoded(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Array]:
        rows = self.rows(arrays)
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
    if array.dtype.kind not in "iu":
        return None
    column = np.ascontiguousarray(array, np.int64)
    # What is below 0 is large without its sign.
    return column if column.view(np.uint64).max() < label.classes else None


def _is_of(column: Array, arrays: Mapping[str, NDArray[Any]]) -> bool:
    return any(np.may_share_memory(column, array) for array in arrays.values())
