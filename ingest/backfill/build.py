"""Builds the history of the settings, for which pyarrow is needed."""

from anabranch.core.extras import needs
from anabranch.ingest.backfill.history_rows import HistorySource
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.envelopes.change_events import RowEnvelope
from anabranch.ingest.settings.stream import StreamSettings


def history_of(stream: StreamSettings, schema: Schema, seed: int) -> HistorySource | None:
    """Return the files of `[stream.backfill]`; None where it is absent. Raises SettingsError without pyarrow."""
    if stream.backfill is None:
        return None
    with needs("[stream.backfill]", "pyarrow", "arrow"):
        from anabranch.ingest.backfill.history import FileHistory
        from anabranch.ingest.backfill.kafka_history import KafkaHistory
    if stream.backfill.identity is not None:
        return KafkaHistory(stream, schema)
    longest, envelope = int(stream.max_message_bytes), RowEnvelope.of(stream, schema)
    return FileHistory(stream.backfill, schema, seed, longest, need_label=stream.needs_label, envelope=envelope)
