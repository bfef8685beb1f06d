"""An ingest worker in a thread, with a real ring and a real connection, whose other end is the test's."""

import socket
import threading
from multiprocessing.connection import Connection

import pytest

from anabranch.ingest.events.block import BlockLayout
from anabranch.ingest.settings.stream import HoldOut
from anabranch.ingest.transport.protocol import Stop, receive_in_learner, send
from anabranch.ingest.transport.shared_ring import SharedRing
from anabranch.ingest.worker.block_builder import BlockBuilder
from anabranch.ingest.worker.worker import IngestWorker, StoppedError
from tests.support.waiting import PATIENCE_SECONDS


class RunningWorker:
    """Runs until its context ends, which closes the ring too."""

    def __init__(
        self, schema, stream, client, positions=(), marks=(), *, buffer_bytes=1_000_000, history=None, schemas=None
    ):
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        self.ring = SharedRing(BlockLayout(schema), buffer_bytes)
        builder = BlockBuilder(schema, stream, HoldOut(fraction=0, seed=0), schemas)
        worker = IngestWorker(stream, client, builder, self.ring, Connection(theirs.detach()), history=history)

        def run():
            with pytest.raises(StoppedError):
                worker.run(positions, marks)

        self._thread = threading.Thread(target=run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        send(self.connection, Stop())
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self.ring.close()

    def take(self, message):
        """Do what the learner of a subclass does with each message."""

    def receive_until(self, matches):
        """Return the first message that fits."""
        while True:
            assert self.connection.poll(20), "the worker sent no message"
            message = receive_in_learner(self.connection)
            self.take(message)
            if matches(message):
                return message
