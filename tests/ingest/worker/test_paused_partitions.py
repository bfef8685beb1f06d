"""A worker whose Schema Registry goes away: partitions wait, and nothing is lost or dead-lettered."""

import io
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import fastavro
import pytest

from anabranch.core.backoff import Backoff
from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.events.block import BlockLayout, Outcome
from ingest.events.partition import TopicPartition
from ingest.events.position import Position
from ingest.events.schema import Schema
from ingest.kafka.fake import FakeClient, FakePartition
from ingest.schema_registry.cache import WriterSchemas
from ingest.schema_registry.client import RegistryClient
from ingest.transport.protocol import (
    BlockReady,
    FromIngest,
    LagReport,
    Release,
    Resume,
    SkippedToEnd,
    SkipToEnd,
    Stop,
    receive_in_learner,
    send,
)
from ingest.transport.shared_ring import SharedRing
from ingest.worker import lag_reporter
from ingest.worker import worker as worker_module
from ingest.worker.block_builder import BlockBuilder
from ingest.worker.worker import IngestWorker, StoppedError
from tests.support.registry_server import Registry

P0, P1 = TopicPartition("events", 0), TopicPartition("events", 1)
SCHEMA = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}})
)


def avro_record(number_type: str) -> dict[str, Any]:
    fields = [{"name": "x", "type": number_type}, {"name": "y", "type": "int"}]
    return {"type": "record", "name": "Event", "fields": fields}


def message(number: int, x: float, number_type: str = "double") -> bytes:
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, fastavro.parse_schema(avro_record(number_type)), {"x": x, "y": 1})
    return b"\0" + number.to_bytes(4) + sink.getvalue()


class Pipeline:
    """A worker in a thread, and the learner's end of its connection; blocks are released as they come."""

    def __init__(self, client: FakeClient, registry: Registry) -> None:
        stream = StreamSettings.model_validate(
            {"topics": ["events"], "format": "avro", "registry": {"url": registry.url}}
        ).resolved("test")
        assert stream.registry is not None
        backoff = Backoff(timedelta(milliseconds=20), timedelta(milliseconds=20))
        self.schemas = WriterSchemas(stream.registry, RegistryClient(stream.registry), backoff=backoff)
        ours, theirs = socket.socketpair()
        self.connection, connection = Connection(ours.detach()), Connection(theirs.detach())
        self.ring = SharedRing(BlockLayout(SCHEMA), 1_000_000)
        builder = BlockBuilder(SCHEMA, stream, HoldOut(fraction=0, seed=0), self.schemas)
        worker = IngestWorker(stream, client, builder, self.ring, connection, schemas=self.schemas)
        self.read: dict[int, list[tuple[int, float]]] = {0: [], 1: []}
        """Offset and feature of each event that came in a block, by partition."""
        self.outcomes: set[int] = set()
        self.ends: dict[int, int] = {}

        def run() -> None:
            with pytest.raises(StoppedError):
                worker.run([(P0, Position(0)), (P1, Position(0))])

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def receive_until(self, matches: Callable[[FromIngest], bool]) -> FromIngest:
        while True:
            assert self.connection.poll(20), "the worker sent no message"
            received = receive_in_learner(self.connection)
            if isinstance(received, BlockReady):
                columns = self.ring.views(received.slot, received.rows)
                names = ("partition", "offset", "feature.x")
                for partition, offset, x in zip(*(columns[name].tolist() for name in names), strict=True):
                    self.read[partition].append((offset, x))
                self.outcomes |= set(columns["outcome"].tolist())
                self.ends |= {cover.partition: cover.end for cover in received.coverage}
                send(self.connection, Release(received.slot))
            if isinstance(received, LagReport):
                send(self.connection, Resume())
            if matches(received):
                return received

    def receive_events(self, partition: int, count: int) -> None:
        self.receive_until(lambda _: len(self.read[partition]) >= count)

    def problem(self) -> str | None:
        report = self.receive_until(lambda each: isinstance(each, LagReport))
        assert isinstance(report, LagReport)
        return report.problem


