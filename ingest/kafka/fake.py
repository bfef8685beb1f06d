"""Ingest without Kafka: topics as lists in memory, faults on demand, and made-up blocks. For tests."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import numpy as np

from anabranch.ingest.errors import BrokerError
from anabranch.ingest.events.block import Array, BlockLayout
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.client import Lag, Messages
from anabranch.ingest.kafka.dead_letters import DeadLetter

Columns = dict[str, Array]


@dataclass
class FakePartition:
    """Messages at their offsets; offsets without a message are gaps."""

    messages: dict[int, bytes | None] = field(default_factory=dict)
    end: int = 0
    start: int = 0
    """The first offset that is not removed."""

    def append(self, value: bytes | None) -> int:
        """Add a message and return its offset."""
        self.messages[self.end] = value
        self.end += 1
        return self.end - 1

    def skip(self, offsets: int = 1) -> None:
        """Leave offsets without a message, as transaction markers do."""
        self.end += offsets


class FakeClient:
    """Serves `topics`; `away` makes every request fail, `refused_letters` that many dead letters.

    Letters with one of `dropped_values` are dropped, as those that a broker takes in no form.
    """

    def __init__(self, topics: Mapping[TopicPartition, FakePartition]) -> None:
        self.topics = dict(topics)
        self.letters: list[DeadLetter] = []
        self.committed: dict[TopicPartition, int] = {}
        self.away = False
        self.refused_letters = 0
        self.letters_dropped = 0
        self.dropped_values: set[bytes | None] = set()
        self.ids: dict[str, str] = {}
        self._positions: dict[TopicPartition, int] = {}
        self._paused: Collection[TopicPartition] = ()

    def open(self) -> None:
        """Raise BrokerError when away."""
        self._reach()

    def partitions(self) -> list[TopicPartition]:
        """Return the partitions of all topics."""
        return list(self.topics)

    def topic_ids(self) -> dict[str, str]:
        """Return `ids`."""
        return dict(self.ids)

    def first_offsets(
        self, partitions: Sequence[TopicPartition], start: str, moment: datetime | None
    ) -> dict[TopicPartition, int]:
        """The first or the next offset of each partition; moments are not known here."""
        assert moment is None
        self._reach()
        return {p: self._of(p).end if start == "latest" else 0 for p in partitions}

    def log_ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The end of each partition; there are no transactions."""
        return {p: self._of(p).end for p in partitions}

    def assign(self, positions: Mapping[TopicPartition, int], paused: Collection[TopicPartition] = ()) -> None:
        """Read from these offsets on."""
        self._positions, self._paused = dict(positions), paused

    def poll(self, timeout: timedelta, limit: int) -> list[Messages]:
        """Return up to `limit` messages of each partition, at once."""
        del timeout
        self._reach()
        return [self._messages(p, limit) for p in self._due()]

    def lag(self, *, log_starts: bool = False) -> Lag:
        """The end and the first offset of each partition."""
        if self.away:
            return Lag({}, "away")
        starts = {p: self._of(p).start for p in self._positions} if log_starts else {}
        return Lag({p: self._of(p).end for p in self._positions}, log_starts=starts)

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        """Store the positions."""
        self.committed.update(positions)

    def send_dead_letters(self, letters: Sequence[DeadLetter], timeout: timedelta) -> int:
        """Store the letters, except `refused_letters` of them, which are refused once."""
        del timeout
        taken = max(0, len(letters) - self.refused_letters)
        self.refused_letters = 0
        kept = [letter for letter in letters[:taken] if letter.value not in self.dropped_values]
        self.letters_dropped += taken - len(kept)
        self.letters += kept
        return taken

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _due(self) -> list[TopicPartition]:
        return [p for p, position in self._positions.items() if position < self._of(p).end and p not in self._paused]

    def _reach(self) -> None:
        if self.away:
            raise BrokerError("the fake broker is away")

    def _of(self, partition: TopicPartition) -> FakePartition:
        return self.topics[TopicPartition(partition.topic, partition.partition)]

    def _messages(self, partition: TopicPartition, limit: int) -> Messages:
        topic, position = self._of(partition), self._positions[partition]
        end = topic.end  # read once: another thread may append meanwhile, to the messages before it changes the end
        offsets = [offset for offset in sorted(topic.messages) if position <= offset < end]
        end = end if len(offsets) <= limit else offsets[limit]
        offsets = offsets[:limit]
        self._positions[partition] = end
        return Messages(
            partition,
            offsets,
            [1_700_000_000_000 + offset for offset in offsets],
            [b"key-%d" % offset for offset in offsets],
            [topic.messages[offset] for offset in offsets],
            [[("trace", b"%d" % offset)] for offset in offsets],
            end,
        )


def fake_columns(schema: Schema, offsets: Sequence[int], label: Sequence[int] = (0,), partition: int = 0) -> Columns:
    """Columns of a block of labelled events; feature values count up from the offset, labels repeat."""
    columns = BlockLayout(schema).empty(len(offsets))
    columns["offset"] = np.array(offsets, np.int64)
    columns["partition"] = np.full(len(offsets), partition, np.int32)
    columns["time_ms"] = columns["offset"] * 10
    columns["label"] = np.resize(np.array(label), (len(offsets), *schema.label.shape)).astype(schema.label.dtype)
    columns["labelled"] = np.ones(len(offsets), np.bool_)
    columns["weight"] = np.ones(len(offsets), np.float32)
    for feature in schema.features:
        flat = columns[f"feature.{feature.name}"].reshape(len(offsets), -1)
        flat[:] = (np.array(offsets)[:, None] + np.arange(flat.shape[1])) % 100
    return columns
