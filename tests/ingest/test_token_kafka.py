"""Apache Kafka with SASL/OAUTHBEARER: each client and command has a token, and a new one before its end."""

import contextlib
import json
import time
from datetime import timedelta

import pytest

from anabranch.ingest.errors import BrokerError, CredentialsError
from anabranch.ingest.kafka import tokens
from anabranch.ingest.kafka.confluent.best_effort import BestEffortWriter
from anabranch.ingest.kafka.confluent.read_process_write import GroupClient, Record, TransactionalWriter
from anabranch.ingest.kafka.dead_letter_reader import read_dead_letters
from anabranch.ingest.kafka.producer import EventProducer, create_topics, delete_topics
from anabranch.ingest.kafka.registry import CLIENTS
from anabranch.ingest.kafka.topic_inspector import Inspector
from anabranch.ingest.preflight.broker import check_broker
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from tests.support import issuer
from tests.support.waiting import PATIENCE, Patience, wait_until

pytestmark = pytest.mark.slow
SCHEMA = SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}})
GOOD = json.dumps({"x": 1.0, "y": 1}).encode()
BOTH = pytest.mark.parametrize("client", ["confluent", "kafka-python"])
TOKEN = "tests.support.issuer:token"


@pytest.fixture
def issued(monkeypatch):
    """What the issuer does; as ever at the beginning of each test."""
    monkeypatch.setattr(issuer, "state", {"mode": "good", "calls": 0, "seconds": 600.0})
    tokens._source.cache_clear()
    issuer.released.clear()
    yield issuer.state
    issuer.released.set()
    tokens._source.cache_clear()


@pytest.fixture
def stream(token_kafka, create_topic, request):
    """Makes settings with a token, of a topic of this test and its dead letters."""
    topic = f"events-{abs(hash(request.node.name))}"
    create_topic(token_kafka.plain, topic)
    create_topic(token_kafka.plain, f"{topic}.dead")

    def make(client="confluent", **more):
        section = {"bootstrap_servers": token_kafka.bootstrap, "topics": [topic], "client": client, "token": TOKEN}
        section["properties"] = {"security.protocol": "SASL_PLAINTEXT"}
        return StreamSettings.model_validate(section | more).resolved("test")

    return make


@contextlib.contextmanager
def opened(settings):
    """A client of the ingest process, here in this one, that reads the topic from its beginning."""

    def connected():
        client = CLIENTS[settings.client](settings)
        try:
            client.open()
            client.topic_ids()
            client.assign(client.first_offsets(client.partitions(), "earliest", None))
        except BrokerError:  # on a busy machine a token of seconds may end before it is there
            client.close()
            return None
        return client

    with contextlib.closing(wait_until(connected)) as client:
        yield client


def polled(client):
    """Return how many messages one poll brings; a broker that cannot be asked brings none."""
    with contextlib.suppress(BrokerError):
        return sum(map(len, client.poll(timedelta(seconds=0.1), 100)))
    return 0


@BOTH
def test_events_come_through_the_process_that_reads(stream, token_kafka, produce, client):
    settings = stream(client)
    produce(token_kafka.plain, settings.topics[0], [GOOD] * 3)
    source = BlockReader(settings, SCHEMA, HoldOut(fraction=0, seed=0))
    with contextlib.closing(source):
        source.open(timeout=PATIENCE)
        block = wait_until(lambda: source.poll(timedelta(seconds=0.5)))
        assert len(block.columns["offset"]) <= 3


@BOTH
def test_reading_outlives_tokens(stream, issued, token_kafka, produce, client):
    """The broker ends a connection whose token has ended."""
    issued["seconds"] = 3.0
    settings = stream(client)
    with opened(settings) as reader:
        patience, sent, got, begin = Patience(), 0, 0, time.monotonic()
        while issued["calls"] < 4 or time.monotonic() < begin + 2.5 * issued["seconds"]:
            produce(token_kafka.plain, settings.topics[0], [GOOD])
            sent += 1
            got += polled(reader)
            if client == "kafka-python":
                reader.lag()
            patience.check("the fourth token")
        while got < sent:
            got += wait_until(lambda: polled(reader))
    assert got == sent


