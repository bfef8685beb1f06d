"""The format `arrow`: an Arrow IPC stream a message, with the schema's fields as columns and an event in each row.

Messages with one Arrow schema are decoded together. Its types are checked once, sizes before anything is allocated,
and offsets, indices and text before anything is read through them, since a message may hold any bytes.

Legend: M messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc, types

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.block import BlockLayout
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.arrow_columns import Faults, columns_of, fields_of, sizes_of
from anabranch.ingest.formats.arrow_ipc import UnfitError, claims
from anabranch.ingest.formats.base import (
    WHOLE_MESSAGE,
    Decoded,
    Format,
    Headers,
    Reject,
    joined,
    nothing,
    reject_unusable_numbers,
)
from anabranch.ingest.formats.other_formats import not_binary
from anabranch.ingest.settings.formats import FORMATS

_UNREADABLE = (UnfitError, pa.ArrowException, ValueError, OSError, MemoryError)
"""Errors that pyarrow raises for a bad message."""
_SMALL_BYTES = 65_536
_MOST_EXPANSION = 32
"""Decoding expands packed bits by 8, and rows of two bytes by about 30, since each gets an identity."""


@dataclass(frozen=True)
class _Plan:
    """How to read messages with one Arrow schema: the columns to read, and the schema to cast them to, or None."""

    columns: list[int]
    cast: Any
    has_unknown: bool


class ArrowFormat(Format):
    """Decodes Arrow IPC streams. Columns that the schema does not know are ignored, and their messages counted."""

    kind = FORMATS["arrow"]

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema)
        self._fields = tuple(fields_of(schema))
        self._row_bytes = BlockLayout(schema).row_bytes()

    def decode(self, values: Sequence[bytes], headers: Sequence[Headers] = ()) -> Decoded:  # noqa: ARG002
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
                rejects.append(Reject(index, WHOLE_MESSAGE, not_binary(value) or str(exc).partition("\n")[0]))
                continue
            unknown += plan.has_unknown
            groups.setdefault(start, []).extend((index, batch) for batch in batches)
        parts = [self._decode_group(group) for group in groups.values()]
        return reject_unusable_numbers(
            joined([replace(nothing(self.schema, rejects), unknown_fields=unknown), *parts]), self.schema
        )

    def pack(self, events: Sequence[Mapping[str, Any]]) -> bytes:
        """Return a message of one record batch; raises SettingsError when a value does not fit."""
        return pack_batch(self.schema, events)

    def _start_of_fair_size(self, value: bytes) -> bytes:
        """Return the part of a message that holds its Arrow schema, or raise if it would need too much memory."""
        claimed = claims(value)
        if not claimed.rows:
            raise UnfitError("it holds no event")
        size = claimed.rows * self._row_bytes + claimed.inflated_bytes
        if size > _SMALL_BYTES + _MOST_EXPANSION * len(value):
            raise UnfitError(
                f"its {len(value)} bytes would take {size} once decoded, more than {_MOST_EXPANSION} times as many; "
                f"send it uncompressed, or in smaller messages"
            )
        return claimed.schema

    def _plan(self, start: bytes) -> _Plan | str:
        """Return how to read messages of this Arrow schema, or the reason why they cannot be used."""
        schema = ipc.read_schema(pa.py_buffer(start))
        known = {field.column_in(schema.names) for field in self._fields} - {None}
        for name in schema.names:
            if name in known and schema.names.count(name) > 1:
                return f"two columns are named {name}"
        for field in self._fields:
            kind = field.type_in(schema)
            if kind is None:
                if field.required:
                    return f"missing required column {'.'.join(field.path)}"
            elif sizes_of(kind, field) is None:
                return f"{'.'.join(field.path)} is of Arrow type {kind}, not {field.expected}"
        columns = sorted(index for index, name in enumerate(schema.names) if name in known)
        taken = [schema.field(index) for index in columns]
        wide = pa.schema([pa.field(column.name, _wide(column.type), column.nullable) for column in taken])
        changed = any(column.type != other.type for column, other in zip(taken, wide, strict=True))
        return _Plan(columns, wide if changed else None, len(schema) > len(columns))

    def _decode_group(self, group: Sequence[tuple[int, Any]]) -> Decoded:
        """Decode batches of one Arrow schema, each with the index of its message, in the order of the index."""
        lengths = np.array([batch.num_rows for _, batch in group])
        message = np.repeat(np.array([index for index, _ in group], np.int32), lengths)
        row = (np.arange(len(message)) - np.searchsorted(message, message)).astype(np.int32)
        table = pa.Table.from_batches([batch for _, batch in group])
        faults = Faults(len(message))
        arrays = {field.name: field.array_in(table) for field in self._fields}
        columns = columns_of(self.schema, self._fields, arrays, faults)
        return faults.remove_from(Decoded(message, row, columns, ()))


def _read(value: bytes, plan: _Plan) -> list[Any]:
    """Return the record batches of one message, with every offset, index and text validated."""
    options = ipc.IpcReadOptions(use_threads=False, included_fields=plan.columns)
    batches = list(ipc.open_stream(pa.py_buffer(value), options=options))
    for batch in batches:
        batch.validate(full=True)
    return [batch.select(plan.cast.names).cast(plan.cast) for batch in batches] if plan.cast else batches


def _wide(kind: Any) -> Any:
    """Return the Arrow type with dictionary indices of 32 bits, in which those of many messages can be joined."""
    if types.is_dictionary(kind):
        return pa.dictionary(pa.int32(), kind.value_type)
    if types.is_struct(kind):
        return pa.struct([pa.field(each.name, _wide(each.type), each.nullable) for each in kind])
    if types.is_fixed_size_list(kind):
        return pa.list_(_wide(kind.value_type), kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(_wide(kind.value_type))
    return pa.list_(_wide(kind.value_type)) if types.is_list(kind) else kind


def pack_batch(schema: Schema, events: Sequence[Mapping[str, Any]]) -> bytes:
    """Return events as an Arrow IPC stream of one batch, with the columns of the schema that any of them has.

    Raises:
        SettingsError: a value does not fit its column.
    """
    columns = {}
    for name, kind in _types(schema).items():
        values = [event.get(name) for event in events]
        if any(value is not None for value in values):
            try:
                columns[".".join(schema.path(name))] = pa.array(values, kind)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
                raise SettingsError(f"{name} does not fit its column: {' '.join(str(exc).split())}") from exc
    batch = pa.RecordBatch.from_pydict(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _types(schema: Schema) -> dict[str, Any]:
    """Return the Arrow type of each field; None where its values decide."""
    kinds: dict[str, Any] = {}
    for feature in schema.features:
        kind = pa.string() if feature.is_string else pa.from_numpy_dtype(feature.wire)
        for size in reversed(feature.shape):
            kind = pa.list_(kind, size)
        kinds[feature.name] = kind
    label = schema.label
    kind = pa.string() if label.names else pa.from_numpy_dtype(label.wire)
    kinds[label.name] = pa.list_(kind) if label.is_list else kind
    others = {schema.key: None, schema.group: None, schema.join: None, schema.time: None, schema.weight: pa.float64()}
    return {name: kind for name, kind in others.items() if name} | kinds
