"""A producer whose records may be lost: what the broker does not take in time is dropped and counted."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from anabranch.ingest.errors import CredentialsError
from anabranch.ingest.kafka.confluent.connection import make
from anabranch.ingest.settings.stream import StreamSettings

_LINGER_MS = 50
_TIMEOUT_MS = 20_000
"""How long to try to write a record."""
_MOST_KILOBYTES = 32_768
"""Of records that the broker has not acknowledged."""
_RETRY_SECONDS = 5.0
"""After which a token is asked for again."""
_ROOM_SECONDS = 1.0
"""How long to wait for room for a record; where that was in vain, there is no wait before there is room again."""


class BestEffortWriter:
    """Writes records to one topic as far as the broker takes them. Used by one thread."""

    def __init__(self, settings: StreamSettings, topic: str) -> None:
        """Connect in the background; a broker that is away is no error, nor a token. Raises SettingsError."""
        self._settings, self._topic = settings, topic
        self._written = self._dropped = 0
        self._is_full = False
        self.problem = ""
        """Why records were dropped last."""
        self._producer: Any = None
        self._retry_at = 0.0
        self._is_connected()

    def _is_connected(self) -> bool:
        """Make the producer, which needs a token if there is `stream.token`, and return whether it is there."""
        if self._producer is not None or time.monotonic() < self._retry_at:
            return self._producer is not None
        ours = {
            "linger.ms": _LINGER_MS,
            "message.timeout.ms": _TIMEOUT_MS,
            "queue.buffering.max.kbytes": _MOST_KILOBYTES,
            "partitioner": "murmur2_random",  # that of Java's clients, so that topics can be joined by key
            "on_delivery": self._on_delivery,
        }
        try:
            self._producer = make(Producer, self._settings, ours)
        except CredentialsError as exc:
            self._retry_at, self.problem = time.monotonic() + _RETRY_SECONDS, str(exc)
        return self._producer is not None

    def write(self, key: bytes | None, value: bytes, headers: Sequence[tuple[str, bytes]]) -> None:
        """Hand over a record, for which there may have to be room first, or drop it."""
        if not self._is_connected():
            self._dropped += 1
            return
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
        if self._producer is not None:
            self._producer.poll(0)
        return self._written, self._dropped

    def close(self, patience: timedelta) -> None:
        """Wait until the broker has all records, at most for `patience`, and drop the others."""
        if self._producer is not None and self._producer.flush(patience.total_seconds()):
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
