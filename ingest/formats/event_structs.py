"""Events as structs become columns. `event_fields` makes the structs, whose types, shapes and ranges msgspec checks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.schema import Feature, Label, Schema, in_seconds
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Decoded, Reject, reject_unusable_numbers
from anabranch.ingest.formats.event_fields import event_reader
from anabranch.ingest.formats.label_lists import column_of_lists, without_repeats

T = TypeVar("T")

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
                    rejects.append(Reject(index, WHOLE_MESSAGE, f"{self._reason_prefix}{self._hinted(str(final))}"))
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

    def _hinted(self, reason: str) -> str:
        """Return a reason, and what to set where a feature is null that may not be."""
        if "got `null`" in reason:
            for feature in self._schema.features:
                if feature.default is None and reason.endswith(f"`$.{'.'.join(self._schema.path(feature.name))}`"):
                    key = "missing" if feature.dtype.kind == "f" and not feature.is_time else "default"
                    return f"{reason}; where it may be null, set schema.features.{feature.name}.{key}"
        return reason

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
            columns["time"] = in_seconds(np.array([event.time for event in events], np.float64), schema.time_unit)
        for name, declared in schema.hashed:
            texts = [str(getattr(event, name)).encode() for event in events] if declared else []
            columns[f"{name}_hash"] = hash_texts(texts) if declared else np.zeros(n, np.uint64)
        return columns


def dict_decoder(schema: Schema) -> StructDecoder[Mapping[str, Any]]:
    """Return the decoder of events as mappings of field name to value, None meaning that the field is missing.

    Reasons begin with `schema: ` where a value does not fit its field.
    """
    convert = event_reader(
        schema,
        lambda kind: partial(msgspec.convert, type=kind),
        forbid_unknown=False,
        has_paths=False,
        text_times=False,
    )

    def present(event: Mapping[str, Any]) -> Any:
        return convert({name: value for name, value in event.items() if value is not None})

    return StructDecoder(schema, present, present, "schema: ")


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
        column = feature.from_wire(_numbers(flat, feature.wire, len(values) * int(np.prod(feature.shape))))
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
