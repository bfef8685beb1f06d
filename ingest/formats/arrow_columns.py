"""Turns Arrow arrays into columns of numbers: which types a field accepts, and how they are converted.

What is read here has been validated; a row that does not fit is a fault, never an error.

Legend: G rows of the messages with one Arrow schema, W distinct words.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.schema import IGNORED, Feature, Label, Schema, in_seconds
from anabranch.ingest.formats.base import Decoded, Reject, seconds_of
from anabranch.ingest.formats.label_lists import column_of_counts, ids_of_classes
from anabranch.ingest.settings.features import TimeUnit

Mask = NDArray[np.bool_]
Leaf = Callable[[Any], tuple[Array, Mask]]
"""Turns an Arrow array of single values into as many numbers or rows of ids, and a mask of the valid ones."""


@dataclass(frozen=True)
class ArrowField:
    """A field of the pipeline's schema, and which Arrow types it accepts."""

    name: str
    expected: str
    takes: Callable[[Any], bool]
    shape: tuple[int, ...] = ()
    required: bool = True
    many: bool = False
    """Whether a value is a list of any length."""
    path: tuple[str, ...] = ()
    """The columns of structs that lead to it; empty: it is a column of its name."""

    def column_in(self, names: Sequence[str]) -> str | None:
        """Return which of the columns of a table has the field: one of its whole path, or the outermost struct."""
        path = self.path or (self.name,)
        whole = ".".join(path)
        return whole if whole in names else path[0] if path[0] in names else None

    def type_in(self, schema: Any) -> Any:
        """Return the Arrow type of the field in a schema; None where it is missing."""
        column = self.column_in(schema.names)
        kind: Any = schema.field(column).type if column is not None else None
        for part in self._inside(column):
            index = kind.get_field_index(part) if types.is_struct(kind) else -1
            if index < 0:
                return None
            kind = kind.field(index).type
        return kind

    def array_in(self, table: Any) -> Any:
        """Return the field's array in a table or record batch; None where it is missing.

        It is null where a struct around it is.
        """
        column = self.column_in(table.schema.names)
        if column is None:
            return None
        array = _single(table.column(column))
        for part in self._inside(column):
            if not types.is_struct(array.type) or array.type.get_field_index(part) < 0:
                return None
            array = _single(pc.struct_field(array, array.type.get_field_index(part)))
        return array

    def _inside(self, column: str | None) -> tuple[str, ...]:
        return () if column is None or column == ".".join(self.path or (self.name,)) else self.path[1:]


class Faults:
    """The faults of G rows: the index of the first reason of each, or 0."""

    def __init__(self, rows: int) -> None:
        self.first = np.zeros(rows, np.int32)
        self.reasons = [""]

    def add(self, bad: Mask, reason: str) -> None:
        """Set the reason of the rows of the mask `[G]` that have none yet."""
        if bad.any():
            self.first[bad & (self.first == 0)] = len(self.reasons)
            self.reasons.append(reason)

    def remove_from(self, decoded: Decoded, reason_prefix: str = "") -> Decoded:
        """Return the G decoded events without those that have a fault, which become rejects."""
        bad = self.first != 0
        if not bad.any():
            return decoded
        bad_rows = zip(*(each[bad].tolist() for each in (decoded.message, decoded.row, self.first)), strict=True)
        rejects = [Reject(index, row, f"{reason_prefix}{self.reasons[fault]}") for index, row, fault in bad_rows]
        columns = {name: column[~bad] for name, column in decoded.columns.items()}
        return Decoded(decoded.message[~bad], decoded.row[~bad], columns, rejects, decoded.unknown_fields)


def fields_of(schema: Schema, *, in_files: bool = False) -> list[ArrowField]:
    """Return the fields that a message may have, or a file, the features first and in their order."""
    return [replace(each, path=schema.path(each.name)) for each in _fields(schema, in_files=in_files)]


