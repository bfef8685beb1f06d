"""Builds the history of the settings, for which pyarrow is needed."""

from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.history_rows import HistorySource
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import StreamSettings


def history_of(stream: StreamSettings, schema: Schema, seed: int) -> HistorySource | None:
    """Return the files of `[stream.backfill]`; None where it is absent. Raises SettingsError without pyarrow."""
    if stream.backfill is None:
        return None
    try:
        # Imported here since it is an extra.
        from anabranch.ingest.backfill.history import FileHistory
        from anabranch.ingest.backfill.kafka_history import KafkaHistory
    except ImportError as exc:
        raise SettingsError("[stream.backfill] needs pyarrow: pip install 'anabranch[arrow]'") from exc
    if stream.backfill.identity is not None:
        return KafkaHistory(stream, schema)
    return FileHistory(stream.backfill, schema, seed, int(stream.max_message_bytes), need_label=stream.needs_label)
