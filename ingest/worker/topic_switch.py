"""Where the history ends and the topics begin."""

import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from anabranch.ingest.backfill.files import DISORDER, Switch
from anabranch.ingest.errors import BrokerError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Client
from anabranch.ingest.settings.stream import StreamSettings

_POLL = timedelta(milliseconds=50)
_READ_SECONDS = 10.0
_MOST_READ = 20_000
"""Records of a partition whose times are read at most."""

log = logging.getLogger(__name__)


def topics_begin(client: Client, stream: StreamSettings, *, timed: bool) -> tuple[Switch | None, bool | None]:
    """Return where the topics begin, and whether they have lost records from before where no setting names it.

    None: at `stream.start`, and all rows of files are read. With `until = "stream"`, and rows that are `timed`, it is
    the time that `stream.start` names, or for `earliest` the first from which on each partition of events has all of
    its records: one that has lost none decides only where none has lost any. For `latest` it is now. Ends the
    assignment of the client.

    Raises:
        BrokerError: the first records cannot be read.
    """
    settings = stream.backfill
    assert settings is not None
    if not timed or settings.identity is not None:
        return None, None
    events = [partition for partition in client.partitions() if partition.topic not in stream.label_topics]
    ends = {str(partition): end for partition, end in client.log_ends(events).items()}
    named = settings.until_time or stream.start_time or (datetime.now(UTC) if stream.start == "latest" else None)
    if named is not None:
        return Switch(int(named.timestamp() * 1000), ends=ends), None
    offsets = client.first_offsets(events, "earliest", None)
    times = first_times(client, offsets)
    if not times:
        log.info("no topic has a record with a time: all rows of the history are read, and all records after them")
        return None, None
    lost = [at for partition, at in times.items() if offsets[partition]]
    return Switch(max(lost) if lost else min(times.values()), ends=ends), bool(lost)


def first_times(client: Client, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Return the lowest time of the first records from an offset on, for each partition that has such with a time.

    Of a partition so many are read that none of those that follow is likely to be from before.

    Raises:
        BrokerError: the records cannot be read.
    """
    ends = client.log_ends(list(offsets)) if offsets else {}
    nexts, times, latest = dict(offsets), dict[TopicPartition, int](), dict[TopicPartition, int]()
    waiting = {partition for partition, offset in offsets.items() if ends[partition] > offset}
    deadline = time.monotonic() + _READ_SECONDS
    while waiting:
        client.assign({partition: nexts[partition] for partition in waiting})
        for messages in client.poll(_POLL, _MOST_READ):
            name = messages.partition
            nexts[name] = messages.end
            timed = [at for at in messages.times_ms if at > 0]
            if timed:
                times[name], latest[name] = min(*timed, times.get(name, timed[0])), max(*timed, latest.get(name, 0))
            spans = latest.get(name, 0) - times.get(name, 0) >= DISORDER.total_seconds() * 1000
            if spans or messages.end >= ends[name] or messages.end - offsets[name] >= _MOST_READ:
                waiting.discard(name)
        if time.monotonic() > deadline:
            waiting -= times.keys()
        if waiting and time.monotonic() > deadline:
            name = next(iter(waiting))
            raise BrokerError(
                f"the first record of {name.topic}[{name.partition}] cannot be read, whose time says where the history "
                "ends; set stream.backfill.until to a time"
            )
    return times
