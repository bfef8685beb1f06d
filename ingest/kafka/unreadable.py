"""Batches that cannot be read: damaged ones, and those that are too large once they are decompressed."""

import time
from collections.abc import Hashable

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.settings.kafka_properties import DEFAULTS
from anabranch.ingest.settings.stream import StreamSettings

_INFLATED = 4
"""A compressed batch may hold this many times the bytes that are fetched at once."""
CORRUPT_SECONDS = 30.0
"""How long a batch with a wrong checksum is fetched again before it is skipped."""


class CorruptBatches:
    """When each partition first returned a batch that cannot be read, so that fetching it again ends."""

    def __init__(self) -> None:
        self._since: dict[Hashable, float] = {}

    def is_permanent(self, partition: Hashable) -> bool:
        """Count such a batch, and return whether the partition has returned it for `CORRUPT_SECONDS`."""
        since = self._since.setdefault(partition, time.monotonic())
        return time.monotonic() - since >= CORRUPT_SECONDS

    def remove(self, partition: Hashable) -> None:
        """Remove a partition: one of its batches was read."""
        self._since.pop(partition, None)


def unreadable(partition: TopicPartition, offsets: range, time_ms: int, reason: str) -> Messages:
    """Return consecutive messages of which nothing but their offsets can be read."""
    n, nothing = len(offsets), [None] * len(offsets)
    faults = dict.fromkeys(range(n), reason)
    return Messages(partition, offsets, [time_ms] * n, nothing, nothing, [()] * n, offsets.stop, faults=faults)


def most_inflated(settings: StreamSettings) -> int:
    """Return how many bytes a batch may be once it is decompressed."""
    fetched = settings.properties.get("fetch.max.bytes")
    once = int(fetched.get_secret_value() if fetched is not None else DEFAULTS["fetch.max.bytes"])
    return _INFLATED * max(once, int(settings.max_message_bytes))
