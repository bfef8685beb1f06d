"""Whether a topic is still the one that was read: deleted and created again, or truncated, it repeats its offsets.

The broker's id of a topic tells, where there is one; the last record that was read tells also of a log that was
truncated and has grown again.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from ingest.events.partition import TopicPartition
from ingest.events.position import Fingerprint, PartitionFingerprint
from ingest.kafka.client import Client, Messages

_POLL = timedelta(milliseconds=50)
_READ_SECONDS = 5.0

log = logging.getLogger(__name__)


def fingerprint(messages: Messages, place: int) -> Fingerprint:
    """Return that of one message."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (messages.keys[place], messages.values[place]):
        digest.update(b"-" if part is None else b"+%d:" % len(part) + part)
    return Fingerprint(messages.offsets[place], messages.times_ms[place], digest.hexdigest())


@dataclass(frozen=True)
class Changed:
    """Partitions that are not what they were."""

    recreated: list[TopicPartition]
    """Of a topic that was deleted and created again."""
    truncated: dict[TopicPartition, int]
    """Of the same topic, whose log lost its end, as it may when its leader is lost: where it goes on."""
    overwritten: list[TopicPartition]
    """Those of them whose log has grown again: records took the place of some that were read, and were not read."""


def compare(client: Client, known: Mapping[TopicPartition, tuple[PartitionFingerprint, int]]) -> Changed:
    """Find the partitions that are not what they were, which ends what the client is assigned.

    A log that is shorter than what was read of it was truncated where the broker's id says that it is the same topic;
    without an id it counts as recreated.

    Args:
        client: that is open.
        known: the mark of each partition that was read, and the next offset to read. A last record that retention or
            compaction has taken since tells nothing.
    """
    there, now = set(client.partitions()), client.topic_ids()
    here = {p: mark for p, (mark, _) in known.items() if TopicPartition(p.topic, p.partition) in there}
    other = {p for p, mark in here.items() if mark.topic_id and now.get(p.topic, mark.topic_id) != mark.topic_id}
    same = {p for p, mark in here.items() if mark.topic_id and now.get(p.topic) == mark.topic_id}
    asked = {p: mark.last for p, mark in here.items() if mark.last is not None and p not in other}
    read_to = {p: max(last.offset + 1, known[p][1] if p in same else 0) for p, last in asked.items()}
    earliest = client.first_offsets(list(asked), "earliest", None) if asked else {}
    ends = client.first_offsets(list(asked), "latest", None) if asked else {}
    below = [p for p in asked if ends[p] < read_to[p]]
    # Under read_committed `latest` is where an open transaction begins, which may be before what was read otherwise.
    log_ends = client.log_ends(below) if below else {}
    short = {p: log_ends[p] for p in below if log_ends[p] < read_to[p]}
    held = {p: last for p, last in asked.items() if p not in short and earliest[p] <= last.offset < ends[p]}
    found = _read(client, {p: last.offset for p, last in held.items()})
    differs = [p for p, each in found.items() if each.offset == held[p].offset and each != held[p]]
    other |= {p for p in (*short, *differs) if p not in same}
    truncated = {p: end for p, end in short.items() if p in same}
    overwritten = [p for p in differs if p in same]
    return Changed(
        [p for p in here if p in other], truncated | {p: held[p].offset + 1 for p in overwritten}, overwritten
    )


def _read(client: Client, places: Mapping[TopicPartition, int]) -> dict[TopicPartition, Fingerprint]:
    """Return the first record of each partition at an offset or after it, as far as they come in time."""
    found: dict[TopicPartition, Fingerprint] = {}
    deadline = time.monotonic() + _READ_SECONDS
    if places:
        client.assign(places)
    while len(found) < len(places):
        for messages in client.poll(_POLL, len(places)):
            if len(messages):
                found.setdefault(messages.partition, fingerprint(messages, 0))
        if time.monotonic() > deadline:
            log.warning("the last records of %d partitions were not found again", len(places) - len(found))
            break
    return found
