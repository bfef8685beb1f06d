"""The worker with a history, against a client without Kafka."""

import contextlib
import subprocess
import sys
import threading
from unittest.mock import ANY

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.build import history_of
from anabranch.ingest.backfill.history import FileHistory
from anabranch.ingest.errors import BrokerError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import PartitionFingerprint, Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.rows import pack_rows
from anabranch.ingest.kafka.fake import FakeClient, FakePartition
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.ingest.transport.protocol import (
    BlockReady,
    LagReport,
    PartitionsOpened,
    Release,
    send,
)
from anabranch.ingest.worker import history_feed, lag_reporter
from anabranch.ingest.worker.history_feed import RetentionWatch
from tests.ingest.running_worker import RunningWorker
from tests.support.waiting import PATIENCE_SECONDS

P0, P1 = TopicPartition("events", 0), TopicPartition("events", 1)
SCHEMA = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}})
)


class Learner(RunningWorker):
    """Releases blocks as they come."""

    def take(self, message):
        if isinstance(message, BlockReady):
            send(self.connection, Release(message.slot))


@contextlib.contextmanager
def working(client, folder, positions=(), marks=(), on_gap="fail", **backfill):
    """A worker that runs; yields a function that returns the first message that fits."""
    stream = StreamSettings.model_validate(
        {
            "topics": ["events"],
            "format": "rows",
            "on_gap": on_gap,
            "backfill": {"files": [f"{folder}/*.parquet"], **backfill},
        }
    ).resolved("test")
    history = history_of(stream, SCHEMA, 0)
    assert history is not None
    with contextlib.closing(history), Learner(SCHEMA, stream, client, positions, marks, history=history) as learner:
        yield learner.receive_until


def covers(partition, end):
    """Return whether a message is a block that moves a partition to an offset."""
    return lambda message: (
        isinstance(message, BlockReady)
        and (partition, end) in [(cover.partition, cover.end) for cover in message.coverage]
    )


@pytest.mark.slow
def test_a_broker_that_is_away_stops_no_history_and_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(lag_reporter, "LAG_SECONDS", 0.0)
    monkeypatch.setattr("anabranch.ingest.worker.history_feed.watch_of", lambda *_: RetentionWatch({}))
    rows = 300_000
    pq.write_table(pa.table({"x": [1.0] * rows, "y": [1] * rows}), tmp_path / "a.parquet")
    topic = FakePartition()
    topic.append(pack_rows(SCHEMA, [{"x": 1.0, "y": 1}]))
    client = FakeClient({P0: topic})
    with working(client, tmp_path) as receive:
        opened = receive(lambda message: isinstance(message, PartitionsOpened))
        assert isinstance(opened, PartitionsOpened)
        assert opened.partitions == [TopicPartition("history", 0, 0, 1), P0]
        client.away = True
        receive(lambda message: isinstance(message, LagReport) and message.problem == "away")
        receive(covers(0, rows))
        # At the switch the worker waits for the broker.
        receive(lambda message: isinstance(message, LagReport) and message.problem == "the fake broker is away")
        client.away = False
        receive(covers(1, 1))
        done = receive(lambda message: isinstance(message, LagReport) and message.history is not None)
        assert isinstance(done, LagReport)
        assert done.history is not None
        assert done.history.done


@pytest.mark.parametrize("step", ["list_files", "plan"])
def test_ingest_reports_while_files_are_listed_and_planned(tmp_path, monkeypatch, step):
    monkeypatch.setattr("anabranch.ingest.worker.worker.LAG_SECONDS", 0.001)
    monkeypatch.setattr("anabranch.ingest.worker.history_feed.watch_of", lambda *_: RetentionWatch({}))
    pq.write_table(pa.table({"x": [1.0] * 9, "y": [1] * 9}), tmp_path / "a.parquet")
    may, call = threading.Event(), getattr(FileHistory, step)

    def late(*arguments, **named):
        assert may.wait(PATIENCE_SECONDS)
        return call(*arguments, **named)

    monkeypatch.setattr(FileHistory, step, late)
    with working(FakeClient({P0: FakePartition()}), tmp_path) as receive:
        for _ in range(8):  # more come only after a message of the learner
            assert receive(lambda message: True) == LagReport([], None, ANY)
        may.set()
        receive(lambda message: isinstance(message, PartitionsOpened))
        receive(covers(0, 9))


def test_a_learner_that_ends_while_files_are_listed_ends_ingest(tmp_path, monkeypatch):
    monkeypatch.setattr("anabranch.ingest.worker.worker.LAG_SECONDS", 0.001)
    may = threading.Event()
    monkeypatch.setattr(FileHistory, "list_files", lambda *_, **__: may.wait(PATIENCE_SECONDS))
    with working(FakeClient({P0: FakePartition()}), tmp_path) as receive:
        receive(lambda message: isinstance(message, LagReport))
    may.set()


