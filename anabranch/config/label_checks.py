"""Checks that `[stream.labels]` and `[schema]` fit: labels find events by a key, and may be needed as classes."""

from collections.abc import Iterator

from ingest.config import SchemaSettings
from ingest.label_stream_settings import LabelStreamSettings


def label_conflicts(events: SchemaSettings, labels: LabelStreamSettings) -> Iterator[tuple[str, str]]:
    """Yield each key of `[stream.labels]` that does not fit the schema, and one sentence on it."""
    key = labels.key or (events.key.name if events.key is not None else None)
    fields = [*events.features, events.label.name, labels.name]
    fields += [field.name for field in (events.time, events.weight) if field is not None]
    classes = events.label.classes
    if key is None:
        yield "key", "labels find their events by a key, and there is none; set stream.labels.key or [schema.key]"
    elif key in fields:
        taken = "is a feature, a label, the time or the weight too; name another field"
        yield "key", f"stream.labels.key = {key!r} {taken}"
    if labels.unmatched == "negative" and (classes is None or events.label.multi or events.label.length):
        needs = 'needs [schema.label] with classes of which an event has one; write "drop" or "store"'
        yield "unmatched", f'stream.labels.unmatched = "negative" {needs}'
