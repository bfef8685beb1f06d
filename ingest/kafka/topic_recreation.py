"""Finds topics that are not those that were read: one that was created again or truncated repeats its offsets.

The broker's id of a topic shows that it was created again. The last record that was read shows it too, and also shows
a log that was truncated and has grown again.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Fingerprint, PartitionFingerprint
from anabranch.ingest.kafka.client import Client, Messages

_POLL = timedelta(milliseconds=50)
_READ_SECONDS = 5.0

log = logging.getLogger(__name__)


def fingerprint(messages: Messages, index: int) -> Fingerprint:
    """Return the fingerprint of the message at `index`."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (messages.keys[index], messages.values[index]):
        digest.update(b"-" if part is None else b"+%d:" % len(part) + part)
    return Fingerprint(messages.offsets[index], messages.times_ms[index], digest.hexdigest())


@dataclass(frozen=True)
class Changed:
    """Partitions that were recreated or truncated."""

    recreated: list[TopicPartition]
    """Their topic was deleted and created again."""
    truncated: dict[TopicPartition, int]
    """Their log lost its end, as it may when its leader is lost: the offset at which it continues."""
    overwritten: list[TopicPartition]
    """Truncated partitions whose log has grown again: offsets that were read hold records that were not."""


def compare(client: Client, known: Mapping[TopicPartition, tuple[PartitionFingerprint, int]]) -> Changed:
    """Return the partitions that were recreated or truncated; ends the client's assignment.

    A log shorter than the offset read to was truncated if the topic's id is the same; without an id it counts as
    recreated.

    Args:
        client: an open client.
        known: fingerprint and next offset of each partition that was read. A last record that retention or compaction
            has removed since is no evidence.
    """
    existing, now = set(client.partitions()), client.topic_ids()
    here = {p: mark for p, (mark, _) in known.items() if TopicPartition(p.topic, p.partition) in existing}
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


def _read(client: Client, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, Fingerprint]:
    """Return the first record of each partition at its offset or after it, where it comes in time."""
    found: dict[TopicPartition, Fingerprint] = {}
    deadline = time.monotonic() + _READ_SECONDS
    if offsets:
        client.assign(offsets)
    while len(found) < len(offsets):
        for messages in client.poll(_POLL, len(offsets)):
            if len(messages):
                found.setdefault(messages.partition, fingerprint(messages, 0))
        if time.monotonic() > deadline:
            log.warning("the last records of %d partitions were not found again", len(offsets) - len(found))
            break
    return found
