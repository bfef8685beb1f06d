"""Where in a partition the events without an outcome begin, and what a partition is recognised by."""

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class Fingerprint:
    """A record by which a partition is recognised: its offset, its timestamp, and a hash of key and value."""

    offset: int
    time_ms: int
    digest: str


class Position(msgspec.Struct, frozen=True):
    """The first event of a partition without an outcome: `offset`, and `row` within its message."""

    offset: int
    row: int = 0


class PartitionFingerprint(msgspec.Struct, frozen=True):
    """What a partition is recognised by: the id of its topic, and the last record that was read."""

    topic_id: str | None = None
    last: Fingerprint | None = None
