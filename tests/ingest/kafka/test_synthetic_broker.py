"""The broker of a calibration: what a client reads of it are the messages of its file, again and again."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from ingest.config import StreamSettings
from ingest.events.partition import TopicPartition
from ingest.kafka.client import Client
from ingest.kafka.registry import CLIENTS
from ingest.kafka.synthetic import SyntheticClient
from ingest.kafka.synthetic_broker import HOST, Answers, EndlessLog, record_batches

VALUES = [bytes([65 + number]) * (1_000 + 7_000 * (number % 2)) for number in range(25)]
PARTITION = TopicPartition("events", 0)
MANY = 120


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    messages = tmp_path / "messages.bin"
    messages.write_bytes(msgspec.msgpack.encode(VALUES))
    command = [sys.executable, "-P", "-m", "ingest.kafka.synthetic_broker", str(messages), "events", "events.dead"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as broker:
        assert broker.stdin is not None
        assert broker.stdout is not None
        yield f"{HOST}:{int(broker.stdout.readline())}"
        broker.stdin.close()
        assert broker.wait(20) == 0


def client_of(address: str) -> Client:
    settings = StreamSettings.model_validate({"bootstrap_servers": address, "topics": ["events"]})
    return CLIENTS["kafka-python"](settings.resolved("planned"))


@pytest.mark.process
def test_a_client_reads_the_messages_again_and_again_from_any_offset(address: str) -> None:
    client = client_of(address)
    client.open()
    try:
        assert client.first_offsets([PARTITION], "earliest", None) == {PARTITION: 0}
        for begin in (0, 1_234_567):
            client.assign({PARTITION: begin})
            read = 0
            while read < MANY:
                for messages in client.poll(timedelta(seconds=1), 7):
                    assert list(messages.offsets) == [*range(begin + read, begin + read + len(messages))]
                    assert list(messages.values) == [VALUES[offset % len(VALUES)] for offset in messages.offsets]
                    read += len(messages)
    finally:
        client.close()


@pytest.mark.process
def test_a_synthetic_topic_goes_on_with_the_messages_of_the_broker_once_it_may(address: str) -> None:
    flooded = [False]
    client = SyntheticClient("events", [b"slow"], 1e9, lambda: flooded[0], lambda: 12.5, client_of(address))
    client.open()
    client.assign({PARTITION: 40})
    try:
        (slow,) = client.poll(timedelta(0), 3)
        assert (list(slow.offsets), slow.end) == ([40, 41, 42], 43)
        flooded[0] = True
        found = next(filter(None, (client.poll(timedelta(seconds=1), 5) for _ in range(20))))
        assert found[0].partition == PARTITION
        assert list(found[0].offsets) == [*range(43, 43 + len(found[0]))]
        assert list(found[0].values) == VALUES[: len(found[0])]
        assert set(found[0].times_ms) == {12_500}
        assert found[0].end == client.lag().ends[PARTITION] == 43 + len(found[0])
    finally:
        client.close()


def test_batches_are_as_large_as_those_of_producers_and_a_larger_message_has_its_own() -> None:
    assert [len(batch) <= 16_384 for batch in record_batches(VALUES)].count(False) == 0
    assert len(record_batches(VALUES)) < len(VALUES) / 2
    assert [len(batch) > 50_000 for batch in record_batches([b"x" * 50_000] * 3)] == [True] * 3


def test_a_read_has_one_batch_at_least_and_no_more_bytes_than_are_asked_for() -> None:
    log, batches = EndlessLog(VALUES), record_batches(VALUES)
    assert log.read(0, 1)[8:] == batches[0][8:]
    two = len(batches[0]) + len(batches[1])
    assert len(log.read(0, two)) == two
    assert len(log.read(0, two - 1)) == len(batches[0])
    whole = sum(map(len, batches))
    assert len(log.read(len(VALUES) * 3, 2 * whole)) == 2 * whole


def test_requests_that_no_reading_client_makes_have_no_answer() -> None:
    answers = Answers(EndlessLog(VALUES), ["events"], 9092)
    for key, version in itertools.product((0, 36), (0, 1)):
        assert answers.to(key.to_bytes(2) + version.to_bytes(2) + bytes(8)) is None
    assert answers.to((1).to_bytes(2) + (17).to_bytes(2) + bytes(8)) is None
