"""What only Apache Kafka itself does: SCRAM, TLS, and what transactions leave in the offsets."""

import contextlib
import json
from datetime import timedelta

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka import KafkaProducer

from anabranch.ingest.errors import CredentialsError
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.slow
SCHEMA = SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}})
GOOD = json.dumps({"x": 1.0, "y": 1}).encode()
Messages = list[tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]]
"""Key, value and headers of each."""


def read(stream, until):
    """Return the offsets of the events up to an offset, and how many offsets were none."""
    source = BlockReader(StreamSettings.model_validate(stream).resolved("test"), SCHEMA, HoldOut(fraction=0, seed=0))
    seen: list[int] = []
    end = 0
    with contextlib.closing(source):
        source.open(timeout=timedelta(seconds=120))
        for _ in range(300):
            block = source.poll(timedelta(seconds=0.5))
            if block is not None:
                seen += block.columns["offset"].tolist()
                end = max([end, *(cover.end for cover in block.coverage)])
                source.release(block)
            if end >= until:
                break
    return seen, end - len(seen)


@pytest.mark.parametrize("client", ["confluent", "kafka-python"])
@pytest.mark.parametrize(
    ("level", "offsets", "gaps"),
    [("read_committed", [0, 1, 6, 7], 5), ("read_uncommitted", [0, 1, 3, 4, 6, 7], 3)],
)
def test_aborted_records_are_gaps_or_events_as_the_isolation_level_says(
    kafka, make_topic, client, level, offsets, gaps
):
    if kafka.kind == "embedded":
        pytest.skip("the embedded broker has no transactions")
    topic = make_topic()
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": topic})
    producer.init_transactions(60)
    for commits in (True, False, True):
        producer.begin_transaction()
        for _ in range(2):
            producer.produce(topic, GOOD)
        producer.flush()
        producer.commit_transaction(60) if commits else producer.abort_transaction(60)
    stream = {"bootstrap_servers": kafka.bootstrap, "topics": [topic], "client": client, "isolation_level": level}
    assert read(stream, 9) == (offsets, gaps)


def _by_kafka_python(bootstrap, topic, messages):
    producer = KafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, acks="all")
    with contextlib.closing(producer):
        sent = [
            producer.send(topic, value, b"" if key is value is None else key, headers)  # it refuses a record of nothing
            for key, value, headers in messages
        ]
        for future in sent:
            future.get(PATIENCE_SECONDS)


def _by_confluent(bootstrap, topic, messages):
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "message.max.bytes": 1_048_588})
    for key, value, headers in messages:
        producer.produce(topic, value, key, headers=headers)
    assert producer.flush(60) == 0


@pytest.mark.parametrize("client", ["confluent", "kafka-python"])
@pytest.mark.parametrize("send", [_by_kafka_python, _by_confluent], ids=["of kafka-python", "of confluent"])
def test_all_that_an_idempotent_producer_writes_comes_once_and_what_has_no_value_is_a_dead_letter(
    kafka, make_topic, consume_all, client, send
):
    """With keys and without, empty ones, with headers, some of one name, and one as large as Kafka takes."""
    topic, traced = make_topic(), [("trace", b"1"), ("trace", b"2"), ("empty", b"")]
    largest = GOOD + b" " * (1_000_000 - len(GOOD))
    messages: Messages = [
        *[(None, GOOD, []), (b"", GOOD, []), (b"k", GOOD, traced), (b"k", None, traced), (None, None, [])],
        *[(None, largest, traced), (b"k", largest, [])],
        *[(b"%d" % number, GOOD, []) for number in range(93)],
    ]
    send(kafka.bootstrap, topic, messages)
    stream = {"bootstrap_servers": kafka.bootstrap, "topics": [topic], "client": client}
    offsets, none = read(stream, 100)
    assert (offsets, none) == (list(range(100)), 0)
    letters = consume_all(kafka.bootstrap, f"{topic}.dead", 2)
    assert [letter.value for letter in letters] == [None, None]
    assert [letter.key for letter in letters] == [b"k", b""], "a record with neither key nor value is refused"
    assert [header for header in letters[0].headers if not header[0].startswith("anabranch")] == traced
    sources = [dict(letter.headers)["anabranch-source"].decode() for letter in letters]
    assert sources == [f"{topic}[0]@3", f"{topic}[0]@4"]


@pytest.mark.parametrize("client", ["confluent", "kafka-python"])
def test_events_come_over_scram_and_tls_and_a_wrong_password_is_named(guarded_kafka, create_topic, produce, client):
    create_topic(guarded_kafka.plain, "events")
    create_topic(guarded_kafka.plain, "events.dead")
    produce(guarded_kafka.plain, "events", [GOOD] * 3)
    admin = AdminClient({"bootstrap.servers": guarded_kafka.plain})
    mechanisms = {"SCRAM-SHA-256": ScramMechanism.SCRAM_SHA_256, "SCRAM-SHA-512": ScramMechanism.SCRAM_SHA_512}
    for mechanism in mechanisms.values():
        added = UserScramCredentialUpsertion("alice", ScramCredentialInfo(mechanism, 4096), b"secret")
        admin.alter_user_scram_credentials([added])["alice"].result(PATIENCE_SECONDS)
    named = {"topics": ["events"], "client": client}
    for mechanism in mechanisms:
        login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": mechanism, "sasl.username": "alice"}
        stream = {**named, "bootstrap_servers": guarded_kafka.scram, "properties": {**login, "sasl.password": "secret"}}
        assert read(stream, 3) == ([0, 1, 2], 0)
        wrong = {**stream, "properties": {**login, "sasl.password": "guessed"}}
        with pytest.raises(CredentialsError):
            read(wrong, 3)
    secured = {"security.protocol": "SSL", "ssl.ca.location": str(guarded_kafka.certificate)}
    assert read({**named, "bootstrap_servers": guarded_kafka.tls, "properties": secured}, 3) == ([0, 1, 2], 0)
