"""Records that a client cannot read, or not without a bound: each has its outcome, and those around it come."""

import contextlib
import json
import math
from datetime import timedelta
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, Message
from kafka import KafkaProducer

from anabranch.ingest.errors import BrokerError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.kafka.confluent.client import ConfluentClient
from anabranch.ingest.kafka.registry import CLIENTS
from anabranch.ingest.settings.stream import StreamSettings
from tests.faults.proxy import Proxy
from tests.support.waiting import PATIENCE_SECONDS, Patience

GOOD = json.dumps({"x": [1, 2, 3], "y": 1}).encode()
SMALL = {"fetch.max.bytes": 1_000_000, "receive.message.max.bytes": 1_001_000}
"""Bounds by which 20 MB are too much: 8 MB are for kafka-python, for librdkafka 1 MB where the codec is zstd."""
EACH = sorted(CLIENTS)


class NotUtf8(str):
    """The name of a header that is sent as bytes which are not UTF-8."""

    __slots__ = ()

    def encode(self, *_):
        return b"bad\xff"


@contextlib.contextmanager
def producing(kafka, **options):
    options = {"bootstrap_servers": kafka.bootstrap, "acks": "all", "enable_idempotence": False, **options}
    with contextlib.closing(KafkaProducer(**options)) as producer:
        yield producer
        producer.flush(60)


def one_batch(kafka, topic, codec, values):
    sizes = {"max_request_size": 200_000_000, "batch_size": 200_000_000}
    with producing(kafka, compression_type=codec, linger_ms=5_000, **sizes) as producer:
        sent = [producer.send(topic, value) for value in values]
        producer.flush(60)
        assert [future.get(PATIENCE_SECONDS).offset for future in sent][-1] >= len(values) - 1


@contextlib.contextmanager
def reading(bootstrap, topic, client, begin=0, **stream):
    named = {"bootstrap_servers": bootstrap, "topics": [topic], "client": client, **stream}
    with contextlib.closing(CLIENTS[client](StreamSettings.model_validate(named).resolved("test"))) as reader:
        reader.open()
        reader.assign({TopicPartition(topic, 0): begin})
        yield reader


def read(reader, end, limit=1000):
    """Return offset, value and fault of each message up to an offset."""
    found: list[tuple[int, bytes | None, str | None]] = []
    deadline, polled = Patience(), Messages(TopicPartition("", 0), [], [], [], [], [], 0)
    while polled.end < end:
        deadline.check(f"stalled after {found[-1:]}")
        for polled in reader.poll(timedelta(milliseconds=100), limit):
            values = zip(polled.offsets, polled.values, strict=True)
            found += [(offset, value, polled.faults.get(index)) for index, (offset, value) in enumerate(values)]
    return found


@pytest.mark.parametrize("client", EACH)
def test_a_header_whose_name_is_not_utf8_is_a_fault_of_its_message_alone(kafka, make_topic, client):
    topic, total, bad = make_topic(), 60, {1, 3, 40, 59}  # so many that the interpreter takes its short ways
    with producing(kafka) as producer:
        for number in range(total):
            names = [("trace", b"1"), (NotUtf8(), b"2")] if number in bad else [("trace", b"1")]
            producer.send(topic, GOOD, headers=names)
    with reading(kafka.bootstrap, topic, client) as reader:
        found = read(reader, total)
    assert [(offset, value) for offset, value, _ in found] == [(offset, GOOD) for offset in range(total)]
    assert {offset for offset, _, fault in found if fault and fault.startswith("header")} == bad


@pytest.mark.parametrize("client", EACH)
@pytest.mark.parametrize("codec", ["gzip", "lz4", "snappy", "zstd"])
def test_a_batch_that_is_too_large_once_decompressed_is_skipped_for_that_reason(kafka, make_topic, client, codec):
    topic = make_topic()
    one_batch(kafka, topic, "gzip", [GOOD] * 2)
    one_batch(kafka, topic, codec, [bytes(20_000_000)])
    one_batch(kafka, topic, codec, [GOOD] * 2)
    with reading(kafka.bootstrap, topic, client, properties=SMALL) as reader:
        found = read(reader, 5)
    assert [(offset, value) for offset, value, _ in found] == [(0, GOOD), (1, GOOD), (2, None), (3, GOOD), (4, GOOD)]
    assert [fault[:9] if fault else None for *_, fault in found] == [None, None, "too-large", None, None]