@BOTH
@pytest.mark.parametrize("mode", ["fail", "hang"])
def test_an_issuer_that_is_away_is_named_and_reading_goes_on_after_it(
    stream, issued, token_kafka, produce, client, mode, monkeypatch
):
    monkeypatch.setattr(tokens, "_PATIENCE_SECONDS", 2.0)
    issued["seconds"] = 3.0
    settings = stream(client)
    with opened(settings) as reader:
        produce(token_kafka.plain, settings.topics[0], [GOOD])
        wait_until(lambda: polled(reader))
        issued["mode"] = mode

        def problem():
            polled(reader)
            return reader.lag().problem

        named = "fails: OSError: the issuer is away" if mode == "fail" else "has not returned a token within 2 s"
        wait_until(lambda: named in (problem() or ""), "the issuer's problem")
        produce(token_kafka.plain, settings.topics[0], [GOOD] * 2)
        issued["mode"] = "good"
        issuer.released.set()
        got = 0
        while got < 2:
            got += wait_until(lambda: polled(reader))
        wait_until(lambda: problem() is None, "the end of the problem")
    assert got == 2


@BOTH
@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("stranger", r"(refuses|hangs up: it seems that it refuses) the token of stream\.token = "),
        ("expired", r"(refuses|hangs up: it seems that it refuses) the token of stream\.token = "),
        ("fail", r"stream\.token = .* fails: OSError: the issuer is away"),
    ],
)
def test_a_start_without_a_token_that_is_taken_says_why(stream, issued, client, mode, sentence):
    issued["mode"] = mode
    refused = CLIENTS[client](stream(client))
    with contextlib.closing(refused), pytest.raises(CredentialsError, match=sentence) as caught:
        refused.open()
    assert "eyJ" not in str(caught.value)


def test_the_doctor_names_the_token(stream, issued):
    issued["mode"] = "stranger"
    (finding,) = [each for each in check_broker(stream(), SCHEMA) if each.level == "problem"]
    assert (finding.kind, "stream.token" in finding.fix) == ("broker.credentials", True)


def test_what_commands_and_serving_do_goes_by_tokens(stream, issued, consume_all, token_kafka):
    settings = stream()
    topic, other = settings.topics[0], f"{settings.topics[0]}-other"
    assert create_topics(settings, {other: 1}) == [other]
    for name in (topic, settings.dead_letter_topic):
        sender = EventProducer(settings, name)
        with contextlib.closing(sender):
            sender.open()
            sender.send(GOOD)
            sender.flush()
    with Inspector(settings) as inspector:
        assert inspector.newest(topic, 1).values == [GOOD]
        assert inspector.has_transactions()
    assert [letter.value for letter in read_dead_letters(settings)] == [GOOD]
    writer = BestEffortWriter(settings, other)
    writer.write(None, b"answer", [])
    writer.close(PATIENCE)
    assert writer.counts() == (1, 0)
    reader = GroupClient(settings, "earliest", lambda: True)
    answers = TransactionalWriter(settings, other, reader, "t")
    with contextlib.closing(reader), contextlib.closing(answers):
        answers.open()
        reader.open()
        (messages,) = wait_until(lambda: [each for each in reader.poll(timedelta(seconds=0.1), 10) if len(each)])
        answers.write([Record(None, b"second", [])], {messages.partition: messages.end}, reader.membership())
    assert [each.value for each in consume_all(token_kafka.plain, other, 2)] == [b"answer", b"second"]
    delete_topics(settings, [other])


def test_what_is_logged_without_a_token_is_dropped_and_counted_until_there_is_one(
    stream, issued, token_kafka, monkeypatch
):
    monkeypatch.setattr("anabranch.ingest.kafka.confluent.best_effort._RETRY_SECONDS", 0.0)
    settings = stream()
    issued["mode"] = "fail"
    writer = BestEffortWriter(settings, settings.topics[0])
    writer.write(None, b"lost", [])
    assert writer.counts() == (0, 1)
    assert "the issuer is away" in writer.problem
    issued["mode"] = "good"

    def is_written():
        writer.write(None, GOOD, [])
        return writer.counts()[0]

    wait_until(is_written)
    writer.close(PATIENCE)
