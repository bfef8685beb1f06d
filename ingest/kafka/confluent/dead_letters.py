"""The producer of dead letters."""

import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from anabranch.ingest.kafka.confluent.connection import make
from anabranch.ingest.kafka.dead_letters import LARGEST_LETTER, DeadLetter, DeadLetterWriter, DeliveryError, sanitize
from anabranch.ingest.settings.stream import StreamSettings

_LETTER_MS = 10_000
_REFUSED = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_RECORD)


class ConfluentDeadLetters(DeadLetterWriter):
    """Writes dead letters with librdkafka's producer."""

    def __init__(self, settings: StreamSettings) -> None:
        super().__init__()
        self._topic = settings.dead_letter_topic
        self._producer = make(
            Producer,
            settings,
            {
                "acks": "all",
                "linger.ms": 1,
                # Small, so that a letter that is too large fails without others that share its batch.
                "batch.size": 16_384,
                "message.max.bytes": LARGEST_LETTER,
                "message.timeout.ms": _LETTER_MS,
            },
        )

    def _deliver(self, letters: Sequence[DeadLetter], deadline: float) -> list[DeliveryError | None]:
        return [
            None if error is None else DeliveryError(error.str(), error.code() in _REFUSED)
            for error in self._delivered(letters, deadline)
        ]

    def _delivered(self, letters: Sequence[DeadLetter], deadline: float) -> list[KafkaError | None]:
        """Send letters, and return the error of each, or None when the broker has acknowledged it."""
        errors: list[KafkaError | None] = [KafkaError(KafkaError._TIMED_OUT)] * len(letters)

        def on_delivery(index: int) -> Any:
            def set_error(error: KafkaError | None, _: Any) -> None:
                errors[index] = error

            return set_error

        for index, letter in enumerate(letters):
            try:
                self._produce(sanitize(letter), on_delivery(index), deadline)
            except KafkaException as exc:
                errors[index] = exc.args[0]
            except BufferError:
                break
        if self._producer.flush(max(0.0, deadline - time.monotonic())):
            # The caller sends unacknowledged letters again; duplicates are allowed, an endless queue is not.
            self._producer.purge()
        return errors

    def _produce(self, letter: DeadLetter, on_delivery: Any, deadline: float) -> None:
        while True:
            try:
                self._producer.produce(
                    self._topic, letter.value, letter.key, headers=letter.headers, on_delivery=on_delivery
                )
            except BufferError:
                if time.monotonic() > deadline:
                    raise
                self._producer.poll(0.1)
            else:
                return