def _fields(schema: Schema, *, in_files: bool) -> Iterator[ArrowField]:
    for feature in schema.features:
        expected = "string" if feature.is_string else str(feature.dtype)
        takes = {"b": types.is_boolean, "f": _is_number}.get(feature.dtype.kind, _is_whole)
        if feature.is_time:
            expected, takes = "a timestamp, an ISO time or a number", _is_time
        yield ArrowField(
            feature.name,
            f"{expected} of shape {list(feature.shape)}" if feature.shape else expected,
            is_text if feature.is_string else takes,
            feature.shape,
            feature.default is None,
        )
    label = schema.label
    if label.is_list:
        each, kind = ("strings", is_text) if label.names is not None else ("whole numbers", types.is_integer)
        yield ArrowField(label.name, f"a list of {each}", kind, required=False, many=True)
    elif label.names is not None:
        yield ArrowField(label.name, "string", is_text, required=False)
    elif label.classes is not None:
        yield ArrowField(label.name, "a whole number", _class_types(label, in_files=in_files), required=False)
    else:
        yield ArrowField(label.name, "a number", _is_number, required=False)
    for name, expected, takes in (
        (schema.key, "a string or a whole number", _is_word),
        (schema.time, "a timestamp, an ISO time or a number of seconds", _is_time),
        (schema.weight, "a number", _is_number),
        (schema.group, "a string or a whole number", _is_word),
        (schema.join, "a string or a whole number", _is_word),
    ):
        if name is not None:
            yield ArrowField(name, expected, takes)


def columns_of(
    schema: Schema, fields: Sequence[ArrowField], arrays: Mapping[str, Any], faults: Faults
) -> dict[str, Array]:
    """Return the schema's payload and the hashes, and add rows that do not fit to `faults`, with any values."""
    n = len(faults.first)
    columns: dict[str, Array] = {}
    for field, feature in zip(fields, schema.features, strict=False):
        columns[f"feature.{feature.name}"] = _feature_column(field, feature, arrays.get(feature.name), faults)
    columns.update(_label_columns(schema.label, arrays.get(schema.label.name), faults))
    columns["weight"] = np.ones(n, np.float32)
    if schema.weight:
        columns["weight"] = _extra(schema.weight, _numbers(np.dtype(np.float32)), arrays, faults)
    if schema.time:
        columns["time"] = _extra(schema.time, times_in_seconds(schema.time_unit), arrays, faults)
    for start, name in schema.hashed:
        columns[f"{start}_hash"] = _extra(name, _hashed, arrays, faults) if name else np.zeros(n, np.uint64)
    return columns


def _is_list(kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def sizes_of(kind: Any, field: ArrowField) -> tuple[int, ...] | None:
    """Return the lengths that lists of this Arrow type need for the field, or None if the type does not fit.

    A shape is nested lists, or one list of all its values.
    """
    sizes: list[int] = []
    lists = 0
    inner = kind
    if field.many:
        return () if types.is_null(kind) or (_is_list(kind) and field.takes(kind.value_type)) else None
    while _is_list(inner):
        sizes.append(inner.list_size if types.is_fixed_size_list(inner) else -1)
        inner, lists = inner.value_type, lists + 1
    if types.is_null(kind):
        return field.shape
    expected = field.shape if lists == len(field.shape) else (int(np.prod(field.shape)),)
    fits = lists == len(expected) and all(size in (-1, length) for size, length in zip(sizes, expected, strict=True))
    return expected if fits and field.takes(inner) else None


def _class_types(label: Label, *, in_files: bool) -> Callable[[Any], bool]:
    """Return which types a class number may have; in files also floats, as pandas writes it if some are null."""
    fits = [_is_whole, *([types.is_boolean] if label.one_of == 2 else []), *([_is_number] if in_files else [])]
    return lambda kind: any(each(kind) for each in fits)


def is_text(kind: Any) -> bool:
    """Return whether values of an Arrow type are strings."""
    plain = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(plain) or types.is_large_string(plain))


