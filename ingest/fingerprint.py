"""Whether a topic is still the one that was read: deleted and created again, it repeats its offsets.

The broker's id of a topic tells, where there is one; the last record that was read tells also of a log that was cut
short and has grown again.
"""

import hashlib
import logging
import time
from collections.abc import Mapping
from datetime import timedelta

from ingest.block import Fingerprint, TopicPartition
from ingest.client import Client, Messages
from ingest.messages import Mark

_POLL = timedelta(milliseconds=50)
_READ_SECONDS = 5.0

log = logging.getLogger(__name__)


def fingerprint(messages: Messages, place: int) -> Fingerprint:
    """Return that of one message."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (messages.keys[place], messages.values[place]):
        digest.update(b"-" if part is None else b"+%d:" % len(part) + part)
    return Fingerprint(messages.offsets[place], messages.times_ms[place], digest.hexdigest())


def recreated(client: Client, known: Mapping[TopicPartition, Mark]) -> list[TopicPartition]:
    """Return the partitions that are not what they were, which ends what the client is assigned.

    Args:
        client: that is open.
        known: the partitions that were read. A record that retention or compaction has taken since tells nothing.
    """
    there = set(client.partitions())
    now = client.topic_ids()
    here = {p: mark for p, mark in known.items() if TopicPartition(p.topic, p.partition) in there}
    other = {p for p, mark in here.items() if mark.topic_id and now.get(p.topic, mark.topic_id) != mark.topic_id}
    asked = {p: mark.last for p, mark in here.items() if mark.last is not None and p not in other}
    earliest = client.first_offsets(list(asked), "earliest", None) if asked else {}
    ends = client.first_offsets(list(asked), "latest", None) if asked else {}
    other |= {p for p, last in asked.items() if ends[p] <= last.offset}
    held = {p: last for p, last in asked.items() if earliest[p] <= last.offset < ends[p]}
    for partition, found in _read(client, {p: last.offset for p, last in held.items()}).items():
        if found.offset == held[partition].offset and found != held[partition]:
            other.add(partition)
    return [p for p in here if p in other]


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
