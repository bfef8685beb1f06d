"""The contract of a Kafka client: partitions are assigned and sought, never subscribed.

A client is used by one thread. Its library's errors become ours inside it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.dead_letters import DeadLetter


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
    """Offsets before the first message that retention removed before they were read."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """Why messages cannot be used, by index; the fields that could not be read are None."""

    def __len__(self) -> int:
        return len(self.offsets)

    def part(self, begin: int, end: int) -> "Messages":
        """Return messages `[begin, end)`; offsets without a message belong to the part before them."""
        last = end == len(self)
        return Messages(
            self.partition,
            self.offsets[begin:end],
            self.times_ms[begin:end],
            self.keys[begin:end],
            self.values[begin:end],
            self.headers[begin:end],
            self.end if last else self.offsets[end],
            self.removed if begin == 0 else 0,
            {index - begin: why for index, why in self.faults.items() if begin <= index < end},
        )


@dataclass
class Lag:
    """The end offset of each partition, and the problem with reaching the broker, if any."""

    ends: dict[TopicPartition, int] = field(default_factory=dict)
    problem: str | None = None
    log_starts: dict[TopicPartition, int] = field(default_factory=dict)
    """The first offset that each partition still has; empty unless it was asked for."""


class Client(Protocol):
    """Reads partitions and writes dead letters."""

    @property
    def letters_dropped(self) -> int:
        """Dead letters so far that were dropped, since the broker refuses each of their forms."""
        ...

    def open(self) -> None:
        """Connect; raises BrokerError with the reason, also when a topic is missing."""
        ...

    def partitions(self) -> list[TopicPartition]:
        """Return all partitions of the topics; may ask the broker."""
        ...

    def topic_ids(self) -> dict[str, str]:
        """Return the id of each topic, 32 hexadecimal digits, where the broker gives them; may ask the broker.

        From then on `poll` raises RecreatedError when one changes.
        """
        ...

    def first_offsets(
        self, partitions: Sequence[TopicPartition], start: str, moment: datetime | None
    ) -> dict[TopicPartition, int]:
        """Return where to begin: `start` is `earliest` or `latest`, or `moment` is given."""
        ...

    def log_ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offset after the last record of each partition, committed or not; asks the broker."""
        ...

    def assign(self, positions: Mapping[TopicPartition, int], paused: Collection[TopicPartition] = ()) -> None:
        """Read exactly these partitions from these offsets on; of those that are `paused`, only the lag."""
        ...

    def poll(self, timeout: timedelta, limit: int) -> list[Messages]:
        """Return at most about `limit` messages, and none when nothing comes in time or the broker is away.

        Raises:
            GapError: offsets to be read are gone, and `on_gap` is `fail`.
            RecreatedError: the topic is another one of the same name; TruncatedError where the client reports that it
                is the same and lost the end of its log.
            BrokerError: the topic or the right to read it is gone.
        """
        ...

    def lag(self, *, log_starts: bool = False) -> Lag:
        """Ask the broker for end offsets, and with `log_starts` for first ones; never raises when it is away."""
        ...

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        """Write positions for lag tools; a failure is logged and otherwise ignored."""
        ...

    def send_dead_letters(self, letters: Sequence[DeadLetter], timeout: timedelta) -> int:
        """Send letters and wait until the broker has acknowledged them.

        Returns:
            How many of the letters, from the first on, are acknowledged or dropped; fewer than all when the broker is
            away.
        """
        ...

    def close(self) -> None:
        """Disconnect."""
        ...
