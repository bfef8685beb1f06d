"""Compressed messages: what the client can undo is read, and what it lacks the package for is one sentence."""

import contextlib
import json
from datetime import timedelta

import pytest
from confluent_kafka import Producer

from anabranch.ingest.errors import CodecError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.registry import CLIENTS
from anabranch.ingest.settings.stream import StreamSettings

CODECS = ["gzip", "lz4", "snappy", "zstd"]


@pytest.fixture
def compressed(kafka, make_topic):
    """Makes a topic with ten messages that are compressed."""

    def make(codec):
        topic = make_topic()
        producer = Producer({"bootstrap.servers": kafka.bootstrap, "compression.type": codec, "linger.ms": 200})
        for i in range(10):
            producer.produce(topic, json.dumps({"n": i, "text": "x" * 500}).encode(), b"key")
        assert producer.flush(30) == 0
        return topic

    return make


def read(kafka, topic, client):
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
def test_compressed_messages_are_read(kafka, compressed, codec, client):
    assert read(kafka, compressed(codec), client) == list(range(10))


@pytest.mark.parametrize("codec", ["lz4", "snappy", "zstd"])
def test_a_client_without_the_package_names_what_to_install(kafka, compressed, codec, monkeypatch):
    topic = compressed(codec)
    monkeypatch.setattr(f"kafka.codec.has_{codec}", lambda: False)
    with pytest.raises(CodecError, match=f"compressed with {codec}, .*codecs.*confluent"):
        read(kafka, topic, "kafka-python")


def test_messages_without_a_decompressor_raise_at_each_poll_and_are_never_skipped(kafka, compressed, monkeypatch):
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
