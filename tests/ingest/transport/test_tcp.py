"""The connection between a learner and an ingest process on another host."""

import contextlib
import socket
import threading
from multiprocessing.connection import Connection

import pytest

from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.events.block import BlockLayout
from ingest.events.schema import Schema
from ingest.transport.protocol import Stop, begin, send
from ingest.transport.shared_ring import SharedRing
from ingest.transport.tcp import learners, relay

SCHEMA = SchemaSettings.model_validate({"features": {"x": {"dtype": "int8"}}, "label": {"name": "y", "classes": 3}})


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the system has no such times")
def test_both_ends_notice_within_a_minute_that_the_other_host_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StreamSettings.model_validate({"topics": ["events"]}).resolved("test")
    message = begin(stream, SCHEMA, HoldOut(fraction=0, seed=0), [], [], [], owns_new_partitions=True)
    connected: list[socket.socket] = []
    create = socket.create_connection

    def noting(*arguments: object) -> socket.socket:
        connection = create(*arguments)  # type: ignore[arg-type]
        connected.append(connection.dup())
        return connection

    monkeypatch.setattr(socket, "create_connection", noting)
    with contextlib.ExitStack() as stack:
        listening = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        served = learners(listening.detach())
        stack.callback(served.close)
        ours, theirs = (stack.enter_context(Connection(each.detach())) for each in socket.socketpair())
        ring = stack.enter_context(contextlib.closing(SharedRing(BlockLayout(Schema(SCHEMA)), 1_000_000)))
        thread = threading.Thread(target=relay, args=(address, theirs, ring, message))
        thread.start()
        there, _ = next(served)
        connected.append(socket.fromfd(there.fileno(), socket.AF_INET, socket.SOCK_STREAM))
        for each in connected:
            stack.enter_context(each)
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, between, times = (
                each.getsockopt(socket.IPPROTO_TCP, name)
                for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + between * times <= 60
        send(ours, Stop())
        ours.close()
        thread.join(20)
        assert not thread.is_alive()
    assert len(connected) == 2
