"""What the learner knows of the broker's ends: as ingest fetched them last, however many blocks wait."""

import select
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest

from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.events.block import BlockLayout, Coverage
from ingest.events.partition import TopicPartition
from ingest.events.schema import Schema
from ingest.reader.reader import Source
from ingest.transport.protocol import Broker, Filled, Opened, Passed, send
from ingest.transport.shared_ring import Ring

SCHEMA = SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}})
P0 = TopicPartition("events", 0)
NOW = timedelta(0)


class Played(Source):
    """A source whose process is played by the test, through `there`."""

    there: Connection

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        self.there, self._connection = Connection(theirs.detach()), Connection(ours.detach())
        self._ring = Ring(BlockLayout(Schema(SCHEMA)), 1_000_000)
        self._readable = select.poll()
        self._readable.register(self._connection, select.POLLIN)
        send(self.there, Opened([P0], [0], [None]))


@pytest.fixture
def source():
    stream = StreamSettings.model_validate({"topics": ["events"]}).resolved("test")
    played = Played(stream, SCHEMA, HoldOut(fraction=0, seed=0))
    played.open()
    yield played
    played.close()


def fill(source, slot, begin, end):
    source._ring.views(slot, 1)["offset"][:] = end - 1
    send(source.there, Filled(slot, 1, (Coverage(0, begin, end),), 0))


def test_an_end_is_known_while_blocks_that_came_before_it_wait(source):
    fill(source, 0, 0, 100)
    fill(source, 1, 100, 200)
    asked = time.monotonic()
    send(source.there, Broker([(0, 8000)], None, asked))
    block = source.poll(NOW)
    assert block.coverage[0].end == 100
    # A learner that is slow does not poll until it has done with the block.
    assert (source.partitions[0].end, source.told) == (8000, asked)
    send(source.there, Broker([(0, 9000)], "the broker is slow", asked + 1))
    source.receive()
    assert (source.partitions[0].end, source.told, source.problem) == (9000, asked + 1, "the broker is slow")
    assert source.poll(NOW).coverage[0].end == 200


def test_what_was_received_of_a_process_that_died_comes_before_the_next_one_is_started(source):
    fill(source, 0, 0, 100)
    send(source.there, Passed())
    fill(source, 1, 100, 200)
    first = source.there
    first.close()
    source.receive()
    assert [source.poll(NOW).coverage[0].end for _ in range(2)] == [100, 200]
    assert source.problem is None
    assert source.poll(NOW) is None
    assert source.problem == "the ingest process died; another one is started"
    source.poll(timedelta(seconds=1))
    assert source.there is not first
    assert source.received[P0][0].offset == 200
