"""A worker whose Schema Registry goes away: partitions wait, and nothing is lost or dead-lettered."""

import io
from contextlib import closing, contextmanager
from datetime import timedelta

import fastavro
import pytest

from anabranch.core.backoff import Backoff
from anabranch.ingest.events.block import Outcome
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import FakeClient, FakePartition
from anabranch.ingest.schema_registry.cache import WriterSchemas
from anabranch.ingest.schema_registry.client import RegistryClient
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.ingest.transport.protocol import (
    BlockReady,
    LagReport,
    Ping,
    Release,
    SkippedToEnd,
    SkipToEnd,
    send,
)
from anabranch.ingest.worker import lag_reporter
from anabranch.ingest.worker import worker as worker_module
from tests.ingest.running_worker import RunningWorker

P0, P1 = TopicPartition("events", 0), TopicPartition("events", 1)
SCHEMA = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}})
)


def avro_record(number_type):
    fields = [{"name": "x", "type": number_type}, {"name": "y", "type": "int"}]
    return {"type": "record", "name": "Event", "fields": fields}


def message(number, x, number_type="double"):
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, fastavro.parse_schema(avro_record(number_type)), {"x": x, "y": 1})
    return b"\0" + number.to_bytes(4) + sink.getvalue()


class Pipeline(RunningWorker):
    """A worker from the first offset on; blocks are released as they come."""

    def __init__(self, client, registry):
        stream = StreamSettings.model_validate(
            {"topics": ["events"], "format": "avro", "registry": {"url": registry.url}}
        ).resolved("test")
        assert stream.registry is not None
        backoff = Backoff(timedelta(milliseconds=20), timedelta(milliseconds=20))
        self.schemas = WriterSchemas(stream.registry, RegistryClient(stream.registry), backoff=backoff)
        first = [(P0, Position(0)), (P1, Position(0))]
        super().__init__(SCHEMA, stream, client, first, schemas=self.schemas)
        self.read: dict[int, list[tuple[int, float]]] = {0: [], 1: []}
        """Offset and feature of each event that came in a block, by partition."""
        self.outcomes: set[int] = set()
        self.ends: dict[int, int] = {}

    def take(self, message):
        if isinstance(message, BlockReady):
            columns = self.ring.views(message.slot, message.rows)
            names = ("partition", "offset", "feature.x")
            for partition, offset, x in zip(*(columns[name].tolist() for name in names), strict=True):
                self.read[partition].append((offset, x))
            self.outcomes |= set(columns["outcome"].tolist())
            self.ends |= {cover.partition: cover.end for cover in message.coverage}
            send(self.connection, Release(message.slot))
        if isinstance(message, LagReport):
            send(self.connection, Ping())

    def receive_events(self, partition, count):
        self.receive_until(lambda _: len(self.read[partition]) >= count)

    def problem(self):
        report = self.receive_until(lambda each: isinstance(each, LagReport))
        assert isinstance(report, LagReport)
        return report.problem


@pytest.fixture
def pipeline(registry, monkeypatch):
    monkeypatch.setattr(lag_reporter, "LAG_SECONDS", 0.0)
    monkeypatch.setattr(worker_module, "LAG_SECONDS", 0.0)

    @contextmanager
    def start(client):
        with Pipeline(client, registry) as started, closing(started.schemas):
            yield started

    return start


@pytest.fixture
def client():
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
    monkeypatch.setattr("anabranch.ingest.schema_registry.cache._LAGGING_SECONDS", 0.0)
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
    monkeypatch.setattr("anabranch.ingest.worker.lag_reporter.STALLED_SECONDS", 0.0)
    with pipeline(client) as running:
        running.receive_until(lambda each: isinstance(each, LagReport) and "waits" in str(each.problem))
        for _ in range(5):
            assert "stalled" not in str(running.problem())
        assert running.schemas.problem is not None
