"""Sends events to a topic, and creates and deletes topics, for the command line and the demo."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from kafka import KafkaAdminClient, KafkaProducer
from kafka import errors as kafka_errors

from anabranch.core.errors import AnabranchError, SettingsError
from anabranch.ingest.errors import BrokerError
from anabranch.ingest.kafka.kafka_python.connection import PATIENCE, connect, reason
from anabranch.ingest.kafka.kafka_python.null_headers import sendable
from anabranch.ingest.settings.stream import StreamSettings

_WAITING_BYTES = 32_000_000
_UNKNOWN_TOPIC = kafka_errors.UnknownTopicOrPartitionError.errno
_TOO_LARGE = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)

OnAcknowledged = Callable[[int, int], None]
"""Called with partition and offset, in the client's own thread, once the broker has acknowledged an event."""


class EventProducer:
    """Sends events to the partitions of one topic in turn, so that they are read in about the order they were sent.

    Used by one thread. Idempotent within one producer: a retry makes no second event.
    """

    def __init__(self, settings: StreamSettings, topic: str, patience: timedelta = timedelta(seconds=30)) -> None:
        self._settings = settings
        self._topic = topic
        self._patience = patience
        self._client: Any = None
        self._partitions: list[int] = []
        self._turn = 0
        self._changed = threading.Condition()
        self._waiting_bytes = 0
        self._error: AnabranchError | None = None
        self._acknowledged = 0
        self._last_offsets: dict[int, int] = {}

    @property
    def acknowledged(self) -> int:
        """Events that the broker has acknowledged."""
        return self._acknowledged

    @property
    def last_offsets(self) -> dict[str, int]:
        """The last acknowledged offset by `topic:partition`, of partitions that got an event."""
        with self._changed:
            return {f"{self._topic}:{partition}": offset for partition, offset in sorted(self._last_offsets.items())}

    def open(self) -> None:
        """Connect.

        Raises:
            BrokerError: the broker cannot be reached, or has no such topic.
        """
        found = partition_counts(self._settings, [self._topic])
        if not found:
            raise BrokerError(
                f'topic "{self._topic}" does not exist on {self._settings.bootstrap_servers}; --create-topic makes it'
            )
        self._partitions = list(range(found[self._topic]))
        patience_ms = int(self._patience.total_seconds() * 1000)
        self._client = connect(
            KafkaProducer,
            self._settings,
            acks="all",
            allow_auto_create_topics=False,
            max_request_size=max(1_048_576, int(self._settings.max_message_bytes) + 1024),
            request_timeout_ms=patience_ms // 3,
            delivery_timeout_ms=patience_ms,
            max_block_ms=patience_ms,
        )

    def send(
        self,
        value: bytes,
        on_acknowledged: OnAcknowledged | None = None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
    ) -> None:
        """Send one event; waits while too many bytes are in flight.

        It goes to `partition` if the topic has it, else by the hash of its key, else to the partitions in turn.

        Raises:
            BrokerError, SettingsError: this event or an earlier one was not taken.
        """
        with self._changed:
            roomy = self._changed.wait_for(self._has_room, self._patience.total_seconds())
            self._raise_error()
            if not roomy:
                raise BrokerError(self._unanswered(self._patience.total_seconds()))
            self._waiting_bytes += len(value)
        if partition not in self._partitions:
            partition = None if key is not None else self._partitions[self._turn % len(self._partitions)]
        self._turn += 1
        try:
            future = self._client.send(
                self._topic, value=value, key=key, headers=sendable(headers), partition=partition
            )
        except kafka_errors.KafkaError as exc:
            raise self._translated(exc) from exc
        future.add_callback(partial(self._on_success, len(value), on_acknowledged))
        future.add_errback(partial(self._on_failure, len(value)))

    def flush(self, patience: timedelta | None = None) -> None:
        """Wait until the broker has acknowledged everything that was sent, for `patience` if it is given.

        Raises:
            BrokerError, SettingsError: an event was not taken.
        """
        seconds = (self._patience if patience is None else patience).total_seconds()
        try:
            self._client.flush(timeout=seconds)
        except kafka_errors.KafkaTimeoutError as exc:
            raise BrokerError(self._unanswered(seconds)) from exc
        with self._changed:
            # The client's own flush returns before the last callbacks have run.
            self._changed.wait_for(lambda: self._waiting_bytes == 0 or self._error, seconds)
            self._raise_error()

    def close(self) -> None:
        """Disconnect; events in flight may be lost unless `flush` was called."""
        if self._client is not None:
            try:
                self._client.close(timeout=1)
            except kafka_errors.KafkaError:
                # The producer would wait for events in flight: give them up first.
                self._client._sender.force_close()
                with contextlib.suppress(kafka_errors.KafkaError):
                    self._client.close(timeout=1)

    def _has_room(self) -> bool:
        return self._waiting_bytes < _WAITING_BYTES or self._error is not None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _on_success(self, size: int, on_acknowledged: OnAcknowledged | None, metadata: Any) -> None:
        with self._changed:
            self._waiting_bytes -= size
            self._acknowledged += 1
            self._last_offsets[metadata.partition] = max(
                metadata.offset, self._last_offsets.get(metadata.partition, -1)
            )
            self._changed.notify_all()
        if on_acknowledged is not None:
            on_acknowledged(metadata.partition, metadata.offset)

    def _on_failure(self, size: int, error: BaseException) -> None:
        with self._changed:
            self._waiting_bytes -= size
            self._error = self._error or self._translated(error)
            self._changed.notify_all()

    def _translated(self, error: BaseException) -> AnabranchError:
        if isinstance(error, _TOO_LARGE):
            return SettingsError(f"an event is larger than {self._topic} takes: {_brief(error)}")
        return BrokerError(
            f"{self._settings.bootstrap_servers} did not take an event for {self._topic}: {_brief(error)}"
        )

    def _unanswered(self, seconds: float) -> str:
        return f"{self._settings.bootstrap_servers} has not acknowledged the events sent to it for {seconds:.0f} s"


