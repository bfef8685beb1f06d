"""The format `rows`: one or many fixed-size packed little-endian rows a message.

A row is the features in the order of the file, then label, key (int64), time (float64), weight (float32), group (int64)
and the field by which a late label finds its event (int64), each where declared. Label -1, or NaN for floats, means not
labelled. A label of several classes is 0 or 1 for each class, and -1 for each where there is none. One with a length
has a class at each position, or -100.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.schema import IGNORED, Label, Schema, in_seconds
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Decoded, Format, Headers, Reject, reject_unusable_numbers
from anabranch.ingest.formats.label_lists import column_of_lists, ids_of_classes
from anabranch.ingest.formats.other_formats import not_binary
from anabranch.ingest.settings.formats import FORMATS

_EXTRAS = {"key": "<i8", "time": "<f8", "weight": "<f4", "group": "<i8", "join": "<i8"}


def row_dtype(schema: Schema) -> np.dtype[np.void]:
    """Return the packed structured dtype of one row.

    Raises:
        SettingsError: the schema has strings or defaults, which this format cannot hold.
    """
    if schema.shared:
        raise SettingsError(
            'stream.format = "rows" has a value for each field, but two of [schema] are one; use "json"'
        )
    fields: list[tuple[str, Any] | tuple[str, Any, tuple[int, ...]]] = []
    for feature in schema.features:
        if feature.is_string or (feature.default is not None and not feature.may_be_nan):
            what = 'dtype "string"' if feature.is_string else "a default"
            raise SettingsError(
                f'stream.format = "rows" cannot hold schema.features.{feature.name}, which has {what}; use "json"'
            )
        fields.append((feature.name, feature.wire.newbyteorder("<"), feature.shape))
    fields.append((schema.label.name, schema.label.wire.newbyteorder("<"), schema.label.shape))
    for attribute, kind in _EXTRAS.items():
        name = getattr(schema, attribute)
        if name is not None:
            fields.append((name, kind))
    return np.dtype(fields)


def pack_rows(schema: Schema, events: Sequence[Mapping[str, Any]]) -> bytes:
    """Pack events, given as mappings of field name to value, into rows; a missing label is written as not labelled.

    Raises:
        SettingsError: an event lacks a field or has a value that does not fit.
    """
    rows = np.zeros(len(events), row_dtype(schema))
    label = schema.label
    optional = {feature.name for feature in schema.features if feature.may_be_nan}
    for index, event in enumerate(events):
        for name in rows.dtype.names or ():
            value = event.get(name, label.missing if name == label.name else None)
            if label.is_list and name == label.name:
                value = _multi_hot(label, event.get(name)) if label.multi else _positions(label, event.get(name))
            elif label.names is not None and name == label.name and isinstance(value, str):
                value = label.names.index(value) if value in label.names else None
            try:
                if value is None and name not in optional:
                    raise ValueError("it is missing")
                rows[index][name] = value
            except (ValueError, TypeError, OverflowError) as exc:
                raise SettingsError(f"event {index}: {name} = {event.get(name)!r} does not fit its row: {exc}") from exc
    return rows.tobytes()


def _multi_hot(label: Label, classes: Any) -> NDArray[np.int64] | None:
    """Return 0 or 1 for each class, from the list of an event's classes; None if an entry is no class.

    Without a label it is -1 for each class, which an unsigned dtype cannot hold.
    """
    if classes is None:
        return np.full(label.shape, -1) if label.wire.kind == "i" else None
    known = list(label.names or range(label.classes or 0))
    if not isinstance(classes, list) or not all(each in known for each in classes):
        return None
    return np.isin(np.arange(len(known)), [known.index(each) for each in classes]).astype(np.int64)


def _positions(label: Label, classes: Any) -> NDArray[np.int64] | None:
    """Return the class number at each position, from the list of an event; None if an entry is no class."""
    known = [*(ids_of_classes(label) if label.names else (None, IGNORED, *range(label.classes or 0)))]
    if not isinstance(classes, list | None) or not all(each in known for each in classes or ()):
        return None
    column: NDArray[np.int64] = column_of_lists(label, [classes or []])[0]
    return column


class RowsFormat(Format):
    """Decodes packed rows, all messages of a batch at once."""

    kind = FORMATS["rows"]

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema)
        self._dtype = row_dtype(schema)

    def decode(self, values: Sequence[bytes], headers: Sequence[Headers] = ()) -> Decoded:  # noqa: ARG002
        """Decode M message values, each any number of events, or a reject when its length does not fit."""
        size = self._dtype.itemsize
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        fits = (lengths % size == 0) & (lengths > 0)
        rejects = [
            Reject(
                int(index),
                WHOLE_MESSAGE,
                not_binary(values[int(index)]) or f"{lengths[index]} bytes are not whole rows of {size} bytes",
            )
            for index in np.flatnonzero(~fits)
        ]
        good = np.flatnonzero(fits)
        counts = lengths[good] // size
        rows = np.frombuffer(b"".join(values if fits.all() else [values[i] for i in good.tolist()]), self._dtype)
        message = np.repeat(good, counts).astype(np.int32)
        index = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        decoded = Decoded(message, index.astype(np.int32), self._columns(rows), rejects)
        if self.schema.label.multi:
            raw = rows[self.schema.label.name]
            odd = ((raw != 0) & (raw != 1)).any(axis=1) & decoded.columns["labelled"].astype(np.bool_)
            decoded = decoded.without(odd, f"{self.schema.label.name} is not 0 or 1 for each class")
        return reject_unusable_numbers(decoded, self.schema)

    def pack(self, events: Sequence[Mapping[str, Any]]) -> bytes:
        """Return a message with a row for each event; raises SettingsError when a value does not fit."""
        return pack_rows(self.schema, events)

    def _columns(self, rows: NDArray[np.void]) -> dict[str, Array]:
        schema, label = self.schema, self.schema.label
        columns: dict[str, Array] = {
            f"feature.{feature.name}": feature.from_wire(rows[feature.name].astype(feature.wire, copy=False))
            for feature in schema.features
        }
        raw = rows[label.name]
        columns["labelled"] = ~np.isnan(raw) if raw.dtype.kind == "f" else np.asarray(raw != -1)
        columns["label"] = raw.astype(label.dtype, copy=False)
        if label.length is not None:
            columns["labelled"] = np.ones(len(raw), np.bool_)
        if label.multi:
            columns["labelled"] = np.asarray((raw != -1).any(axis=1))
            columns["label"] = np.asarray(raw == 1)
        columns["weight"] = (
            rows[schema.weight].astype(np.float32, copy=False) if schema.weight else np.ones(len(rows), np.float32)
        )
        if schema.time:
            columns["time"] = in_seconds(rows[schema.time].astype(np.float64, copy=False), schema.time_unit)
        for name, field in schema.hashed:
            texts = [str(value).encode() for value in rows[field].tolist()] if field else []
            columns[f"{name}_hash"] = hash_texts(texts) if field else np.zeros(len(rows), np.uint64)
        return columns
