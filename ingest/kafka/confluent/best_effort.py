"""A producer whose records may be lost: what the broker does not take in time is dropped and counted."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from anabranch.ingest.kafka.confluent.connection import make
from anabranch.ingest.settings.stream import StreamSettings

_LINGER_MS = 50
_TIMEOUT_MS = 20_000
"""How long to try to write a record."""
_MOST_KILOBYTES = 32_768
"""Of records that the broker has not acknowledged."""
_ROOM_SECONDS = 1.0
"""How long to wait for room for a record; where that was in vain, there is no wait before there is room again."""


class BestEffortWriter:
    """Writes records to one topic as far as the broker takes them. Used by one thread."""

    def __init__(self, settings: StreamSettings, topic: str) -> None:
        """Connect in the background; a broker that is away is no error. Raises SettingsError for properties."""
        self._topic = topic
        self._written = self._dropped = 0
        self._is_full = False
        self.problem = ""
        """Why records were dropped last."""
        ours = {
            "linger.ms": _LINGER_MS,
            "message.timeout.ms": _TIMEOUT_MS,
            "queue.buffering.max.kbytes": _MOST_KILOBYTES,
            "partitioner": "murmur2_random",  # that of Java's clients, so that topics can be joined by key
            "on_delivery": self._on_delivery,
        }
        self._producer: Any = make(Producer, settings, ours)

    def write(self, key: bytes | None, value: bytes, headers: Sequence[tuple[str, bytes]]) -> None:
        """Hand over a record, for which there may have to be room first, or drop it."""
        end = time.monotonic() + (0.0 if self._is_full else _ROOM_SECONDS)
        while True:
            try:
                self._producer.produce(self._topic, value, key, headers=headers)
            except BufferError:
                self._is_full = time.monotonic() >= end
                self._producer.poll(0.0 if self._is_full else 0.1)  # which frees what the broker has taken
                if not self._is_full:
                    continue
                self._dropped += 1
                self.problem = "the broker takes them more slowly than they come"
            except KafkaException as exc:  # larger than any that this client sends
                self._dropped += 1
                self.problem = exc.args[0].str()
            else:
                self._is_full = False
            return

    def counts(self) -> tuple[int, int]:
        """Return how many records the broker has acknowledged, and how many were dropped."""
        self._producer.poll(0)
        return self._written, self._dropped

    def close(self, patience: timedelta) -> None:
        """Wait until the broker has all records, at most for `patience`, and drop the others."""
        if self._producer.flush(patience.total_seconds()):
            why = self.problem or "the broker did not answer before the end"
            self._producer.purge()
            self._producer.flush(1.0)
            self.problem = why

    def _on_delivery(self, error: KafkaError | None, _: Any) -> None:
        if error is None:
            self._written += 1
        else:
            self._dropped += 1
            self.problem = error.str()
