"""Where the history ends and the topics begin."""

import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from ingest.config import StreamSettings
from ingest.errors import BrokerError
from ingest.events.partition import TopicPartition
from ingest.kafka.client import Client

_POLL = timedelta(milliseconds=50)
_READ_SECONDS = 10.0

log = logging.getLogger(__name__)


def switch_time(client: Client, stream: StreamSettings, *, timed: bool) -> datetime | None:
    """Return the time at which the topics begin; None: at `stream.start`, and all rows of files are read.

    With `until = "stream"`, and rows that are `timed`, it is the time that `stream.start` names, or for `earliest` the
    first from which on each partition of events has all of its records: one that has lost none decides only where none
    has lost any. For `latest` it is now. Ends the assignment of the client.

    Raises:
        BrokerError: the first records cannot be read.
    """
    settings = stream.backfill
    assert settings is not None
    if settings.until_time is not None or not timed or settings.identity is not None:
        return settings.until_time
    if stream.start_time is not None:
        return stream.start_time
    if stream.start == "latest":
        return datetime.now(UTC)
    events = [partition for partition in client.partitions() if partition.topic not in stream.label_topics]
    offsets = client.first_offsets(events, "earliest", None)
    times = first_times(client, offsets)
    if not times:
        log.info("no topic has a record with a time: all rows of the history are read, and all records after them")
        return None
    begins = [at for partition, at in times.items() if offsets[partition]] or [min(times.values())]
    return datetime.fromtimestamp(max(begins) / 1000, UTC)


def first_times(client: Client, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Return the time of the first record from an offset on, for each partition that has such a record with a time.

    Raises:
        BrokerError: the records cannot be read.
    """
    ends = client.log_ends(list(offsets)) if offsets else {}
    nexts, times = dict(offsets), dict[TopicPartition, int]()
    waiting = {partition for partition, offset in offsets.items() if ends[partition] > offset}
    deadline = time.monotonic() + _READ_SECONDS
    while waiting:
        client.assign({partition: nexts[partition] for partition in waiting})
        for messages in client.poll(_POLL, len(waiting)):
            nexts[messages.partition] = messages.end
            if len(messages) and messages.times_ms[0] > 0:
                times.setdefault(messages.partition, messages.times_ms[0])
            if len(messages) or messages.end >= ends[messages.partition]:
                waiting.discard(messages.partition)
        if waiting and time.monotonic() > deadline:
            name = next(iter(waiting))
            raise BrokerError(
                f"the first record of {name.topic}[{name.partition}] cannot be read, whose time says where the history "
                "ends; set stream.backfill.until to a time"
            )
    return times