@pytest.mark.slow
def test_blocks_of_several_partitions_cover_each_without_a_gap(tmp_path, monkeypatch):
    """Row groups have events of both partitions, and more of them than a block has room for."""
    rows = 20_000
    columns = {
        "x": [1.0] * 2 * rows,
        "y": [1] * 2 * rows,
        "p": [n % 2 for n in range(2 * rows)],
        "o": [n // 2 for n in range(2 * rows)],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=15_000)
    topics = {P0: FakePartition(), TopicPartition("events", 1): FakePartition()}
    for topic in topics.values():
        topic.skip(rows)
        topic.append(pack_rows(SCHEMA, [{"x": 1.0, "y": 1}]))
    covered: dict[int, list[tuple[int, int]]] = {0: [], 1: [], 2: []}
    total = 0

    def collect(message):
        nonlocal total
        if isinstance(message, BlockReady):
            total += message.rows
            for cover in message.coverage:
                covered[cover.partition].append((cover.start, cover.end))
        return total == 2 * rows + 2

    with working(FakeClient(topics), tmp_path, identity={"partition": "p", "offset": "o"}) as receive:
        receive(collect)
    assert covered[0] == [(0, 1)], "the mark of the file"
    for index in (1, 2):
        assert len(covered[index]) > 5
        assert covered[index][0][0] == 0
        assert [end for _, end in covered[index][:-1]] == [start for start, _ in covered[index][1:]]
        assert covered[index][-1][1] == rows + 1


def test_files_are_read_to_their_end_though_the_topic_was_created_again(tmp_path):
    columns = {"x": [1.0] * 9, "y": [1] * 9, "p": [0] * 9, "o": [*range(9)]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    identity = {"partition": "p", "offset": "o"}
    client = FakeClient({P0: FakePartition(end=10)})
    client.ids = {"events": "one"}
    file = TopicPartition("history", 0, 0, 1)
    with working(client, tmp_path, identity=identity) as receive:
        opened = receive(lambda message: isinstance(message, PartitionsOpened))
        assert isinstance(opened, PartitionsOpened)
        assert opened.partitions == [file, P0]
    marks = [PartitionFingerprint(mark) for mark in opened.ids]
    client.ids = {"events": "two"}
    client.topics[P0] = again = FakePartition()
    again.append(pack_rows(SCHEMA, [{"x": 1.0, "y": 1}]))
    positions = [(file, Position(0)), (P0, Position(4))]
    covered: list[tuple[int, int, int]] = []

    def is_last(message):
        if isinstance(message, BlockReady):
            covered.extend((cover.partition, cover.start, cover.end) for cover in message.coverage)
        return len(covered) == 3

    with working(client, tmp_path, positions, marks, on_gap="earliest", identity=identity) as receive:
        opened = receive(lambda message: isinstance(message, PartitionsOpened))
        assert isinstance(opened, PartitionsOpened)
        assert opened.partitions == [file, P0, P0.next_incarnation]
        receive(is_last)
    assert covered == [(1, 4, 9), (0, 0, 1), (2, 0, 1)]


def test_files_of_a_partition_that_the_topic_has_no_more_are_read_to_their_end(tmp_path):
    columns = {"x": [1.0] * 9, "y": [1] * 9, "p": [1] * 9, "o": [*range(9)]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    identity = {"partition": "p", "offset": "o"}
    client = FakeClient({P0: FakePartition(), P1: FakePartition(end=10)})
    client.ids = {"events": "one"}
    with working(client, tmp_path, identity=identity) as receive:
        opened = receive(lambda message: isinstance(message, PartitionsOpened))
        assert isinstance(opened, PartitionsOpened)
    marks = [PartitionFingerprint(mark) for mark in opened.ids]
    client.ids = {"events": "two"}
    del client.topics[P1]
    positions = [(opened.partitions[0], Position(0)), (P0, Position(0)), (P1, Position(4))]
    with working(client, tmp_path, positions, marks, on_gap="earliest", identity=identity) as receive:
        opened = receive(lambda message: isinstance(message, PartitionsOpened))
        assert isinstance(opened, PartitionsOpened)
        assert opened.unread == [1, 2]
        receive(covers(2, 9))


@pytest.mark.parametrize("error", [BrokerError("it is away"), SettingsError("kafka-python has no such property")])
def test_retention_is_unknown_where_the_broker_shows_none(monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr("anabranch.ingest.kafka.topic_inspector.Inspector", fail)
    stream = StreamSettings.model_validate({"topics": ["events"]})
    watch = history_feed.watch_of(FakeClient({P0: FakePartition()}), stream, {P0: 0}, 0)
    assert watch._first is None


@pytest.mark.process
def test_without_a_history_ingest_loads_neither_pyarrow_nor_obstore_nor_a_kafka_client():
    code = "import anabranch.ingest.__main__, sys; print(sorted({'pyarrow', 'obstore', 'kafka'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
