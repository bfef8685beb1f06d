"""Dead letters as they are in their topic. Joins no group and commits no offset."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaPartition
from kafka import errors as kafka_errors

from anabranch.ingest.errors import BrokerError
from anabranch.ingest.kafka.kafka_python.connection import connect
from anabranch.ingest.settings.stream import StreamSettings

_POLL_MS = 500
_EMPTY_POLLS = 20
"""Compaction and markers leave offsets without a record, so the last offset may never come."""
_FIRST_ADDED = "anabranch-error"
"""The header that begins those that ingest added, which come after the message's own."""


@dataclass(frozen=True)
class StoredLetter:
    """One dead letter.

    Attributes:
        partition: of the dead-letter topic.
        offset: in that partition.
        source: where the message came from, such as `payments[0]@4711`.
        error: why it could not be used.
        rows: the bad rows of a message that holds many; None when the whole message is bad.
        truncated: what is missing; None when nothing is.
        format: of the value, where it is a row of a file; None when it is the original message's.
        key: of the original message.
        value: of the original message.
        headers: of the original message.
    """

    partition: int
    offset: int
    source: str
    error: str
    rows: str | None
    truncated: str | None
    format: str | None
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


def read_dead_letters(settings: StreamSettings) -> Iterator[StoredLetter]:
    """Yield the dead letters that are in the topic now, by partition and offset.

    Raises:
        BrokerError: the broker cannot be reached, or has no such topic.
    """
    topic = settings.dead_letter_topic
    assert topic is not None
    consumer = connect(
        KafkaConsumer,
        settings,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        allow_auto_create_topics=False,
    )
    try:
        numbers = consumer.partitions_for_topic(topic)
        if not numbers:
            raise BrokerError(f'topic "{topic}" does not exist on {settings.bootstrap_servers}')
        # All ends first: a letter that a caller sends again may soon be a letter again.
        ends = consumer.end_offsets([KafkaPartition(topic, number) for number in sorted(numbers)])
        for partition, end in ends.items():
            yield from _read(consumer, partition, end)
    except kafka_errors.KafkaError as exc:
        raise BrokerError(f'cannot read the topic "{topic}": {exc or type(exc).__name__}') from exc
    finally:
        consumer.close(autocommit=False)


def _read(consumer: KafkaConsumer, partition: KafkaPartition, end: int) -> Iterator[StoredLetter]:
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    empty = 0
    while consumer.position(partition) < end and empty < _EMPTY_POLLS:
        records = consumer.poll(timeout_ms=_POLL_MS).get(partition, [])
        empty = 0 if records else empty + 1
        for record in records:
            if record.offset >= end:
                return
            yield _letter(record)


def _letter(record: Any) -> StoredLetter:
    headers = list(record.headers)
    own = max((i for i, (name, _) in enumerate(headers) if name == _FIRST_ADDED), default=len(headers))
    added = {name: (value or b"").decode(errors="replace") for name, value in headers[own:]}
    return StoredLetter(
        partition=record.partition,
        offset=record.offset,
        source=added.get("anabranch-source", ""),
        error=added.get(_FIRST_ADDED, ""),
        rows=added.get("anabranch-rows"),
        truncated=added.get("anabranch-truncated"),
        format=added.get("anabranch-format"),
        key=record.key,
        value=record.value,
        headers=headers[:own],
    )