@pytest.fixture
def pipeline(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(lag_reporter, "LAG_SECONDS", 0.0)
    monkeypatch.setattr(worker_module, "LAG_SECONDS", 0.0)

    @contextmanager
    def start(client: FakeClient) -> Iterator[Pipeline]:
        started = Pipeline(client, registry)
        try:
            yield started
        finally:
            send(started.connection, Stop())
            started.thread.join(20)
            assert not started.thread.is_alive()
            started.schemas.close()
            started.ring.close()

    return start


@pytest.fixture
def client() -> FakeClient:
    return FakeClient({P0: FakePartition(), P1: FakePartition()})


def test_an_unknown_schema_pauses_its_partition_alone_and_nothing_is_lost(registry, pipeline, client):
    known, unknown = registry.register("events-value", avro_record("double")), 2
    zero, one = client.topics[P0], client.topics[P1]
    zero.append(message(known, 0.0))
    with pipeline(client) as running:
        running.receive_events(0, 1)
        registry.faults.away = True
        registry.register("events-value", avro_record("int"))
        for x in range(1, 4):
            zero.append(message(known, x))
        zero.append(message(unknown, 4, "int"))
        for x in range(5, 8):
            zero.append(message(known, x))
        for x in range(10):
            one.append(message(known, x))
        running.receive_events(0, 4)
        running.receive_events(1, 10)
        running.receive_until(lambda each: isinstance(each, LagReport) and each.problem is not None)
        problem = running.problem()
        assert problem is not None
        assert problem.startswith("events[0] waits at offset 4 for the schema of its message: the registry at ")
        one.append(message(known, 10))
        running.receive_events(1, 11)  # it goes on while the other one waits
        assert running.ends == {0: 4, 1: 11}
        registry.faults.away = False
        running.receive_events(0, 8)
        running.receive_until(lambda each: isinstance(each, LagReport) and each.problem is None)
    assert running.read[0] == [(offset, float(offset)) for offset in range(8)]
    assert running.read[1] == [(offset, float(offset)) for offset in range(11)]
    assert running.outcomes == {Outcome.PENDING}
    assert client.letters == []


@pytest.mark.parametrize(
    "fault", [{"status": 500}, {"status": 401}, {"body": b"<html>"}, {"redirect": "http://127.0.0.1:1"}]
)
def test_no_answer_of_a_registry_that_does_not_work_makes_a_dead_letter(registry, pipeline, client, fault):
    number = registry.register("events-value", avro_record("double"))
    for name, value in fault.items():
        setattr(registry.faults, name, value)
    for partition in client.topics.values():
        partition.append(message(number, 1.0))
    with pipeline(client) as running:
        running.receive_until(lambda each: isinstance(each, LagReport) and each.problem is not None)
        problem = running.problem()
        assert problem is not None
        assert problem.startswith("events[0] (and 1 more partition) waits at offset 0 for the schema of its message: ")
        for name in fault:
            setattr(registry.faults, name, None)
        running.receive_events(0, 1)
        running.receive_events(1, 1)
    assert running.outcomes == {Outcome.PENDING}
    assert client.letters == []


def test_a_schema_that_the_registry_lacks_makes_a_dead_letter(registry, pipeline, client, monkeypatch):
    monkeypatch.setattr("ingest.schema_registry.cache._LAGGING_SECONDS", 0.0)
    client.topics[P0].append(message(9, 1.0))
    with pipeline(client) as running:
        running.receive_events(0, 1)
    assert running.outcomes == {Outcome.DEAD_LETTERED}
    (letter,) = client.letters
    reason = dict(letter.added)["anabranch-error"].decode()
    assert reason == f"schema: the registry at {registry.url} has no schemas/ids/9"


def test_skipping_to_the_end_ends_the_pause(registry, pipeline, client):
    registry.faults.away = True
    for _ in range(3):
        client.topics[P0].append(message(1, 1.0))
    with pipeline(client) as running:
        running.receive_until(lambda each: isinstance(each, LagReport) and each.problem is not None)
        send(running.connection, SkipToEnd())
        running.receive_until(lambda each: isinstance(each, SkippedToEnd))
        assert running.ends[0] == 3
        running.receive_until(lambda each: isinstance(each, LagReport) and each.problem is None)
        registry.faults.away = False
        number = registry.register("events-value", avro_record("double"))
        client.topics[P0].append(message(number, 5.0))
        running.receive_events(0, 1)
    assert running.read[0] == [(3, 5.0)]


def test_a_partition_that_waits_is_not_reported_as_stalled(registry, pipeline, client, monkeypatch):
    registry.faults.away = True
    client.topics[P0].append(message(1, 1.0))
    monkeypatch.setattr("ingest.worker.stalled_partitions.STALLED_SECONDS", 0.0)
    with pipeline(client) as running:
        running.receive_until(lambda each: isinstance(each, LagReport) and "waits" in str(each.problem))
        for _ in range(5):
            assert "stalled" not in str(running.problem())
        assert running.schemas.problem is not None
