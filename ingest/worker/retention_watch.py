"""Reports in time that retention removes records of the topics before the history is read."""

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import BrokerError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Client
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.transport.protocol import HistoryProgress
from anabranch.ingest.worker.topic_switch import first_times

_MEASURED_SECONDS = 5.0
"""How long the rate of the history is measured before it counts."""

log = logging.getLogger(__name__)


class RetentionWatch:
    """Compares when the history is expected to end with when the first records that wait for it are removed."""

    def __init__(
        self,
        removed_at: Mapping[TopicPartition, float],
        rows_done: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Take when retention may remove the first record of each partition, in seconds since 1970.

        `rows_done` rows of the history were read before.
        """
        self._first = min(removed_at.items(), key=lambda each: each[1], default=None)
        self._clock = clock
        self._wall = wall
        self._began, self._before = clock(), rows_done

    def problem(self, progress: HistoryProgress | None) -> str | None:
        """Return one sentence when records are removed before the history ends, as its rate so far lets expect."""
        if progress is None or progress.done or self._first is None:
            return None
        read, seconds = progress.rows_done - self._before, self._clock() - self._began
        if seconds < _MEASURED_SECONDS or not read:
            return None
        (name, removed_at), ends_at = self._first, self._wall() + (progress.rows - progress.rows_done) * seconds / read
        if removed_at > ends_at:
            return None
        return (
            f"retention removes the first records of {name.topic}[{name.partition}] that wait for the history about "
            f"{_moment(removed_at)}, and the history is expected to last until {_moment(ends_at)}; raise retention.ms "
            "of the topic, or begin again with a later stream.backfill.until"
        )


def watch_of(
    client: Client, stream: StreamSettings, positions: Mapping[TopicPartition, int], rows_done: int
) -> RetentionWatch:
    """Return a watch of the records at these positions; of none where the broker shows no retention.

    Ends the assignment of the client.
    """
    # Imported here since it loads kafka-python, which an ingest process without a history may not need.
    from anabranch.ingest.kafka.topic_inspector import Inspector

    try:
        with Inspector(stream) as inspector:
            described = {topic: inspector.topic(topic) for topic in {name.topic for name in positions}}
        kept: dict[str, timedelta] = {
            name: topic.retention for name, topic in described.items() if topic is not None and topic.retention
        }
        times = first_times(client, {name: offset for name, offset in positions.items() if name.topic in kept})
    except (BrokerError, SettingsError) as exc:  # some properties are of the client that reads, and not of this one
        log.info("whether retention removes records before the history is read is not known: %s", exc)
        return RetentionWatch({})
    removed_at = {name: ms / 1000 + kept[name.topic].total_seconds() for name, ms in times.items()}
    return RetentionWatch(removed_at, rows_done)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(min(seconds, 4e9), UTC).isoformat(timespec="minutes")
