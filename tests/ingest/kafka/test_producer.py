"""Events into a topic: acknowledged, in turn over its partitions, bounded, and with errors that name the way out."""

import threading
from datetime import timedelta

import pytest

from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import BrokerError
from anabranch.ingest.kafka.producer import EventProducer, create_topics, delete_topics, partition_counts
from anabranch.ingest.settings.stream import StreamSettings
from tests.faults.proxy import Fault, Proxy
from tests.support.waiting import PATIENCE_SECONDS


@pytest.fixture
def settings(kafka):
    return StreamSettings(bootstrap_servers=kafka.bootstrap, topics=("events",))


@pytest.fixture
def producer(settings, make_topic):
    producer = EventProducer(settings, make_topic(2))
    producer.open()
    yield producer
    producer.close()


def test_events_go_to_the_partitions_in_turn_and_flush_waits_for_all(producer, kafka, consume_all):
    for number in range(101):
        producer.send(b"%d" % number)
    producer.flush()
    assert producer.acknowledged == 101
    assert list(producer.last_offsets.values()) == [50, 49]
    records = consume_all(kafka.bootstrap, next(iter(producer.last_offsets)).rpartition(":")[0], 101)
    assert [int(record.value) for record in records if record.partition == 0] == list(range(0, 101, 2))


def test_headers_go_along_and_a_partition_that_exists_is_taken(producer, kafka, consume_all):
    producer.send(b"a", key=b"k", headers=[("x", b"1"), ("x", b"2")], partition=1)
    producer.send(b"b", key=b"k", partition=0)
    producer.send(b"c", partition=9)
    producer.flush()
    records = consume_all(kafka.bootstrap, producer._topic, 3)
    assert {record.value: record.partition for record in records if record.value != b"c"} == {b"a": 1, b"b": 0}
    assert [list(record.headers) for record in records if record.value == b"a"] == [[("x", b"1"), ("x", b"2")]]


def test_an_acknowledgement_has_partition_and_offset(producer):
    acknowledged, both = [], threading.Event()

    def on_acknowledged(partition, offset):
        acknowledged.append((partition, offset))
        if len(acknowledged) == 2:
            both.set()

    producer.send(b"a", on_acknowledged)
    producer.send(b"b", on_acknowledged)
    assert both.wait(PATIENCE_SECONDS)
    assert sorted(acknowledged) == [(0, 0), (1, 0)]


def test_more_than_may_wait_is_sent_without_growing(producer, monkeypatch):
    monkeypatch.setattr("anabranch.ingest.kafka.producer._WAITING_BYTES", 1_000)
    for _ in range(500):
        producer.send(b"x" * 400)
        assert producer._waiting_bytes <= 1_400
    producer.flush()
    assert producer.acknowledged == 500


def test_an_event_that_is_too_large_is_bad_input(producer):
    with pytest.raises(SettingsError, match="an event is larger than"):
        producer.send(b"x" * 3_000_000)


def test_a_missing_topic_is_named_with_the_way_out(settings):
    with pytest.raises(BrokerError, match=r'topic "none" does not exist on 127\.0\.0\.1:\d+; --create-topic makes it'):
        EventProducer(settings, "none").open()


def test_a_producer_that_was_never_opened_can_be_closed(settings):
    EventProducer(settings, "none").close()


def test_topics_are_made_once_and_removed(settings, make_topic):
    there = make_topic(1)
    made = f"{there}-made"
    assert create_topics(settings, {there: 5, made: 3}) == [made]
    assert create_topics(settings, {there: 5, made: 3}) == []
    assert partition_counts(settings, [there, made, f"{there}-none"]) == {there: 1, made: 3}
    delete_topics(settings, [made])
    assert made not in partition_counts(settings, [made])


@pytest.mark.slow
def test_a_broker_that_is_away_is_one_sentence(free_port):
    settings = StreamSettings(bootstrap_servers=f"127.0.0.1:{free_port()}", topics=("events",))
    with pytest.raises(BrokerError, match="no Kafka broker can be reached"):
        partition_counts(settings, ["events"], timedelta(seconds=0.5))


def test_it_is_closed_also_when_the_broker_hangs_and_waits_no_longer_than_its_time(kafka, make_topic):
    topic = make_topic()
    with Proxy(kafka.bootstrap) as proxy:
        settings = StreamSettings(bootstrap_servers=proxy.address, topics=(topic,))
        producer = EventProducer(settings, topic, patience=timedelta(minutes=10))
        producer.open()
        answered = threading.Event()
        producer.send(b"x", lambda *_: answered.set())  # the client has the topic's metadata from then on
        assert answered.wait(PATIENCE_SECONDS)
        proxy.suffer(Fault(stalled=True))
        producer.send(b"x")
        with pytest.raises(BrokerError, match="has not acknowledged the events sent to it for 1 s"):
            producer.flush(timedelta(seconds=1))
        producer.close()
        assert producer.acknowledged == 1
