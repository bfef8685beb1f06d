"""The schema of label messages, and how a label finds its event. See `[stream.labels]`."""

from ingest.config import FieldSettings, SchemaSettings
from ingest.events.schema import Schema
from ingest.label_stream_settings import LabelStreamSettings


def label_schema(schema: Schema, labels: LabelStreamSettings) -> Schema:
    """Return the schema of label messages: a key and a label, no features. One of the two sections declares the key."""
    name = labels.name or schema.label.name
    return Schema(
        SchemaSettings.model_construct(
            features={},
            label=schema.settings.label.model_copy(update={"name": name}),
            key=FieldSettings(name=labels.key or str(schema.key)),
        )
    )
