"""Compressed messages: what the client can undo is read, and what it lacks the package for is one sentence."""

import contextlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import Producer

from ingest.config import StreamSettings
from ingest.errors import CodecError
from ingest.events.partition import TopicPartition
from ingest.kafka.registry import CLIENTS

CODECS = ["gzip", "lz4", "snappy", "zstd"]


@pytest.fixture
def compressed(kafka: Any, make_topic: Callable[..., str]) -> Callable[[str], str]:
    """Makes a topic with ten messages that are compressed."""

    def make(codec: str) -> str:
        topic = make_topic()
        producer = Producer({"bootstrap.servers": kafka.bootstrap, "compression.type": codec, "linger.ms": 200})
        for i in range(10):
            producer.produce(topic, json.dumps({"n": i, "text": "x" * 500}).encode(), b"key")
        assert producer.flush(30) == 0
        return topic

    return make


def read(kafka: Any, topic: str, client: str) -> list[int]:
    named = {"bootstrap_servers": kafka.bootstrap, "topics": [topic], "client": client}
    settings = StreamSettings.model_validate(named).resolved("test")
    found: list[int] = []
    with contextlib.closing(CLIENTS[client](settings)) as reader:
        reader.open()
        reader.assign({TopicPartition(topic, 0): 0})
        for _ in range(300):
            for messages in reader.poll(timedelta(milliseconds=100), 100):
                found += [json.loads(value or b"")["n"] for value in messages.values]
            if len(found) >= 10:
                break
    return found


@pytest.mark.parametrize("client", sorted(CLIENTS))
@pytest.mark.parametrize("codec", CODECS)
def test_compressed_messages_are_read(kafka: Any, compressed: Callable[[str], str], codec: str, client: str) -> None:
    assert read(kafka, compressed(codec), client) == list(range(10))


@pytest.mark.parametrize("codec", ["lz4", "snappy", "zstd"])
def test_a_client_without_the_package_names_what_to_install(
    kafka: Any, compressed: Callable[[str], str], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = compressed(codec)
    monkeypatch.setattr(f"kafka.codec.has_{codec}", lambda: False)
    with pytest.raises(CodecError, match=f"compressed with {codec}, .*codecs.*confluent"):
        read(kafka, topic, "kafka-python")


def test_messages_without_a_decompressor_raise_at_each_poll_and_are_never_skipped(
    kafka: Any, compressed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = compressed("gzip")
    settings = StreamSettings.model_validate({"bootstrap_servers": kafka.bootstrap, "topics": [topic]}).resolved("test")
    monkeypatch.setattr("kafka.codec.has_gzip", lambda: False)
    with contextlib.closing(CLIENTS["kafka-python"](settings)) as reader:
        reader.open()
        reader.assign({TopicPartition(topic, 0): 0})
        with pytest.raises(CodecError):
            reader.poll(timedelta(seconds=20), 100)
        for _ in range(20):
            with pytest.raises(CodecError):
                reader.poll(timedelta(milliseconds=10), 100)