def partition_counts(settings: StreamSettings, topics: Iterable[str], patience: timedelta = PATIENCE) -> dict[str, int]:
    """Return the number of partitions of each of the topics that exist; raises BrokerError."""
    with connect(KafkaAdminClient, settings, patience) as admin:
        try:
            found = admin.describe_topics(list(topics))
        except kafka_errors.KafkaError as exc:
            why = reason(exc, admin, settings)
            raise BrokerError(f"cannot look up topics at {settings.bootstrap_servers}: {why}") from exc
    return {topic["name"]: len(topic["partitions"]) for topic in found if topic["error_code"] != _UNKNOWN_TOPIC}


def create_topics(settings: StreamSettings, partitions: Mapping[str, int]) -> list[str]:
    """Create the topics that do not exist, with their number of partitions, and return their names.

    Raises:
        BrokerError: the broker cannot be reached, or refuses.
    """
    there = partition_counts(settings, partitions)
    missing = {name: {"num_partitions": count} for name, count in partitions.items() if name not in there}
    if not missing:
        return []
    with connect(KafkaAdminClient, settings) as admin:
        try:
            # Another process may be creating the same topics.
            with contextlib.suppress(kafka_errors.TopicAlreadyExistsError):
                admin.create_topics(missing)
            admin.wait_for_topics(list(missing))
        except kafka_errors.KafkaError as exc:
            raise BrokerError(f"cannot create {', '.join(missing)}: {reason(exc, admin, settings)}") from exc
    return list(missing)


def delete_topics(settings: StreamSettings, topics: Iterable[str]) -> None:
    """Delete topics; raises BrokerError."""
    with connect(KafkaAdminClient, settings) as admin:
        try:
            admin.delete_topics(list(topics))
        except kafka_errors.KafkaError as exc:
            raise BrokerError(f"cannot delete {', '.join(topics)}: {reason(exc, admin, settings)}") from exc


def _brief(error: BaseException) -> str:
    return str(error) or type(error).__name__
