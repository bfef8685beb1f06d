"""Reads topics and changes nothing: creates no topic, joins no group, commits no offset."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer
from kafka import TopicPartition as KafkaPartition
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType

from anabranch.ingest.errors import BrokerError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.kafka.kafka_python.connection import brief, connect, reason, undecodable
from anabranch.ingest.settings.stream import StreamSettings

_DENIED = kafka_errors.TopicAuthorizationFailedError.errno
_STEPS_BACK = (1, 100, 10_000)
"""How far before the end to search for the newest record: markers and compaction leave offsets without one."""
_OF_TRANSACTIONS = {22, 24, 25, 26, 28}
"""Numbers of the requests InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, EndTxn and TxnOffsetCommit."""
_PATIENCE_SECONDS = 2.0
"""How long to wait for more records: to ask for a position instead costs milliseconds for each partition."""
_POLL_MS = 100


@dataclass(frozen=True)
class Topic:
    """The broker's description of a topic."""

    partitions: int
    rights: frozenset[str] | None
    """Operations that are allowed to this user, for example READ and WRITE; None if unknown."""
    retention: timedelta | None
    """None if unlimited or unknown."""


class Inspector:
    """Describes topics. Used by one thread, as a context manager."""

    def __init__(self, settings: StreamSettings, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        """Take how long to wait for more records of a topic."""
        self._settings = settings
        self._patience_seconds = patience_seconds
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Inspector":
        """Connect; raises BrokerError with the reason."""
        self._admin: Any = connect(KafkaAdminClient, self._settings)
        self._stack.callback(self._admin.close)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def topic(self, name: str) -> Topic | None:
        """Return the description of a topic; None if this user can see no such topic. Raises BrokerError."""
        try:
            (found,) = self._admin.describe_topics([name])
            if found["error_code"] == _DENIED:
                return Topic(0, frozenset(), None)
            if found["error_code"] or not found["partitions"]:
                return None
            rights = found["authorized_operations"]
            return Topic(len(found["partitions"]), None if rights is None else frozenset(rights), self._retention(name))
        except kafka_errors.KafkaError as exc:
            why = reason(exc, self._admin, self._settings)
            raise BrokerError(f'cannot look up the topic "{name}": {why}') from exc

    def has_transactions(self) -> bool:
        """Return whether the broker answers the requests that transactions need. Raises BrokerError."""
        try:
            return {int(key) for key in self._admin.api_versions()} >= _OF_TRANSACTIONS
        except kafka_errors.KafkaError as exc:
            raise BrokerError(f"cannot ask the broker what it can do: {brief(exc)}") from exc

    def newest(self, name: str, partitions: int) -> Messages | None:
        """Return the newest message of a topic, alone; None when no partition has any. Raises BrokerError."""
        self._connect_consumer()
        with self._errors_of(name):
            records = self._last_of_each([KafkaPartition(name, number) for number in range(partitions)])
        if not records:
            return None
        return _messages(name, [max(records, key=lambda record: (record.timestamp, record.offset))])

    def tail(self, name: str, partitions: int, limit: int) -> list[Messages]:
        """Return about the `limit` newest messages of a topic, those of each partition together. Raises BrokerError."""
        self._connect_consumer()
        with self._errors_of(name):
            parts = [KafkaPartition(name, number) for number in range(partitions)]
            begins, ends = self._consumer.beginning_offsets(parts), self._consumer.end_offsets(parts)
            starts = {tp: max(begins[tp], ends[tp] - -(-limit // partitions)) for tp in parts if ends[tp] > begins[tp]}
            return [_messages(name, records) for records in self._read(starts, ends).values()]

    @contextlib.contextmanager
    def _errors_of(self, name: str) -> Iterator[None]:
        """Translate the errors of reading a topic."""
        try:
            yield
        except kafka_errors.UnsupportedCodecError as exc:
            raise undecodable(exc) from exc
        except kafka_errors.KafkaError as exc:
            why = reason(exc, self._consumer, self._settings)
            raise BrokerError(f'cannot read the topic "{name}": {why}') from exc

    def _connect_consumer(self) -> None:
        if not hasattr(self, "_consumer"):
            self._consumer: Any = connect(
                KafkaConsumer,
                self._settings,
                group_id=None,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                isolation_level=self._settings.isolation_level,
                allow_auto_create_topics=False,
            )
            self._stack.callback(self._consumer.close, autocommit=False)

    def _last_of_each(self, partitions: Sequence[Any]) -> list[Any]:
        """Return the last record of each partition that has one within the last 10,000 offsets."""
        begins, ends = self._consumer.beginning_offsets(partitions), self._consumer.end_offsets(partitions)
        left = [tp for tp in partitions if ends[tp] > begins[tp]]
        found: dict[Any, Any] = {}
        for back in _STEPS_BACK:
            found |= self._last_from({tp: max(begins[tp], ends[tp] - back) for tp in left}, ends)
            left = [tp for tp in left if tp not in found and ends[tp] - back > begins[tp]]
        return list(found.values())

    def _last_from(self, starts: Mapping[Any, int], ends: Mapping[Any, int]) -> dict[Any, Any]:
        """Return the last record of each of these partitions."""
        return {tp: records[-1] for tp, records in self._read(starts, ends).items()}

    def _read(self, starts: Mapping[Any, int], ends: Mapping[Any, int]) -> dict[Any, list[Any]]:
        """Read all these partitions up to their ends; stop when no record comes in time."""
        self._consumer.assign(list(starts))
        for tp, offset in starts.items():
            self._consumer.seek(tp, offset)
        found: dict[Any, list[Any]] = {}
        waiting, deadline = set(starts), time.monotonic() + self._patience_seconds
        while waiting and time.monotonic() < deadline:
            for tp, records in self._consumer.poll(_POLL_MS).items():
                found[tp], deadline = found.get(tp, []) + records, time.monotonic() + self._patience_seconds
                if records[-1].offset + 1 >= ends[tp]:
                    waiting.discard(tp)
                    self._consumer.pause(tp)  # records that are written meanwhile must not prolong the search
        return found

    def _retention(self, name: str) -> timedelta | None:
        resource = ConfigResource(ConfigResourceType.TOPIC, name, {"retention.ms": None})
        try:
            found = self._admin.describe_configs([resource], config_filter="all")
            milliseconds = int(found["topic"][name]["retention.ms"]["value"])
        except (kafka_errors.KafkaError, KeyError, TypeError, ValueError):  # without the right to ask, for one
            return None
        return None if milliseconds < 0 else timedelta(milliseconds=milliseconds)


def _messages(name: str, records: Sequence[Any]) -> Messages:
    """Return records of one partition as messages."""
    return Messages(
        partition=TopicPartition(name, records[0].partition),
        offsets=[record.offset for record in records],
        times_ms=[record.timestamp for record in records],
        keys=[record.key for record in records],
        values=[record.value for record in records],
        headers=[record.headers for record in records],
        end=records[-1].offset + 1,
    )
