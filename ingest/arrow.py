"""The format `arrow`: an Arrow IPC stream a message, with the schema's fields as columns and an event in each row.

Messages with one Arrow schema are decoded together. Its types are checked once, sizes before anything is allocated,
and offsets, indices and text before anything is read through them, since a message may hold any bytes.

Legend: M messages, G rows of the messages with one Arrow schema, W distinct words.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc, types

from ingest.block import Array, BlockLayout
from ingest.decoded import WHOLE_MESSAGE, Decoded, Reject, joined, reject_unusable_numbers
from ingest.encoder import hash_texts
from ingest.ipc import UnfitError, claims
from ingest.schema import Feature, Label, Schema

Mask = NDArray[np.bool_]
Leaf = Callable[[Any], tuple[Array, Mask]]
"""Turns an Arrow array of single values into as many numbers, and tells which of them are such."""

_UNREADABLE = (UnfitError, pa.ArrowException, ValueError, OSError, MemoryError)
"""What a message can make pyarrow raise."""
_SMALL_BYTES = 65_536
_MOST_EXPANSION = 32
"""Packed bits expand by 8 as they are decoded, rows of two bytes by about 30 for the identity that each gets."""
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


@dataclass(frozen=True)
class _Field:
    """A field of the pipeline's schema, and which Arrow types it takes."""

    name: str
    wanted: str
    takes: Callable[[Any], bool]
    shape: tuple[int, ...] = ()
    required: bool = True


@dataclass(frozen=True)
class _Plan:
    """How messages with one Arrow schema are read: the columns to take, and the schema to cast them to, or None."""

    columns: list[int]
    cast: Any
    has_unknown: bool


