"""An ingest process on another host sends what it reads over TCP.

That process listens, and serves one learner at a time. On the learner's host a relay process takes its part: to the
learner it is an ingest process with a ring, and it writes the rows that it receives into the ring. Neither side
unpickles anything.
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

from anabranch.core.logs import log_arguments
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
"""Seconds without traffic before the first probe, seconds between probes, and how many of them."""
_AGAIN_SECONDS = 5.0
"""The shortest time between two starts of a process that dies again and again."""

log = logging.getLogger(__name__)


def set_options(connected: socket.socket) -> None:
    """Send without delay, and notice within a minute that an idle peer lost power or network."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # of Linux; other systems keep their own times
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class CarryingRing(SharedRing):
    """A ring whose other side is on another host: the rows of a slot follow the message `BlockReady`."""

    def carry(self, connection: Connection, slot: int, rows: int) -> None:
        """Send a slot's rows, column by column."""
        for column in self.views(slot, rows).values():
            if column.nbytes:
                connection.send_bytes(column.reshape(-1).view(np.uint8).data)


def learners(descriptor: int, patience: float = _CONNECT_SECONDS) -> Iterator[tuple[Connection, Begin]]:
    """Yield each learner that connects to a listening socket, with its first message; one after the other.

    A connection without that message after `patience` in seconds is closed.
    """
    with socket.socket(fileno=descriptor) as listening:
        while True:
            connected, _ = listening.accept()
            set_options(connected)
            with connected, Connection(os.dup(connected.fileno())) as connection:
                # A peer that sends half a message, or a byte now and then, must not block the others.
                hang_up = threading.Timer(patience, connected.shutdown, [socket.SHUT_RDWR])
                hang_up.start()
                try:
                    begin = receive_in_ingest(connection, _LONGEST_MESSAGE)
                    if not isinstance(begin, Begin):
                        continue
                    SchemaSettings.model_validate_json(begin.schema)
                    HoldOut.model_validate_json(begin.hold_out)
                except (EOFError, OSError, msgspec.MsgspecError, ValueError):
                    log.warning("a connection was closed: its first message is not a learner's")
                    continue
                finally:
                    hang_up.cancel()
                yield connection, begin


def relay(address: str, learner: Connection, ring: SharedRing, begin: Begin) -> None:
    """Forward messages between learner and ingest process, and rows into the ring, until either is gone.

    The other host has its own settings of the stream: no secret is sent there.
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
                decoded = from_ingest(message)
                if isinstance(decoded, BlockReady):
                    for column in ring.views(decoded.slot, decoded.rows).values():
                        if column.nbytes:
                            other.recv_bytes_into(column.reshape(-1).view(np.uint8).data)
                if isinstance(decoded, LagReport):  # the clock of the other host is not this one's
                    send(learner, msgspec.structs.replace(decoded, time=time.monotonic()))
                else:
                    learner.send_bytes(message)
    except (EOFError, OSError):
        log.debug("the learner, or the ingest process at %s, is gone", address)


class Remote:
    """An ingest process for a learner on another host; it ends when this process does."""

    def __init__(self, stream: StreamSettings, host: str) -> None:
        """Start the process; it listens on a free port of this address of this host."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self.address = f"{host}:{self._listening.getsockname()[1]}"
        self._stream = revealed(stream).encode() + b"\n"
        self._start()

    def keep(self) -> None:
        """Start another process at the same address if the process has died; called often."""
        if self._process.poll() is not None and time.monotonic() - self._started > _AGAIN_SECONDS:
            log.warning("the ingest process for the learner of host 0 died; another one is started")
            self._close_stdin()
            self._start()

    def close(self) -> None:
        """End the process."""
        self._listening.close()
        self._process.kill()
        self._process.wait()
        self._close_stdin()

    def _start(self) -> None:
        descriptor = self._listening.fileno()
        # -P: a folder named ingest in the working directory must not be imported instead of this package.
        command = [sys.executable, "-P", "-m", "ingest", "--listen", str(descriptor), *log_arguments()]
        self._process = subprocess.Popen(command, pass_fds=(descriptor,), stdin=subprocess.PIPE, env=without_settings())
        self._started = time.monotonic()
        assert self._process.stdin is not None
        self._process.stdin.write(self._stream)
        self._process.stdin.flush()

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
