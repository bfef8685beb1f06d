"""The contract of a Kafka client: partitions are assigned and sought, never subscribed.

A client is used by one thread. Its library's errors become ours inside it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from ingest.block import TopicPartition


@dataclass(frozen=True)
class Messages:
    """Consecutive messages of one partition, M of them, in the order of their offsets.

    `end` is the first offset after them, also where offsets without a message (transaction markers) follow the last.
    """

    partition: TopicPartition
    offsets: Sequence[int]
    times_ms: Sequence[int]
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[Sequence[tuple[str, bytes]]]
    end: int
    removed: int = 0
    """Offsets before the first message that retention took before they were read."""

    def __len__(self) -> int:
        return len(self.offsets)


@dataclass(frozen=True)
class DeadLetter:
    """A message that cannot be used, as it came, with what is added to it."""

    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]


@dataclass
class Lag:
    """How far the broker is: the end offset of each partition, and what is wrong with reaching it."""

    ends: dict[TopicPartition, int] = field(default_factory=dict)
    ill: str | None = None


class Client(Protocol):
    """Reads partitions and writes dead letters."""

    def open(self) -> None:
        """Connect; raises BrokerError with the reason, also when a topic is missing."""
        ...

    def partitions(self) -> list[TopicPartition]:
        """Return all partitions of the topics; may ask the broker."""
        ...

    def first_offsets(
        self, partitions: Sequence[TopicPartition], start: str, moment: datetime | None
    ) -> dict[TopicPartition, int]:
        """Return where to begin: `start` is `earliest` or `latest`, or `moment` is given."""
        ...

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read exactly these partitions from these offsets on."""
        ...

    def poll(self, timeout: timedelta, limit: int) -> list[Messages]:
        """Return at most about `limit` messages, and none when nothing comes in time or the broker is away.

        Raises:
            GapError: offsets to be read are gone, and `on_gap` is `fail`.
            BrokerError: the topic or the right to read it is gone.
        """
        ...

    def lag(self) -> Lag:
        """Ask the broker how far it is; never raises for a broker that is away."""
        ...

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        """Write positions for lag tools; a failure is logged and otherwise ignored."""
        ...

    def send_dead_letters(self, letters: Sequence[DeadLetter], timeout: timedelta) -> int:
        """Send letters and wait until the broker has acknowledged them.

        Returns:
            How many of the letters, from the first on, are acknowledged; fewer than all when the broker is away.
        """
        ...

    def close(self) -> None:
        """Disconnect."""
        ...