class ArrowFormat:
    """Decodes Arrow IPC streams. Columns that the schema does not know are ignored, and their messages counted."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._fields = tuple(_fields(schema))
        self._layout = BlockLayout(schema)
        self._row_bytes = self._layout.row_bytes()

    def decode(self, values: Sequence[bytes]) -> Decoded:
        """Decode M message values, each any number of events, or a reject."""
        plans: dict[bytes, _Plan | str] = {}
        groups: dict[bytes, list[tuple[int, Any]]] = {}
        rejects: list[Reject] = []
        unknown = 0
        for index, value in enumerate(values):
            try:
                start = self._start_of_fair_size(value)
                if start not in plans:
                    plans[start] = self._plan(start)
                plan = plans[start]
                if isinstance(plan, str):
                    raise UnfitError(plan)
                batches = _read(value, plan)
            except _UNREADABLE as exc:
                rejects.append(Reject(index, WHOLE_MESSAGE, str(exc).partition("\n")[0]))
                continue
            unknown += plan.has_unknown
            groups.setdefault(start, []).extend((index, batch) for batch in batches)
        parts = [self._decode_group(group) for group in groups.values()]
        return reject_unusable_numbers(joined([self._without_rows(rejects, unknown), *parts]), self._schema)

    def _start_of_fair_size(self, value: bytes) -> bytes:
        """Return the part of a message that holds its Arrow schema, or raise for one that would take much memory."""
        claimed = claims(value)
        if not claimed.rows:
            raise UnfitError("it holds no event")
        size = claimed.rows * self._row_bytes + claimed.inflated_bytes
        if size > _SMALL_BYTES + _MOST_EXPANSION * len(value):
            raise UnfitError(
                f"its {len(value)} bytes would take {size} once decoded, more than {_MOST_EXPANSION} times as many; "
                f"send it uncompressed"
            )
        return claimed.schema

    def _plan(self, start: bytes) -> _Plan | str:
        """Return how to read messages of this Arrow schema, or the reason why they cannot be used."""
        schema = ipc.read_schema(pa.py_buffer(start))
        places: dict[str, int] = {}
        known = {field.name for field in self._fields}
        for place, name in enumerate(schema.names):
            if name in known and places.setdefault(name, place) != place:
                return f"two columns are named {name}"
        for field in self._fields:
            if field.name not in places:
                if field.required:
                    return f"missing required column {field.name}"
            elif _sizes(schema.types[places[field.name]], field) is None:
                return f"{field.name} is of Arrow type {schema.types[places[field.name]]}, not {field.wanted}"
        columns = sorted(places.values())
        taken = [schema.field(place) for place in columns]
        wide = pa.schema([pa.field(column.name, _wide(column.type), column.nullable) for column in taken])
        changed = any(column.type != other.type for column, other in zip(taken, wide, strict=True))
        return _Plan(columns, wide if changed else None, len(schema) > len(columns))

    def _decode_group(self, group: Sequence[tuple[int, Any]]) -> Decoded:
        """Decode batches of one Arrow schema, each with the index of its message, in the order of the index."""
        lengths = np.array([batch.num_rows for _, batch in group])
        message = np.repeat(np.array([index for index, _ in group], np.int32), lengths)
        row = (np.arange(len(message)) - np.searchsorted(message, message)).astype(np.int32)
        table = pa.Table.from_batches([batch for _, batch in group])
        faults = _Faults(len(message))
        names = [field.name for field in self._fields if field.name in table.column_names]
        columns = self._columns({name: table.column(name).combine_chunks() for name in names}, faults)
        bad = faults.first != 0
        if not bad.any():
            return Decoded(message, row, columns, ())
        places = zip(message[bad].tolist(), row[bad].tolist(), faults.first[bad].tolist(), strict=True)
        rejects = [Reject(index, place, faults.reasons[fault]) for index, place, fault in places]
        return Decoded(message[~bad], row[~bad], {name: column[~bad] for name, column in columns.items()}, rejects)

    def _without_rows(self, rejects: Sequence[Reject], unknown: int) -> Decoded:
        none, empty = np.zeros(0, np.int32), self._layout.empty(0)
        names = (*self._schema.payload(), "key_hash", "group_hash")
        return Decoded(none, none, {name: empty[name] for name in names}, rejects, unknown)

    def _columns(self, arrays: dict[str, Any], faults: "_Faults") -> dict[str, Array]:
        schema, n = self._schema, len(faults.first)
        columns: dict[str, Array] = {}
        for field, feature in zip(self._fields, schema.features, strict=False):
            columns[f"feature.{feature.name}"] = _feature_column(field, feature, arrays.get(feature.name), faults)
        columns.update(_label_columns(schema.label, arrays.get(schema.label.name), faults))
        columns["weight"] = np.ones(n, np.float32)
        if schema.weight:
            columns["weight"] = _extra(schema.weight, _numbers(np.dtype(np.float32)), arrays, faults)
        if schema.time:
            columns["time"] = _extra(schema.time, _seconds, arrays, faults)
        for column, name in (("key_hash", schema.key), ("group_hash", schema.group)):
            columns[column] = _extra(name, _hashed, arrays, faults) if name else np.zeros(n, np.uint64)
        return columns


class _Faults:
    """What is wrong with each of G rows: the index of the first reason, or 0."""

    def __init__(self, rows: int) -> None:
        self.first = np.zeros(rows, np.int32)
        self.reasons = [""]

    def add(self, bad: Mask, reason: str) -> None:
        if bad.any():
            self.first[bad & (self.first == 0)] = len(self.reasons)
            self.reasons.append(reason)


def _read(value: bytes, plan: _Plan) -> list[Any]:
    """Return the record batches of one message: whole, with every offset, index and text in them proven valid."""
    options = ipc.IpcReadOptions(use_threads=False, included_fields=plan.columns)
    batches = list(ipc.open_stream(pa.py_buffer(value), options=options))
    for batch in batches:
        batch.validate(full=True)
    return [batch.select(plan.cast.names).cast(plan.cast) for batch in batches] if plan.cast else batches


def _fields(schema: Schema) -> Iterator[_Field]:
    """Yield the fields that a message may have, the features first and in their order."""
    for feature in schema.features:
        wanted = "string" if feature.is_string else str(feature.dtype)
        takes = {"b": types.is_boolean, "f": _is_number}.get(feature.dtype.kind, types.is_integer)
        yield _Field(
            feature.name,
            f"{wanted} of shape {list(feature.shape)}" if feature.shape else wanted,
            _is_text if feature.is_string else takes,
            feature.shape,
            feature.default is None,
        )
    label = schema.label
    if label.names is not None:
        yield _Field(label.name, "string", _is_text, required=False)
    elif label.classes is not None:
        yield _Field(label.name, "a whole number", types.is_integer, required=False)
    else:
        yield _Field(label.name, "a number", _is_number, required=False)
    for name, wanted, takes in (
        (schema.key, "a string or a whole number", _is_word),
        (schema.time, "a timestamp or a number of seconds", _is_time),
        (schema.weight, "a number", _is_number),
        (schema.group, "a string or a whole number", _is_word),
    ):
        if name is not None:
            yield _Field(name, wanted, takes)


def _is_text(kind: Any) -> bool:
    plain = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(plain) or types.is_large_string(plain))


def _is_number(kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _is_word(kind: Any) -> bool:
    return bool(_is_text(kind) or types.is_integer(kind))


def _is_time(kind: Any) -> bool:
    return bool(_is_number(kind) or types.is_timestamp(kind))


def _is_list(kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _sizes(kind: Any, field: _Field) -> tuple[int, ...] | None:
    """Return the lengths that lists of this Arrow type have to have for the field, or None where it does not fit.

    A shape is nested lists, or one list of all its values.
    """
    sizes: list[int] = []
    lists = 0
    inner = kind
    while _is_list(inner):
        sizes.append(inner.list_size if types.is_fixed_size_list(inner) else -1)
        inner, lists = inner.value_type, lists + 1
    if types.is_null(kind):
        return field.shape
    wanted = field.shape if lists == len(field.shape) else (int(np.prod(field.shape)),)
    fits = lists == len(wanted) and all(size in (-1, want) for size, want in zip(sizes, wanted, strict=True))
    return wanted if fits and field.takes(inner) else None


def _wide(kind: Any) -> Any:
    """Return the Arrow type with dictionary indices of 32 bits, in which the dictionaries of many messages can join."""
    if types.is_dictionary(kind):
        return pa.dictionary(pa.int32(), kind.value_type)
    if types.is_fixed_size_list(kind):
        return pa.list_(_wide(kind.value_type), kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(_wide(kind.value_type))
    return pa.list_(_wide(kind.value_type)) if types.is_list(kind) else kind


def _feature_column(field: _Field, feature: Feature, array: Any, faults: _Faults) -> Array:
    n = len(faults.first)
    if array is None or types.is_null(array.type):
        column: Array = np.zeros((n, *feature.shape), feature.dtype)
        present = np.zeros(n, np.bool_)
    else:
        leaf = _encoded(feature) if feature.is_string else _numbers(feature.dtype)
        column, good = _dense(array, _sizes(array.type, field) or (), leaf)
        column, present = column.reshape(n, *feature.shape), _present(array)
        faults.add(present & ~good, f"{feature.name} does not fit {field.wanted}")
    if present.all():
        return column
    if feature.default is None:
        faults.add(~present, f"{feature.name} is null")
        return column
    column = column.copy()
    column[~present] = feature.default
    return column


def _label_columns(label: Label, array: Any, faults: _Faults) -> dict[str, Array]:
    n = len(faults.first)
    if array is None or types.is_null(array.type):
        return {"label": np.full(n, label.missing, label.dtype), "labelled": np.zeros(n, np.bool_)}
    labelled = _present(array)
    if label.names is not None:
        ids = {name: place for place, name in enumerate(label.names)}
        words, codes, good = _coded(array)
        values = np.array([ids.get(word, -1) for word in words])[codes]
        good &= values >= 0
    else:
        values, good = _numbers(label.dtype)(array)
    wanted = "a number" if label.classes is None else f"in 0..{label.classes - 1}" if label.names is None else "a class"
    faults.add(labelled & ~good, f"{label.name} is not {wanted}")
    return {"label": np.where(labelled, values, label.missing).astype(label.dtype), "labelled": labelled}


def _extra(name: str, leaf: Leaf, arrays: dict[str, Any], faults: _Faults) -> Array:
    values, good = leaf(arrays[name])
    faults.add(~good, f"{name} is null")
    return values


def _dense(array: Any, sizes: tuple[int, ...], leaf: Leaf) -> tuple[Array, Mask]:
    """Return the values `[G, *sizes]` of lists, and which rows have all of theirs; those of the others are zeros."""
    if not sizes:
        return leaf(array)
    size, inside = sizes[0], sizes[1:]
    good = _present(array)
    if not types.is_fixed_size_list(array.type):
        good &= np.diff(array.offsets.to_numpy()) == size
    kept = array if good.all() else array.filter(pa.array(good))
    values, whole = _dense(kept.flatten(), inside, leaf)
    values = values.reshape(len(kept), size, *inside)
    whole = np.asarray(whole.reshape(len(kept), size).all(axis=1))
    if kept is array:
        return values, whole
    spread = np.zeros((len(good), *sizes), values.dtype)
    spread[good] = values
    good[good] = whole
    return spread, good


def _numbers(dtype: np.dtype[Any]) -> Leaf:
    """Return what makes numbers of this dtype; null, and a whole number that does not fit, is none."""

    def leaf(array: Any) -> tuple[Array, Mask]:
        good = _present(array)
        raw = _filled(array)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            good &= np.greater_equal(raw, int(limits.min)) & np.less_equal(raw, int(limits.max))
        with np.errstate(over="ignore"):
            return raw.astype(dtype, copy=False), good

    return leaf


def _seconds(array: Any) -> tuple[Array, Mask]:
    unit = array.type.unit if types.is_timestamp(array.type) else "s"
    whole = array.cast(pa.int64()) if types.is_timestamp(array.type) else array
    return _filled(whole).astype(np.float64) / _PER_SECOND[unit], _present(array)


def _encoded(feature: Feature) -> Leaf:
    def leaf(array: Any) -> tuple[Array, Mask]:
        assert feature.encoder is not None
        words, codes, good = _coded(array)
        return feature.encoder.encode(words)[codes], good

    return leaf


def _hashed(array: Any) -> tuple[Array, Mask]:
    words, codes, good = _coded(array)
    return hash_texts([str(word).encode() for word in words])[codes], good


def _coded(array: Any) -> tuple[list[Any], NDArray[np.int32], Mask]:
    """Return the W distinct words (strings or whole numbers), the index of each row's, and which rows have one."""
    if types.is_null(array.type):
        array = array.cast(pa.string())
    coded = array if types.is_dictionary(array.type) else array.dictionary_encode()
    words = coded.dictionary
    if not len(words):
        return [""], np.zeros(len(array), np.int32), np.zeros(len(array), np.bool_)
    codes = _filled(coded.indices).astype(np.int32, copy=False)
    good = _present(coded) & _present(words)[codes]
    return words.fill_null("" if _is_text(words.type) else 0).to_pylist(), codes, good


def _present(array: Any) -> Mask:
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
