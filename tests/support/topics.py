"""Topics for tests, and messages in them."""

import contextlib
import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic
from kafka.errors import KafkaError

from tests.support.waiting import Patience


class TopicFactory:
    """Creates topics with names that no other test uses."""

    def __init__(self, bootstrap, prefix):
        self._bootstrap, self._prefix = bootstrap, prefix

    def __call__(self, partitions=1):
        """Create a topic and its `.dead`, and return its name."""
        topic = f"{self._prefix}-{uuid.uuid4().hex[:12]}"
        _create_topic(self._bootstrap, topic, partitions)
        _create_topic(self._bootstrap, f"{topic}.dead")
        return topic


class Producer:
    """Writes messages."""

    def __call__(self, bootstrap, topic, values, *, partition=0, key=None, headers=(), timestamp_ms=None):
        """Write messages, and return their offsets once they are acknowledged.

        A value that is neither bytes nor None is sent as JSON. With `partition=None` the client distributes them.
        `timestamp_ms` is that of all messages, or has one for each.
        """

        def encoded(value):
            return value if value is None or isinstance(value, bytes) else json.dumps(value).encode()

        with contextlib.closing(KafkaProducer(bootstrap_servers=bootstrap, linger_ms=5)) as producer:
            times = timestamp_ms if isinstance(timestamp_ms, Sequence) else [timestamp_ms] * len(values)
            sent = [
                producer.send(topic, encoded(value), key, list(headers), partition, time_ms)
                for value, time_ms in zip(values, times, strict=True)
            ]
            return [future.get(30).offset for future in sent]


class TopicReader:
    """Reads whole topics."""

    def __call__(self, bootstrap, topic, at_least=0, patience=20.0, isolation_level="read_uncommitted"):
        """Return kafka-python's records of a topic in the order of (partition, offset).

        Returns as soon as there are `at_least` records and the end of every partition is reached; fails after
        `patience` seconds of an idle machine.
        """
        records: list[Any] = []
        deadline = Patience(patience)
        consumer = KafkaConsumer(
            bootstrap_servers=bootstrap, auto_offset_reset="earliest", isolation_level=isolation_level
        )
        with contextlib.closing(consumer):
            partitions = [TopicPartition(topic, n) for n in sorted(consumer.partitions_for_topic(topic) or ())]
            assert partitions, f"there is no topic {topic} on {bootstrap}"
            consumer.assign(partitions)
            while True:
                for batch in consumer.poll(timeout_ms=100).values():
                    records += batch
                ends = consumer.end_offsets(partitions)
                if len(records) >= at_least and all(consumer.position(part) >= ends[part] for part in partitions):
                    return sorted(records, key=lambda record: (record.partition, record.offset))
                missing = f"{topic} has {len(records)} records after {patience} s, not {at_least}"
                deadline.check(missing)


@pytest.fixture
def create_topic():
    """Creates a topic, and returns once clients can see it: `create_topic(bootstrap, topic, partitions=1)`."""
    return _create_topic


@pytest.fixture
def recreate_topic():
    """Deletes a topic, and creates an empty one of that name: `recreate_topic(bootstrap, topic, partitions=1)`."""
    return _recreate_topic


@pytest.fixture
def make_topic(kafka, request):
    """Creates a topic that no other test uses, and its `.dead`: `make_topic(partitions=1) -> name`."""
    return TopicFactory(kafka.bootstrap, re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[:60].strip("-"))


@pytest.fixture
def produce():
    """Writes messages and returns their offsets: see `Producer.__call__`."""
    return Producer()


@pytest.fixture
def consume_all():
    """Reads a whole topic: `consume_all(bootstrap, topic, at_least=0, patience=20.0) -> records`."""
    return TopicReader()


def _create_topic(bootstrap, topic, partitions=1):
    with contextlib.closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        admin.create_topics([NewTopic(topic, partitions, 1)], wait_for_metadata=True)


def _recreate_topic(bootstrap, topic, partitions=1):
    with contextlib.closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        admin.delete_topics([topic])
    deadline = Patience()
    while True:
        try:
            return _create_topic(bootstrap, topic, partitions)
        except KafkaError:
            if _is_empty(bootstrap, topic):  # the embedded broker creates a topic when a client asks for it
                return None
            deadline.check()


def _is_empty(bootstrap, topic):
    first = TopicPartition(topic, 0)
    with contextlib.suppress(KafkaError), contextlib.closing(KafkaConsumer(bootstrap_servers=bootstrap)) as consumer:
        return bool(consumer.end_offsets([first])[first] == 0)
    return False
