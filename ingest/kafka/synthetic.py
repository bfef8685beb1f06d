"""A topic of one partition without a broker: messages of a list, again and again, at a rate or as fast as possible.

They are records of Kafka's format, which kafka-python parses and checks as it does those that it fetches. As fast as
possible, another client can read them, from a synthetic broker. So the work of ingest is that of a topic.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from kafka import TopicPartition as KafkaPartition
from kafka.record import MemoryRecords
from typing_extensions import override

from ingest.events.partition import TopicPartition
from ingest.kafka.client import Client, Lag, Messages
from ingest.kafka.dead_letters import DeadLetter
from ingest.kafka.kafka_python.records import records_of
from ingest.kafka.synthetic_broker import record_batches

_MOST_BYTES = 1_000_000


class SyntheticClient(Client):
    """Returns `values` in turn; used by one thread."""

    letters_dropped = 0

    def __init__(
        self,
        topic: str,
        values: Sequence[bytes],
        rate: float,
        is_flooded: Callable[[], bool],
        now: Callable[[], float],
        flood: Client | None = None,
    ) -> None:
        """Take the messages.

        Args:
            topic: its name.
            values: of the messages; at least one.
            rate: messages a second.
            is_flooded: whether messages are returned as fast as they are read, from now on.
            now: the time of day in seconds, for the times of records.
            flood: reads the same messages from then on, instead of this one.
        """
        self._partition = TopicPartition(topic, 0)
        self._rate, self._is_flooded, self._now = rate, is_flooded, now
        self._flood = flood
        self._batches = [*record_batches(values)]
        self._next_batch = 0
        self._records: Any = None
        self._position = 0
        self._budget, self._since = 0.0, time.monotonic()

    @override
    def open(self) -> None:
        self._since = time.monotonic()
        if self._flood is not None:
            self._flood.open()
            self._flood.assign({self._partition: 0})

    @override
    def partitions(self) -> list[TopicPartition]:
        return [self._partition]

    @override
    def topic_ids(self) -> dict[str, str]:
        return {}

    @override
    def first_offsets(
        self, partitions: Sequence[TopicPartition], start: str, moment: datetime | None
    ) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, self._position)

    @override
    def log_ends(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, self._position)

    @override
    def assign(self, positions: Mapping[TopicPartition, int], paused: Collection[TopicPartition] = ()) -> None:
        self._position = positions[self._partition]

    @override
    def poll(self, timeout: timedelta, limit: int) -> list[Messages]:
        if self._flood is not None and self._is_flooded():
            return [self._next(messages) for messages in self._flood.poll(timeout, limit)]
        records = self._take(limit if self._is_flooded() else min(limit, self._due()))
        if not records:
            return []
        begin, self._position = self._position, self._position + len(records)
        now_ms = int(self._now() * 1000)
        return [
            Messages(
                self._partition,
                range(begin, self._position),
                [now_ms] * len(records),
                [record.key for record in records],
                [record.value for record in records],
                [record.headers for record in records],
                self._position,
            )
        ]

    @override
    def lag(self, *, log_starts: bool = False) -> Lag:
        return Lag({self._partition: self._position})

    @override
    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        pass

    @override
    def send_dead_letters(self, letters: Sequence[DeadLetter], timeout: timedelta) -> int:
        return len(letters)

    @override
    def close(self) -> None:
        if self._flood is not None:
            self._flood.close()

    def _next(self, messages: Messages) -> Messages:
        """Return messages of the other client as those that come next, and have come now."""
        begin, self._position = self._position, self._position + len(messages)
        times_ms = [int(self._now() * 1000)] * len(messages)
        offsets = range(begin, self._position)
        return replace(messages, partition=self._partition, offsets=offsets, times_ms=times_ms, end=self._position)

    def _due(self) -> int:
        """Return how many messages have come since the last call."""
        now = time.monotonic()
        self._budget, self._since = self._budget + self._rate * (now - self._since), now
        count = int(self._budget)
        self._budget -= count
        return count

    def _take(self, count: int) -> list[Any]:
        """Parse the next messages."""
        records: list[Any] = []
        while len(records) < count:
            if not self._records:  # the last batch is read to its end
                batch = self._batches[self._next_batch % len(self._batches)]
                tp = KafkaPartition(self._partition.topic, 0)
                self._records = records_of(tp, MemoryRecords(batch), _MOST_BYTES)
                self._next_batch += 1
            records += self._records.take(count - len(records))
        return records
