"""Events and dead letters into a topic: acknowledged, bounded, and with errors that name the way out."""

import threading
from datetime import timedelta

import pytest
from confluent_kafka import KafkaError
from kafka import errors

from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import BrokerError
from anabranch.ingest.kafka.confluent.client import ConfluentDeadLetters
from anabranch.ingest.kafka.dead_letters import DeadLetter, sanitize, shrink
from anabranch.ingest.kafka.kafka_python.client import KafkaPythonClient
from anabranch.ingest.kafka.producer import EventProducer, create_topics, delete_topics, partition_counts
from anabranch.ingest.kafka.registry import CLIENTS
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


SOURCE = ("anabranch-source", b"events[0]@1")
ROWS = ("anabranch-rows", b"3,17")
TEN = timedelta(seconds=10)


def size(letter):
    headers = (*letter.headers, *letter.added)
    return len(letter.key or b"") + len(letter.value or b"") + sum(len(name) + len(value) for name, value in headers)


class Broker:
    """Takes letters up to a size, and keeps those that it took; away it takes none."""

    def __init__(self, most):
        self.most = most
        self.away = False
        self.taken: list[DeadLetter] = []

    def refuses(self, letter):
        return size(letter) > self.most


def kafka_python(broker, monkeypatch):
    class Sent:
        def __init__(self, letter):
            self.letter = letter

        def get(self, timeout):
            assert timeout > 0
            if broker.away:
                raise errors.KafkaTimeoutError
            if broker.refuses(self.letter):
                raise errors.MessageSizeTooLargeError
            broker.taken.append(self.letter)

    class Producer:
        def send(self, topic, key, value, headers):
            letter = DeadLetter(key, value, headers)
            if size(letter) > 100_000_000:
                raise errors.MessageSizeTooLargeError  # as the client itself does, before it asks the broker
            return Sent(letter)

    client = KafkaPythonClient(StreamSettings(topics=("events",)).resolved("test"))
    client._letters._producer = Producer()
    return client


def confluent(broker, monkeypatch):
    def delivered(producer, letters, deadline):
        found: list[KafkaError | None] = []
        for letter in letters:
            refused = KafkaError.MSG_SIZE_TOO_LARGE if broker.refuses(letter) else None
            error = KafkaError._MSG_TIMED_OUT if broker.away else refused
            if error is None:
                broker.taken.append(sanitize(letter))
            found.append(None if error is None else KafkaError(error))
        return found

    monkeypatch.setattr(ConfluentDeadLetters, "_delivered", delivered)
    return CLIENTS["confluent"](StreamSettings(topics=("events",), client="confluent").resolved("test"))


both = pytest.mark.parametrize("make", [kafka_python, confluent])


@both
def test_a_header_of_the_message_that_is_named_as_ours_goes_with_the_rest_of_it(make, monkeypatch):
    broker = Broker(1000)
    letter = DeadLetter(b"k", b"x", [("anabranch-x", b"a" * 999)], [SOURCE])
    client = make(broker, monkeypatch)
    assert client.send_dead_letters([letter], TEN) == 1
    (taken,) = broker.taken
    assert list(taken.headers) == [SOURCE, ("anabranch-truncated", b"key, value and headers")]
    assert client.letters_dropped == 0


@both
def test_the_rows_go_last(make, monkeypatch):
    broker = Broker(100)
    letter = DeadLetter(b"k", b"x", [], [SOURCE, ("anabranch-rows", b"1," * 500)])
    assert make(broker, monkeypatch).send_dead_letters([letter], TEN) == 1
    (taken,) = broker.taken
    assert list(taken.headers) == [SOURCE, ("anabranch-truncated", b"key, value, headers and rows")]


@both
def test_a_letter_that_is_refused_in_each_form_is_dropped_and_counted_and_the_others_are_sent(make, monkeypatch):
    broker = Broker(60)
    good = DeadLetter(b"k", b"x", [], [SOURCE])
    client = make(broker, monkeypatch)
    assert client.send_dead_letters([good, DeadLetter(None, b"x", [], [SOURCE, ("e", b"e" * 60)]), good], TEN) == 3
    assert [letter.value for letter in broker.taken] == [b"x", b"x"]
    assert client.letters_dropped == 1


@both
def test_no_letter_is_dropped_while_the_broker_is_away(make, monkeypatch):
    broker = Broker(60)
    letters = [DeadLetter(b"k", b"x", [], [SOURCE]), DeadLetter(None, b"x" * 99, [], [SOURCE])]
    client = make(broker, monkeypatch)
    broker.away = True
    assert client.send_dead_letters(letters, TEN) == 0
    assert client.letters_dropped == 0
    broker.away = False
    assert client.send_dead_letters(letters, TEN) == 2


def test_a_letter_that_is_too_large_for_the_producer_is_sent_without_its_value(monkeypatch):
    broker = Broker(1000)
    client = kafka_python(broker, monkeypatch)
    good = DeadLetter(b"k", b"x", [], [SOURCE])
    assert client.send_dead_letters([good, DeadLetter(b"k", bytes(100_000_001), [], [SOURCE])], TEN) == 2
    assert [letter.value for letter in broker.taken] == [b"x", None]


def test_each_form_has_less_than_the_one_before_and_the_last_has_nothing_of_the_message():
    letter = DeadLetter(b"key", b"value", [("trace", b"1")], [SOURCE, ROWS])
    forms = list(shrink(letter))
    assert [(form.key, form.value, list(form.headers)) for form in forms] == [
        (b"key", None, [("trace", b"1")]),
        (None, None, []),
        (None, None, []),
    ]
    assert [ROWS in form.added for form in forms] == [True, True, False]
