"""Decodes the messages of label topics: see `[stream.labels]`."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from anabranch.ingest.events.block import BlockLayout
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.base import Decoded, Format, Headers
from anabranch.ingest.formats.registry import make_format
from anabranch.ingest.schema_registry.cache import WriterSchemas
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.ingest.settings.stream import FieldSettings, SchemaSettings, StreamSettings


def label_schema(schema: Schema, labels: LabelStreamSettings) -> Schema:
    """Return the schema of label messages: a key and a label, no features. One of the two sections declares the key."""
    name, of = labels.name or schema.label.name, schema.settings
    fields = {each.name: each.field for each in (of.key, of.group) if each is not None}
    key = labels.key or str(schema.key)
    return Schema(
        SchemaSettings.model_construct(
            features={},
            label=of.label.model_copy(update={"name": name, "field": None if labels.name else of.label.field}),
            key=FieldSettings(name=key, field=fields.get(key)),
        )
    )


class LabelFormat(Format):
    """Decodes messages of a key and a label, in the format of the events, to rows like theirs with features of zeros.

    The hash of the key is in the column by which events are found, `Schema.join_column`.
    """

    def __init__(self, schema: Schema, stream: StreamSettings, schemas: WriterSchemas | None = None) -> None:
        """Take the schema of events, `[stream]` with `[stream.labels]`, and the writer schemas of a registry."""
        assert stream.labels is not None
        super().__init__(schema)
        self._label_schema = label_schema(schema, stream.labels)
        self._format = make_format(stream, self._label_schema, schemas, is_of_subject=False)
        self._layout = BlockLayout(schema)
        self._hashes = [f"{start}_hash" for start, _ in schema.hashed]

    def decode(self, values: Sequence[bytes], headers: Sequence[Headers] = ()) -> Decoded:
        """Decode M message values; a message without a label is a reject."""
        labels = self._format.decode(values, headers)
        absent = ~labels.columns["labelled"].astype(np.bool_)
        if absent.any():
            labels = labels.without(absent, f"{self._label_schema.label.name} is missing or null")
        zeros = self._layout.empty(len(labels.message))
        columns = {name: zeros[name] for name in (*self.schema.payload(), *self._hashes)}
        columns |= {name: labels.columns[name] for name in ("label", "labelled", "weight")}
        columns[self.schema.join_column] = labels.columns["key_hash"]
        return replace(labels, columns=columns)
