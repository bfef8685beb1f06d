"""Lag reports take effect before the blocks that were received earlier."""

import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest

from anabranch.ingest.events.block import BlockLayout, Coverage
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.reader.ingest_process import IngestProcess
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.transport.protocol import BlockReady, LagReport, PartitionsOpened, SkippedToEnd, send
from anabranch.ingest.transport.shared_ring import SharedRing

SCHEMA = SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}})
STREAM = StreamSettings.model_validate({"topics": ["events"], "buffer_bytes": 1_000_000})
P0 = TopicPartition("events", 0)
NOW = timedelta(0)


class FakeProcess(IngestProcess):
    """A process whose messages the test sends, through `there`."""

    there: Connection

    def start(self):
        ours, theirs = socket.socketpair()
        self.there = Connection(theirs.detach())
        self.connect(Connection(ours.detach()), SharedRing(BlockLayout(Schema(SCHEMA)), 1_000_000))
        send(self.there, PartitionsOpened([P0], [0], [None]))


@pytest.fixture
def process():
    return FakeProcess(BlockLayout(Schema(SCHEMA)), STREAM)


@pytest.fixture
def source(process, monkeypatch):
    stream = StreamSettings.model_validate({"topics": ["events"]}).resolved("test")
    reader = BlockReader(stream, SCHEMA, HoldOut(fraction=0, seed=0))
    monkeypatch.setattr(reader, "_process", process)
    reader.open()
    yield reader
    reader.close()


def fill(process, slot, begin, end):
    process.ring.views(slot, 1)["offset"][:] = end - 1
    send(process.there, BlockReady(slot, 1, (Coverage(0, begin, end),), 0))


def test_an_end_is_known_while_earlier_blocks_are_not_handled_yet(source, process):
    fill(process, 0, 0, 100)
    fill(process, 1, 100, 200)
    asked = time.monotonic()
    send(process.there, LagReport([(0, 8000)], None, asked))
    block = source.poll(NOW)
    assert block.coverage[0].end == 100
    # A learner that is slow does not poll until it has done with the block.
    assert (source.partitions[0].end, source.ends_time) == (8000, asked)
    send(process.there, LagReport([(0, 9000)], "the broker is slow", asked + 1))
    source.receive()
    assert (source.partitions[0].end, source.ends_time, source.problem) == (9000, asked + 1, "the broker is slow")
    assert source.poll(NOW).coverage[0].end == 200


@pytest.mark.slow
def test_messages_of_a_process_that_died_are_handled_before_the_next_one_is_started(source, process):
    fill(process, 0, 0, 100)
    send(process.there, SkippedToEnd())
    fill(process, 1, 100, 200)
    first = process.there
    first.close()
    source.receive()
    assert [source.poll(NOW).coverage[0].end for _ in range(2)] == [100, 200]
    assert source.problem is None
    assert source.poll(NOW) is None
    assert source.problem == "the ingest process died; another one is started"
    source.poll(timedelta(seconds=1))
    assert process.there is not first
    assert dict(source._cursors.positions)[P0].offset == 200
