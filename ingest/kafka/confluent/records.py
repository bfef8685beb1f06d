"""Headers of records, and the end of a batch that cannot be read."""

import time
from collections.abc import Sequence
from operator import methodcaller
from typing import Any

from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as KafkaPartition

from anabranch.ingest.errors import BrokerError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.confluent.connection import raise_if_fatal
from anabranch.ingest.kafka.diagnostics import BAD_HEADER

UNREADABLE = (KafkaError._BAD_COMPRESSION, KafkaError._BAD_MSG)
REMOVED = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
_SEARCH_SECONDS = 15.0
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


def batch_end(consumer: Any, partition: TopicPartition, begin: int, base: int, log_end: int) -> int:
    """Return the first offset after the batch at `base`, which librdkafka does not report.

    A broker returns the whole batch for any of its offsets: the end is found by a galloping, then a binary search.
    After some seconds the search ends with an offset that is known to be in the batch.
    """
    deadline = time.monotonic() + _SEARCH_SECONDS
    inside, beyond = begin, log_end
    step = 1
    while beyond - inside > 1 and time.monotonic() < deadline:
        middle = (inside + beyond) // 2
        asked = min(inside + step, middle) if step else middle
        if _is_of(consumer, partition, asked, base):
            inside, step = asked, 2 * step
        else:
            beyond, step = asked, 0
    return inside + 1


def _is_of(consumer: Any, partition: TopicPartition, offset: int, base: int) -> bool:
    """Whether an offset is in the unreadable batch at `base`; raises BrokerError when no broker answers in time."""
    asked = KafkaPartition(partition.topic, partition.partition, offset)
    consumer.assign([asked])
    deadline, answer = time.monotonic() + _SEARCH_SECONDS, "no answer"
    while (left := deadline - time.monotonic()) > 0:
        for message in consumer.consume(1, left):
            error = message.error()
            if error is None or error.code() == KafkaError._PARTITION_EOF:
                return False
            if error.code() in UNREADABLE:
                return bool(message.offset() == base)
            answer = error.str()
            if error.code() in REMOVED and message.offset() != offset:
                consumer.assign([asked])  # parsing on behind a damaged batch, librdkafka asked for an offset at random
            elif error.code() in REMOVED:
                deadline = 0.0
            else:
                raise_if_fatal(error)
    name = f"{partition.topic}[{partition.partition}]@{base}"
    raise BrokerError(f"cannot read {name}, nor find where it ends: {answer}")
