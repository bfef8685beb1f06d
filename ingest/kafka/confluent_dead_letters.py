"""Clients of librdkafka with `[stream.properties]`, and the producer of dead letters."""

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from operator import methodcaller
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from anabranch.core.errors import SettingsError
from ingest.config import StreamSettings
from ingest.kafka.client import DeadLetter, sanitize, shrink
from ingest.kafka.diagnostics import BAD_HEADER
from ingest.kafka_properties import DEFAULTS, PROPERTIES

_LARGEST_LETTER = 100_000_000
_LETTER_MS = 10_000
_REFUSED_LETTERS = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_RECORD)
"""Errors that the letter itself causes: sending it again gives the same."""

log = logging.getLogger(__name__)

# What librdkafka logs of itself; what matters of it comes as errors too.
_theirs = logging.getLogger(f"{__name__}.own")
_theirs.propagate = False
_theirs.addHandler(logging.NullHandler())


def make(kind: Any, settings: StreamSettings, ours: Mapping[str, Any]) -> Any:
    """Make a client of the given class from `[stream.properties]`, and above them ours; raises SettingsError."""
    tuned = {**DEFAULTS, **{name: secret.get_secret_value() for name, secret in settings.properties.items()}}
    for name in ("sasl.mechanism", "sasl.mechanisms"):
        if name in tuned:
            tuned[name] = tuned[name].upper()
    fit = {name: value for name, value in tuned.items() if kind is Consumer or not PROPERTIES[name].consumer_only}
    try:
        return kind({"bootstrap.servers": settings.bootstrap_servers, **fit, **ours}, logger=_theirs)
    except KafkaException as exc:
        raise SettingsError(f"invalid stream.properties: {_without_secrets(exc, settings)}") from exc


def brief(exc: KafkaException) -> str:
    """Return the sentence of an error of librdkafka."""
    return str(exc.args[0].str())


_HEADERS = methodcaller("headers")


def headers_of(records: Sequence[Any]) -> tuple[list[Sequence[tuple[str, bytes]]], dict[int, str]]:
    """Return the headers of records, and by index the fault of each record with a name that is not UTF-8.

    Each record is asked once: confluent-kafka raises where it cannot decode a name, and a second call would return an
    incomplete list. `methodcaller` is needed: where the interpreter calls the method itself, it does not check whether
    an error is set, which then appears at a later record.
    """
    headers: list[Sequence[tuple[str, bytes]]] = []
    faults: dict[int, str] = {}
    for index, record in enumerate(records):
        try:
            headers.append(_HEADERS(record) or ())
        except (UnicodeDecodeError, SystemError):
            headers.append(())
            faults[index] = BAD_HEADER
    return headers, faults


class LetterProducer:
    """Writes dead letters, and waits until each is acknowledged."""

    def __init__(self, settings: StreamSettings) -> None:
        self._topic = settings.dead_letter_topic
        self.dropped = 0
        self._producer = make(
            Producer,
            settings,
            {
                "acks": "all",
                "linger.ms": 1,
                # Small, so that a letter that is too large fails without others that share its batch.
                "batch.size": 16_384,
                "message.max.bytes": _LARGEST_LETTER,
                "message.timeout.ms": _LETTER_MS,
            },
        )

    def send(self, letters: Sequence[DeadLetter], timeout: timedelta) -> int:
        """Send and wait; a refused letter is sent again with less in it, at last with nothing, or dropped."""
        deadline = time.monotonic() + timeout.total_seconds()
        errors = self._delivered(letters, deadline)
        for done, (letter, error) in enumerate(zip(letters, errors, strict=True)):
            less = shrink(letter)
            while error is not None and error.code() in _REFUSED_LETTERS:
                bare = next(less, None)
                if bare is None:
                    log.debug("a dead letter is refused even without its contents: %s", error.str())
                    self.dropped += 1
                    error = None
                else:
                    (error,) = self._delivered([bare], deadline)
            if error is not None:
                log.warning("dead letters wait: %s", error.str())
                return done
        return len(letters)

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


def _without_secrets(exc: KafkaException, settings: StreamSettings) -> str:
    sentence = brief(exc)
    for secret in settings.properties.values():
        sentence = sentence.replace(secret.get_secret_value() or "\n", "...")
    return sentence
