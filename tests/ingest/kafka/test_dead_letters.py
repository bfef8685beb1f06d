"""What each client makes of letters that a broker refuses for their own sake, and of a broker that is away."""

from datetime import timedelta

import pytest
from confluent_kafka import KafkaError
from kafka import errors

from anabranch.ingest.kafka.confluent.client import ConfluentDeadLetters
from anabranch.ingest.kafka.dead_letters import DeadLetter, sanitize, shrink
from anabranch.ingest.kafka.kafka_python.client import KafkaPythonClient
from anabranch.ingest.kafka.registry import CLIENTS
from anabranch.ingest.settings.stream import StreamSettings

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
