"""Events as structs, whose fields are those of the schema: how values are checked, and how structs become columns.

The schema becomes a msgspec struct type, so that types, shapes and ranges are checked in C.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.schema import IGNORED, Feature, Label, Schema
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Decoded, Reject, reject_unusable_numbers
from anabranch.ingest.formats.label_lists import column_of_lists, without_repeats

T = TypeVar("T")

_LARGEST_BOUND = 2**63 - 1
"""msgspec compares integers with bounds of at most 64 bits."""

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of the parser for a bad message: malformed or unfit, not UTF-8, nested too deeply."""


class StructDecoder(Generic[T]):
    """Makes a struct of each value, then columns of all structs."""

    def __init__(
        self,
        schema: Schema,
        exact: Callable[[T], Any],
        lenient: Callable[[T], Any],
        reason_prefix: str = "",
        *,
        repaired: Callable[[T], Any] | None = None,
    ) -> None:
        """`exact` and `lenient` make a struct of a value; the first raises where a value has unknown fields.

        The reason of a value from which neither makes a struct begins with `reason_prefix`. `repaired` is asked for
        what `exact` cannot parse.
        """
        self._repaired = repaired
        self._schema = schema
        self._reason_prefix = reason_prefix
        self._exact = exact
        self._lenient = lenient

    def decode(self, values: Sequence[T]) -> Decoded:
        """Decode M values, each one event or a reject."""
        parse = self._exact
        events: list[Any] = []
        message: list[int] = []
        rejects: list[Reject] = []
        unknown = 0
        for index, value in enumerate(values):
            try:
                events.append(parse(value))
            except _UNREADABLE as exc:
                try:
                    event, has_unknown = self._read_again(value, exc)
                except _UNREADABLE as final:
                    rejects.append(Reject(index, WHOLE_MESSAGE, f"{self._reason_prefix}{final}"))
                    continue
                events.append(event)
                unknown += has_unknown
            message.append(index)
        try:
            columns = self._columns(events)
        except OverflowError:
            return self._decode_one_by_one(values)
        indexes = np.array(message, np.int32)
        decoded = Decoded(indexes, np.zeros_like(indexes), columns, rejects, unknown)
        if self._schema.label.multi:
            decoded = without_repeats(decoded, [len(_classes(event.label)) for event in events], self._schema.label)
        return reject_unusable_numbers(decoded, self._schema)

    def _read_again(self, value: T, error: Exception) -> tuple[Any, bool]:
        """Return the struct of a value that `exact` refuses, and whether it has unknown fields."""
        if not isinstance(error, msgspec.ValidationError):
            if self._repaired is None:
                raise error
            try:
                return self._repaired(value), False
            except msgspec.ValidationError:
                pass
        return self._lenient(value), True

    def _decode_one_by_one(self, values: Sequence[T]) -> Decoded:
        """Find the messages with an integer beyond 64 bits, which only raise when a column is built."""
        fits: list[int] = []
        too_large: list[Reject] = []
        for index, value in enumerate(values):
            try:
                self._columns([self._lenient(value)])
            except OverflowError as exc:
                too_large.append(Reject(index, WHOLE_MESSAGE, f"{self._reason_prefix}an integer is too large: {exc}"))
            except _UNREADABLE:
                fits.append(index)  # rejected with its own reason below
            else:
                fits.append(index)
        rest = self.decode([values[index] for index in fits]).at(np.array(fits, np.int32))
        return replace(rest, rejects=sorted([*rest.rejects, *too_large]))

    def _columns(self, events: list[Any]) -> dict[str, Array]:
        schema, n = self._schema, len(events)
        columns: dict[str, Array] = {}
        for index, feature in enumerate(schema.features):
            columns[f"feature.{feature.name}"] = _feature_column(feature, [getattr(e, f"f{index}") for e in events])
        columns.update(_label_columns(schema.label, [event.label for event in events]))
        weights = [event.weight for event in events] if schema.weight else np.ones(n)
        columns["weight"] = _numbers(weights, np.dtype(np.float32), n)
        if schema.time:
            columns["time"] = np.array([event.time for event in events], np.float64)
        for name, declared in schema.hashed:
            texts = [str(getattr(event, name)).encode() for event in events] if declared else []
            columns[f"{name}_hash"] = hash_texts(texts) if declared else np.zeros(n, np.uint64)
        return columns


