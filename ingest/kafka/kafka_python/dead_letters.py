"""The producer of dead letters, created with the first letter."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from kafka import KafkaProducer
from kafka import errors as kafka_errors

from anabranch.ingest.errors import BrokerError
from anabranch.ingest.kafka.dead_letters import LARGEST_LETTER, DeadLetter, DeadLetterWriter, DeliveryError, sanitize
from anabranch.ingest.kafka.kafka_python.connection import brief, connect
from anabranch.ingest.kafka.kafka_python.null_headers import sendable
from anabranch.ingest.settings.stream import StreamSettings

_REFUSED = (
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordListTooLargeError,
    kafka_errors.InvalidRecordError,
)


class KafkaPythonDeadLetters(DeadLetterWriter):
    """Writes dead letters with kafka-python's producer."""

    def __init__(self, settings: StreamSettings) -> None:
        super().__init__()
        self._settings = settings
        self._producer: Any = None

    def close(self) -> None:
        """Disconnect; unsent letters are lost."""
        if self._producer is not None:
            self._producer.close(timeout=1)

    def _deliver(self, letters: Sequence[DeadLetter], deadline: float) -> Iterator[DeliveryError | None]:
        try:
            sent = [self._send(sanitize(letter)) for letter in letters]
        except (kafka_errors.KafkaError, BrokerError) as exc:
            yield DeliveryError(brief(exc), refused=False)
            return
        for future in sent:
            try:
                if isinstance(future, kafka_errors.KafkaError):
                    raise future
                future.get(timeout=max(0.01, deadline - time.monotonic()))
            except kafka_errors.KafkaError as exc:
                yield DeliveryError(brief(exc), refused=isinstance(exc, _REFUSED))
            else:
                yield None

    def _send(self, letter: DeadLetter) -> Any:
        """Return the future of a letter, or the error where the producer itself finds it too large."""
        if self._producer is None:
            # Not idempotent: after a message that is too large, kafka-python's idempotent producer answers every later
            # one with the same error. Dead letters are at least once anyway.
            self._producer = connect(
                KafkaProducer,
                self._settings,
                acks="all",
                enable_idempotence=False,
                linger_ms=1,
                max_request_size=LARGEST_LETTER,
            )
        topic = self._settings.dead_letter_topic
        try:
            return self._producer.send(topic, key=letter.key, value=letter.value, headers=sendable(letter.headers))
        except _REFUSED as exc:
            return exc