@pytest.mark.parametrize("client", EACH)
@pytest.mark.parametrize("begin", [0, 9])
def test_of_a_batch_that_is_too_large_each_offset_has_its_fault_wherever_the_reading_begins(
    kafka, make_topic, client, begin
):
    topic = make_topic()
    one_batch(kafka, topic, "gzip", [GOOD] * 2)
    one_batch(kafka, topic, "zstd", [bytes(900_000)] * 21)
    one_batch(kafka, topic, "zstd", [GOOD])
    with reading(kafka.bootstrap, topic, client, begin, properties=SMALL) as reader:
        found = read(reader, 24, limit=8)
    assert [offset for offset, *_ in found] == list(range(begin, 24))
    assert {offset for offset, _, fault in found if fault and fault.startswith("too-large")} == set(
        range(max(begin, 2), 23)
    )


class Damaging(Proxy):
    """Damages all values that contain `damage me` on their way to the client, while `damages` is set."""

    damages = True

    def _spoiled(self, chunk):
        return chunk.replace(b"damage me", b"damaged!!") if self.damages else chunk


class TestAWrongChecksum:
    """The network may have caused it: the batch is fetched again, and skipped only if it stays damaged."""

    @pytest.fixture
    def topic(self, kafka, make_topic):
        """One with three batches of three messages, of which that in the middle is damaged."""
        topic: str = make_topic()
        for value in (GOOD, b"damage me", GOOD):
            with producing(kafka, linger_ms=5_000) as producer:
                for _ in range(3):
                    producer.send(topic, value)
        return topic

    @pytest.mark.parametrize("client", EACH)
    def test_that_stays_is_passed_over_offset_by_offset(self, kafka, topic, client, monkeypatch):
        monkeypatch.setattr("anabranch.ingest.kafka.unreadable.CORRUPT_SECONDS", 0.0)
        with Damaging(kafka.bootstrap) as proxy, reading(proxy.address, topic, client) as reader:
            found = read(reader, 9)
        assert [offset for offset, *_ in found] == list(range(9))
        assert {offset for offset, _, fault in found if fault and fault.startswith("corrupt")} == {3, 4, 5}

    def test_that_sends_librdkafka_to_an_offset_that_never_was_removes_none(self, kafka, topic, monkeypatch):
        """It parses on behind such a batch, and may ask for the offset that it takes the bytes there for."""
        astray = self._astray(topic)
        with reading(kafka.bootstrap, topic, "confluent") as reader:
            assert isinstance(reader, ConfluentClient)
            read(reader, 3, limit=3)
            with monkeypatch.context() as patched:
                patched.setattr(reader, "_consumer", Mock(wraps=reader._consumer, consume=lambda *_: [astray]))
                assert reader.poll(timedelta(milliseconds=100), 3) == []
            found = read(reader, 9)
        assert [offset for offset, *_ in found] == list(range(3, 9))

    def test_that_sends_librdkafka_to_such_an_offset_while_its_end_is_searched_is_passed_over(
        self, kafka, topic, monkeypatch
    ):
        monkeypatch.setattr("anabranch.ingest.kafka.unreadable.CORRUPT_SECONDS", 0.0)
        astray = [self._astray(topic)] * 2
        with Damaging(kafka.bootstrap) as proxy, reading(proxy.address, topic, "confluent") as reader:
            assert isinstance(reader, ConfluentClient)
            consumer = reader._consumer

            def consume(limit, seconds):
                return [astray.pop()] if limit == 1 and astray else consumer.consume(limit, seconds)

            monkeypatch.setattr(reader, "_consumer", Mock(wraps=consumer, consume=consume))
            found = read(reader, 9)
        assert not astray
        assert [offset for offset, _, fault in found if fault and fault.startswith("corrupt")] == [3, 4, 5]
        assert [offset for offset, _, fault in found if fault is None] == [0, 1, 2, 6, 7, 8]

    def _astray(self, topic):
        reason = KafkaError(KafkaError._AUTO_OFFSET_RESET, "requested offset not available")
        return Message(topic=topic, partition=0, offset=33_554_434, error=reason)

    @pytest.mark.parametrize("client", EACH)
    def test_that_goes_away_loses_nothing(self, kafka, topic, client, monkeypatch):
        monkeypatch.setattr("anabranch.ingest.kafka.unreadable.CORRUPT_SECONDS", math.inf)
        with Damaging(kafka.bootstrap) as proxy, reading(proxy.address, topic, client) as reader:
            found = read(reader, 3)
            for _ in range(2):
                with pytest.raises(BrokerError):
                    read(reader, 9)
            proxy.damages = False
            with contextlib.suppress(BrokerError):  # a reply that was damaged before may still be on its way
                found += read(reader, 9)
            if len(found) == 3:
                found += read(reader, 9)
        assert [(offset, fault) for offset, _, fault in found] == [(offset, None) for offset in range(9)]
        assert [value for _, value, _ in found[3:6]] == [b"damage me"] * 3