def dict_decoder(schema: Schema) -> StructDecoder[Mapping[str, Any]]:
    """Return the decoder of events as mappings of field name to value, None meaning that the field is missing.

    Reasons begin with `schema: ` where a value does not fit its field.
    """
    convert = partial(msgspec.convert, type=event_type(schema, forbid_unknown=False))

    def present(event: Mapping[str, Any]) -> Any:
        return convert({name: value for name, value in event.items() if value is not None})

    return StructDecoder(schema, present, present, "schema: ")


def event_type(schema: Schema, *, forbid_unknown: bool, in_json: bool = False) -> type[msgspec.Struct]:
    """Return the type of an event, as msgspec checks it; with `forbid_unknown` other fields are an error.

    `in_json`: whether a time may be a text.
    """
    names: dict[str, str] = {}
    fields: list[Any] = []

    def add(attribute: str, name: str, kind: Any, *, optional: bool = False) -> None:
        names[attribute] = name
        fields.append((attribute, kind | UnsetType, UNSET) if optional else (attribute, kind))

    for index, feature in enumerate(schema.features):
        kind, optional = _feature_type(feature), feature.default is not None
        add(f"f{index}", feature.name, kind | None if optional else kind, optional=optional)
    add("label", schema.label.name, _label_type(schema.label) | None, optional=True)
    for attribute, name, kind in (
        ("key", schema.key, str | int),
        ("time", schema.time, float | str if in_json else float),
        ("weight", schema.weight, Annotated[float, Meta(ge=0)]),
        ("group", schema.group, str | int),
        ("join", schema.join, str | int),
    ):
        if name is not None:
            add(attribute, name, kind)
    # Fields without a default have to come first.
    fields.sort(key=len)
    return msgspec.defstruct("Event", fields, rename=names, forbid_unknown_fields=forbid_unknown, gc=False)


def _feature_type(feature: Feature) -> Any:
    kind: Any = str if feature.is_string else _number_type(feature.dtype)
    if feature.may_be_nan:
        kind = kind | None
    for size in reversed(feature.shape):
        kind = Annotated[list[kind], Meta(min_length=size, max_length=size)]
    return kind | None if feature.may_be_nan else kind


def _number_type(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return bool
    if dtype.kind == "f":
        return float
    limits = np.iinfo(dtype)
    if limits.max > _LARGEST_BOUND:
        return Annotated[int, Meta(ge=0)]
    return Annotated[int, Meta(ge=int(limits.min), le=int(limits.max))]


def _label_type(label: Label) -> Any:
    if label.is_list:
        one: Any = _label_type(replace(label, multi=False, length=None))
        if label.length is not None:
            one = (
                one | Literal[""] if label.names else Annotated[int, Meta(ge=IGNORED, le=(label.classes or 0) - 1)]
            ) | None
        return list[one]
    if label.names is not None:
        return Literal[label.names]
    if label.classes is None:
        return float
    number = Annotated[int, Meta(ge=0, le=label.classes - 1)]
    return number | bool if label.one_of == 2 else number


def _feature_column(feature: Feature, values: list[Any]) -> Array:
    absent = (UNSET, None)
    missing = [index for index, value in enumerate(values) if value in absent] if feature.default is not None else []
    if missing:
        filler = np.full(feature.shape, "" if feature.is_string else 0).tolist()
        values = [filler if value in absent else value for value in values]
    flat: Iterable[Any] = values
    for _ in feature.shape:
        flat = chain.from_iterable(flat)
    if feature.may_be_nan:
        flat = (math.nan if value is None else value for value in flat)
    if feature.encoder is not None:
        column: Array = feature.encoder.encode(list(flat))
    else:
        column = _numbers(flat, feature.dtype, len(values) * int(np.prod(feature.shape)))
    column = column.reshape(len(values), *feature.column_shape)
    if feature.default is not None:
        column[missing] = feature.default
    return column


def _numbers(values: Iterable[Any], dtype: np.dtype[Any], count: int) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):  # also of signalling NaN
        return np.fromiter(values, dtype, count)


def _classes(value: Any) -> list[Any]:
    """Return the classes that a label names: none where there is no label."""
    return [] if value is UNSET or value is None else value


def _label_columns(label: Label, values: list[Any]) -> dict[str, Array]:
    labelled = np.array([value is not UNSET and value is not None for value in values], np.bool_)
    if label.is_list:
        return {"label": column_of_lists(label, list(map(_classes, values))), "labelled": labelled}
    if label.names is not None:
        ids = {name: index for index, name in enumerate(label.names)}
        values = [ids.get(value, -1) if present else -1 for value, present in zip(values, labelled, strict=True)]
    elif not labelled.all():
        values = [value if present else label.missing for value, present in zip(values, labelled, strict=True)]
    return {"label": _numbers(values, label.dtype, len(values)), "labelled": labelled}
