"""What only Apache Kafka itself does: SCRAM, TLS, and what transactions leave in the offsets."""

import contextlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.errors import CredentialsError
from ingest.source import Source

pytestmark = pytest.mark.slow
SCHEMA = SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}})
GOOD = json.dumps({"x": 1.0, "y": 1}).encode()


def read(stream: dict[str, Any], until: int) -> tuple[list[int], int]:
    """Return the offsets of the events up to an offset, and how many offsets were none."""
    source = Source(StreamSettings.model_validate(stream).resolved("test"), SCHEMA, HoldOut(fraction=0, seed=0))
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
    kafka: Any, make_topic: Callable[..., str], client: str, level: str, offsets: list[int], gaps: int
) -> None:
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


@pytest.mark.parametrize("client", ["confluent", "kafka-python"])
def test_events_come_over_scram_and_tls_and_a_wrong_password_is_said(
    guarded_kafka: Any, create_topic: Callable[..., None], produce: Callable[..., list[int]], client: str
) -> None:
    create_topic(guarded_kafka.plain, "events")
    create_topic(guarded_kafka.plain, "events.dead")
    produce(guarded_kafka.plain, "events", [GOOD] * 3)
    admin = AdminClient({"bootstrap.servers": guarded_kafka.plain})
    mechanisms = {"SCRAM-SHA-256": ScramMechanism.SCRAM_SHA_256, "SCRAM-SHA-512": ScramMechanism.SCRAM_SHA_512}
    for mechanism in mechanisms.values():
        added = UserScramCredentialUpsertion("alice", ScramCredentialInfo(mechanism, 4096), b"secret")
        admin.alter_user_scram_credentials([added])["alice"].result(60)
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