def _is_number(kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _is_whole(kind: Any) -> bool:
    return bool(types.is_integer(kind) or (types.is_decimal(kind) and kind.scale == 0))


def _is_word(kind: Any) -> bool:
    return bool(is_text(kind) or _is_whole(kind))


def _is_time(kind: Any) -> bool:
    return bool(_is_number(kind) or types.is_timestamp(kind) or is_text(kind))


def _single(column: Any) -> Any:
    """Return a column as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()  # which copies also one chunk


def _feature_column(field: ArrowField, feature: Feature, array: Any, faults: Faults) -> Array:
    n = len(faults.first)
    if array is None or types.is_null(array.type):
        column: Array = np.zeros((n, *feature.column_shape), feature.dtype)
        present = np.zeros(n, np.bool_)
    else:
        leaf = _encoded(feature) if feature.is_string else _numbers(feature.dtype)
        if feature.is_time:
            leaf = times_in_seconds(feature.unit, feature.dtype)
        column, good = _dense(array, sizes_of(array.type, field) or (), leaf)
        column, present = column.reshape(n, *feature.column_shape), _present(array)
        faults.add(present & ~good, f"{feature.name} does not fit {field.expected}")
    if present.all():
        return column
    if feature.default is None:
        faults.add(~present, f"{feature.name} is null")
        return column
    column = column.copy()
    column[~present] = feature.default
    return column


def _label_columns(label: Label, array: Any, faults: Faults) -> dict[str, Array]:
    n = len(faults.first)
    if array is None or types.is_null(array.type):
        return {"label": np.full((n, *label.shape), label.missing, label.dtype), "labelled": np.zeros(n, np.bool_)}
    labelled = _present(array)
    if label.classes is not None and types.is_floating(array.type):
        labelled &= ~np.isnan(_filled(array))
    if label.is_list:
        return {"label": _several(label, array, labelled, faults), "labelled": labelled}
    values, good = _classes(label, array) if label.names is not None else _numbers(label.dtype)(array)
    expected = (
        "a number" if label.classes is None else f"in 0..{label.classes - 1}" if label.names is None else "a class"
    )
    faults.add(labelled & ~good, f"{label.name} is not {expected}")
    known = values if labelled.all() else np.where(labelled, values, label.missing)
    return {"label": known.astype(label.dtype), "labelled": labelled}


def _classes(label: Label, array: Any) -> tuple[Array, Mask]:
    """Return the class number of each name, and a mask of the names that are classes."""
    ids = ids_of_classes(label)
    words, codes, good = _coded(array)
    values = np.array([ids.get(word, -1) for word in words])[codes]
    return values, good & (values >= 0)


def _several(label: Label, array: Any, labelled: Mask, faults: Faults) -> Array:
    """Return the labels of rows, `column_of_counts`, from lists of classes."""
    kept = array.filter(pa.array(labelled))
    counts = np.zeros(len(labelled), np.int64)
    counts[labelled] = _filled(pc.list_value_length(kept))
    flat = kept.flatten()
    values, good = _classes(label, flat) if label.names is not None else _numbers(np.dtype(np.int64))(flat)
    good &= np.greater_equal(values, 0) & np.less(values, label.classes or 0)
    if label.length is not None:
        ignored = ~_present(flat) | np.equal(values, IGNORED)
        values, good = np.where(ignored, IGNORED, values), good | ignored
    rows = np.repeat(np.arange(len(counts)), counts)
    faults.add(
        np.bincount(rows[~good], minlength=len(counts)) > 0,
        f"{label.name} lists what is not {'a class' if label.names else f'in 0..{(label.classes or 0) - 1}'}",
    )
    column = column_of_counts(label, np.bincount(rows[good], minlength=len(counts)), values[good].astype(np.int64))
    if label.multi:
        faults.add(column.sum(axis=1) < counts, f"{label.name} lists a class twice")
    return column


def _extra(name: str, leaf: Leaf, arrays: Mapping[str, Any], faults: Faults) -> Array:
    values, good = leaf(arrays[name])
    if not good.all():
        faults.add(~_present(arrays[name]), f"{name} is null")
        faults.add(~good, f"{name} is not a time")
    return values


def _dense(array: Any, sizes: tuple[int, ...], leaf: Leaf) -> tuple[Array, Mask]:
    """Return the values `[G, *sizes, ...]` of lists, and which rows are complete; the others are zeros.

    What follows `sizes` is the shape that `leaf` gives to one value.
    """
    if not sizes:
        return leaf(array)
    size, inside = sizes[0], sizes[1:]
    good = _present(array)
    if not types.is_fixed_size_list(array.type):
        good &= np.diff(array.offsets.to_numpy()) == size
    kept = array if good.all() else array.filter(pa.array(good))
    values, whole = _dense(kept.flatten(), inside, leaf)
    values = values.reshape(len(kept), size, *values.shape[1:])
    whole = np.ones(len(kept), np.bool_) if whole.all() else np.asarray(whole.reshape(len(kept), size).all(axis=1))
    if kept is array:
        return values, whole
    dense = np.zeros((len(good), *values.shape[1:]), values.dtype)
    dense[good] = values
    good[good] = whole
    return dense, good


def _numbers(dtype: np.dtype[Any]) -> Leaf:
    """Return a leaf that converts to this dtype; null is invalid, as is for integers what is not whole or in range."""

    def leaf(array: Any) -> tuple[Array, Mask]:
        good = _present(array)
        raw = _filled(array.cast(pa.float64()) if types.is_decimal(array.type) else array)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            if raw.dtype.kind == "f":
                wide = pa.uint64() if dtype.kind == "u" else pa.int64()
                options = pc.CastOptions(
                    wide, allow_int_overflow=True, allow_float_truncate=True, allow_decimal_truncate=True
                )
                real, raw = raw.astype(np.float64), _filled(pc.cast(array, options=options))
                good &= np.isclose(real, raw.astype(np.float64), rtol=1e-14, atol=0)  # it was whole and fitted
            good &= np.greater_equal(raw, int(limits.min)) & np.less_equal(raw, int(limits.max))
        with np.errstate(over="ignore", invalid="ignore"):  # also of signalling NaN
            return raw.astype(dtype, copy=False), good

    return leaf


def times_in_seconds(unit: TimeUnit, dtype: np.dtype[Any] | None = None) -> Leaf:
    """Return a leaf that reads times as seconds since 1970, of numbers those that count `unit`; float64 by default."""
    dtype = dtype or np.dtype(np.float64)

    def leaf(array: Any) -> tuple[Array, Mask]:
        if is_text(array.type):
            words, codes, good = _coded(array)
            seconds = np.array([_seconds_or_nan(word) for word in words])[codes]
            return _whole_or_real(seconds, dtype), good & ~np.isnan(seconds)
        if types.is_timestamp(array.type):
            counts = _filled(array.cast(pa.int64()))
            return _whole_or_real(in_seconds(counts.astype(np.float64), array.type.unit), dtype), _present(array)
        values, good = _numbers(np.dtype(np.float64 if dtype.kind == "f" else np.int64))(array)
        return in_seconds(values, unit).astype(dtype), good

    return leaf


def _seconds_or_nan(text: str) -> float:
    try:
        return seconds_of(text)
    except ValueError:
        return float("nan")


def _whole_or_real(seconds: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(invalid="ignore"):
        return seconds.astype(dtype) if dtype.kind == "f" else np.floor(seconds).astype(dtype)


def _encoded(feature: Feature) -> Leaf:
    def leaf(array: Any) -> tuple[Array, Mask]:
        assert feature.encoder is not None
        words, codes, good = _coded(array)
        return feature.encoder.encode(words)[codes], good

    return leaf


def _hashed(array: Any) -> tuple[Array, Mask]:
    if types.is_decimal(array.type):
        array = array.cast(pa.string())  # the digits of a whole number
    words, codes, good = _coded(array)
    return hash_texts([str(word).encode() for word in words])[codes], good


def _coded(array: Any) -> tuple[list[Any], NDArray[np.int32], Mask]:
    """Return the W distinct words (strings or integers), the word index of each row, and which rows have one."""
    if types.is_null(array.type):
        array = array.cast(pa.string())
    coded = array if types.is_dictionary(array.type) else array.dictionary_encode()
    words = coded.dictionary
    if not len(words):
        return [""], np.zeros(len(array), np.int32), np.zeros(len(array), np.bool_)
    codes = _filled(coded.indices).astype(np.int32, copy=False)
    good = _present(coded)
    return words.fill_null("" if is_text(words.type) else 0).to_pylist(), codes, good


def _present(array: Any) -> Mask:
    if types.is_dictionary(array.type):
        # A null is either a null index, or the index of a null word.
        words = np.append(_present(array.dictionary), np.True_)
        return _present(array.indices) & words[_filled(array.indices).astype(np.int32)]
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    present: Mask = array.is_valid().to_numpy(zero_copy_only=False)
    return present


def _filled(array: Any) -> Array:
    if types.is_null(array.type):
        return np.zeros(len(array))
    filled = array.fill_null(False if types.is_boolean(array.type) else 0) if array.null_count else array
    values: Array = filled.to_numpy(zero_copy_only=False)
    return values
