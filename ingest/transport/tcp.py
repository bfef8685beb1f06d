"""An ingest process on another host: what it reads comes over TCP, and is the learner's as if it were read here.

There it listens, and serves one learner at a time. Here a process of its own stands in for it: to the learner it is an
ingest process, with a ring of the same form, into which it puts the rows that come. Neither side unpickles anything.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait

import msgspec
import numpy as np

from ingest.child_environment import without_settings
from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.errors import BrokerError
from ingest.transport.protocol import (
    Begin,
    BlockReady,
    Failed,
    LagReport,
    from_ingest,
    receive_in_ingest,
    revealed,
    send,
)
from ingest.transport.shared_ring import SharedRing

_CONNECT_SECONDS = 5.0
_LONGEST_MESSAGE = 100_000_000
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""Seconds without a word, between questions after that, and how many of them."""
_AGAIN_SECONDS = 5.0
"""A process that dies over and over is started no more often than that."""

log = logging.getLogger(__name__)


def set_options(connected: socket.socket) -> None:
    """Send at once, and notice within a minute a host that lost power or network while nothing is sent to it."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # of Linux; elsewhere the system's own times hold
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class CarryingRing(SharedRing):
    """A ring whose other side is on another host: what a slot holds follows the message that says so."""

    def carry(self, connection: Connection, slot: int, rows: int) -> None:
        """Send a slot's rows, column by column."""
        for column in self.views(slot, rows).values():
            if column.nbytes:
                connection.send_bytes(column.reshape(-1).view(np.uint8).data)


def learners(descriptor: int, patience: float = _CONNECT_SECONDS) -> Iterator[tuple[Connection, Begin]]:
    """Yield who connects to a listening socket and says at once what to read, one after the other.

    Whoever has not said it after `patience` in seconds is let go.
    """
    with socket.socket(fileno=descriptor) as listening:
        while True:
            connected, _ = listening.accept()
            set_options(connected)
            with connected, Connection(os.dup(connected.fileno())) as connection:
                # Whoever sends half a message, or a byte now and then, keeps nobody else waiting.
                hang_up = threading.Timer(patience, connected.shutdown, [socket.SHUT_RDWR])
                hang_up.start()
                try:
                    begin = receive_in_ingest(connection, _LONGEST_MESSAGE)
                    if not isinstance(begin, Begin):
                        continue
                    SchemaSettings.model_validate_json(begin.schema)
                    HoldOut.model_validate_json(begin.hold_out)
                except (EOFError, OSError, msgspec.MsgspecError, ValueError):
                    log.warning("what has connected is no learner, and is let go")
                    continue
                finally:
                    hang_up.cancel()
                yield connection, begin


def relay(address: str, learner: Connection, ring: SharedRing, begin: Begin) -> None:
    """Pass on what learner and ingest process say, and put the rows into the ring, until either is gone.

    The other host has the settings of the stream itself, so that no secret goes there.
    """
    host, _, port = address.rpartition(":")
    try:
        connected = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
    except OSError as exc:
        send(learner, Failed(BrokerError.__name__, f"no ingest process answers at {address}: {exc.strerror or exc}"))
        return
    connected.settimeout(None)
    set_options(connected)
    other = Connection(connected.detach())
    try:
        send(other, msgspec.structs.replace(begin, stream=""))
        while True:
            for ready in wait([learner, other]):
                if ready is learner:
                    other.send_bytes(learner.recv_bytes())
                    continue
                message = other.recv_bytes(_LONGEST_MESSAGE)
                said = from_ingest(message)
                if isinstance(said, BlockReady):
                    for column in ring.views(said.slot, said.rows).values():
                        if column.nbytes:
                            other.recv_bytes_into(column.reshape(-1).view(np.uint8).data)
                if isinstance(said, LagReport):  # the clock of the other host is not this one's
                    send(learner, msgspec.structs.replace(said, time=time.monotonic()))
                else:
                    learner.send_bytes(message)
    except (EOFError, OSError):
        log.debug("the learner, or the ingest process at %s, is gone", address)


class Remote:
    """An ingest process for a learner on another host, which lives no longer than this object's."""

    def __init__(self, stream: StreamSettings, host: str) -> None:
        """Start it, to listen on a free port of that one address of this host."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self.address = f"{host}:{self._listening.getsockname()[1]}"
        self._stream = revealed(stream).encode() + b"\n"
        self._start()

    def keep(self) -> None:
        """Start another one, at the same address, where it has died; called often."""
        if self._process.poll() is not None and time.monotonic() - self._started > _AGAIN_SECONDS:
            log.warning("the ingest process for the learner of host 0 died; another one is started")
            self._close_stdin()
            self._start()

    def close(self) -> None:
        """End it."""
        self._listening.close()
        self._process.kill()
        self._process.wait()
        self._close_stdin()

    def _start(self) -> None:
        descriptor = self._listening.fileno()
        # -P: a folder named ingest where the user stands must not take this package's place.
        command = [sys.executable, "-P", "-m", "ingest", "--listen", str(descriptor)]
        self._process = subprocess.Popen(command, pass_fds=(descriptor,), stdin=subprocess.PIPE, env=without_settings())
        self._started = time.monotonic()
        assert self._process.stdin is not None
        self._process.stdin.write(self._stream)
        self._process.stdin.flush()

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
