"""Writes events as messages of the format `arrow`."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema


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
                columns[name] = pa.array(values, kind)
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
        kind = pa.string() if feature.is_string else pa.from_numpy_dtype(feature.dtype)
        for size in reversed(feature.shape):
            kind = pa.list_(kind, size)
        kinds[feature.name] = kind
    label = schema.label
    kind = pa.string() if label.names else pa.from_numpy_dtype(label.wire)
    kinds[label.name] = pa.list_(kind) if label.is_list else kind
    others = {schema.key: None, schema.group: None, schema.join: None, schema.time: None, schema.weight: pa.float64()}
    return kinds | {name: kind for name, kind in others.items() if name}
