"""Accepts connections from the listening socket, up to a limit of descriptors and memory.

At the limit, the connection that has waited longest for its next request is closed for the new one. If every connection
has an unanswered request, new ones wait in the kernel's backlog. Belongs to the event loop's thread.
"""

import asyncio
import functools
import logging
import math
import resource
import socket
import ssl
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from anabranch.serving.http.connection import HEAD_PATIENCE, Connection
from anabranch.serving.http.listening_socket import BACKLOG

log = logging.getLogger("anabranch.serving")

MOST_CONNECTIONS = 4096
MOST_TLS_CONNECTIONS = 1024
"""Each needs 275 kB of buffers in Python's TLS."""
MOST_GRPC_CONNECTIONS = 1024

_SPARE_DESCRIPTORS = 128
"""For files and everything else that the process opens."""
_LEAST_CONNECTIONS = 16
_GRACE = timedelta(milliseconds=100)
"""Time in which a connection without a request is not closed: a client needs a while to send it."""
_TURNS = 10
"""Turns of the loop in which a new connection is made and a request is read that has arrived: four without TLS."""
_POLL_SECONDS = 0.005
_RETRY = timedelta(seconds=1)
_WARN_EVERY = timedelta(minutes=1)
_TLS_SHUTDOWN = timedelta(seconds=5)

_Connecting = asyncio.Task[tuple[asyncio.Transport, asyncio.BaseProtocol]]


def most_connections(*, tls: bool, grpc: bool = False) -> int:
    """Return how many connections this process may have open; `grpc`: besides those of gRPC."""
    most = MOST_TLS_CONNECTIONS if tls else MOST_CONNECTIONS
    return _bounded(most, _free_descriptors() - (most_grpc_connections() if grpc else 0))


def most_grpc_connections() -> int:
    """Return how many connections of gRPC this process may have open."""
    return _bounded(MOST_GRPC_CONNECTIONS, _free_descriptors() / 2)


def _free_descriptors() -> float:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if descriptors == resource.RLIM_INFINITY else descriptors - _SPARE_DESCRIPTORS


def _bounded(most: int, descriptors: float) -> int:
    return max(_LEAST_CONNECTIONS, int(min(most, descriptors)))


class Acceptor:
    """Accepts connections and keeps those that are open; it is the `owner` to which they report."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], Connection],
        limit: int,
        at_once: int,
        context: ssl.SSLContext | None,
    ) -> None:
        """Prepare to accept.

        Args:
            listener: is listening; closed by `stop`.
            make: returns the protocol of a new connection.
            limit: the limit of open connections.
            at_once: connections accepted in one turn of the loop: 1 where other processes share the listener.
            context: of TLS; None without TLS.
        """
        self._listener = listener
        self._make = make
        self._limit = limit
        self._at_once = at_once
        self._tls: dict[str, Any] = {}
        if context is not None:
            self._tls = {
                "ssl": context,
                "ssl_handshake_timeout": HEAD_PATIENCE.total_seconds(),
                "ssl_shutdown_timeout": _TLS_SHUTDOWN.total_seconds(),
            }
        self._open: dict[Connection, _Connecting] = {}
        self._waiting: dict[Connection, float] = {}
        """When connections without a request began to wait for one, the longest waiting first."""
        self._accepts = False
        self._warned = float("-inf")

    def start(self) -> None:
        """Start to accept, in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._running = True
        self._resume()

    async def stop(self) -> None:
        """Stop in this order, so that no client that has connected is reset before its request is answered:

        1. accept all connections of the kernel's backlog;
        2. close the listener;
        3. read the requests that have arrived, and wait a short time for those of other new connections;
        4. end unfinished handshakes.
        """
        self._accept(BACKLOG)
        self._running = False
        self._pause()
        self._listener.close()
        for _ in range(_TURNS):  # however long they take on a busy machine
            await asyncio.sleep(0)
        until = self._loop.time() + _GRACE.total_seconds()
        while self._awaits_first_requests() and self._loop.time() < until:
            await asyncio.sleep(_POLL_SECONDS)
        for task in self._open.values():
            task.cancel()

    def answering(self, connection: Connection) -> None:
        """Record that a connection has an unanswered request, and must not be closed for another."""
        self._waiting.pop(connection, None)

    def waiting(self, connection: Connection) -> None:
        """Record that a connection waits for its next request."""
        if connection in self._open:
            self._waiting[connection] = self._loop.time()
            self._resume()

    def lost(self, connection: Connection) -> None:
        """Record that a connection is closed."""
        self._waiting.pop(connection, None)
        if self._open.pop(connection, None) is not None:
            self._resume()

    def _awaits_first_requests(self) -> bool:
        """Return whether a connection has waited for a request for less than the time that a client needs."""
        newest = next(reversed(self._waiting.values()), float("-inf"))
        return newest + _GRACE.total_seconds() > self._loop.time()

    def _accept(self, at_once: int) -> None:
        for _ in range(at_once):
            if len(self._open) >= self._limit and not self._may_close_one():
                return
            try:
                accepted, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:  # out of descriptors or of memory
                self._warn("cannot accept a connection (%s); trying again", exc.strerror)
                self._pause()
                self._loop.call_later(_RETRY.total_seconds(), self._resume)
                return
            if len(self._open) >= self._limit:
                self._close_longest_waiting()
            self._connect(accepted)

    def _connect(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        connection = self._make()
        connection.owner = self
        connecting = self._loop.connect_accepted_socket(lambda: connection, accepted, **self._tls)
        task = self._loop.create_task(connecting)
        self._waiting[connection] = self._loop.time()
        self._open[connection] = task
        task.add_done_callback(functools.partial(self._connected, connection, accepted))

    def _connected(self, connection: Connection, accepted: socket.socket, task: _Connecting) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            accepted.close()
            self.lost(connection)
        if error is not None and not isinstance(error, OSError):
            raise error
        # An OSError, such as ssl.SSLError, is a client that does not speak TLS or disconnects during the handshake.

    def _may_close_one(self) -> bool:
        """Return whether a connection has waited long enough to be closed; else pause until one has."""
        if not self._waiting:
            self._pause()
            return False
        due = next(iter(self._waiting.values())) + _GRACE.total_seconds()
        if due > self._loop.time():
            self._pause()
            self._loop.call_at(due, self._resume)
            return False
        return True

    def _close_longest_waiting(self) -> None:
        self._warn("%d connections are open; closing the one that waits longest for a request", len(self._open))
        longest = next(iter(self._waiting))
        del self._waiting[longest]
        task = self._open.pop(longest)
        if not task.done():
            task.cancel()
        else:
            longest.abort()

    def _pause(self) -> None:
        if self._accepts:
            self._accepts = False
            self._loop.remove_reader(self._listener.fileno())

    def _resume(self) -> None:
        if self._running and not self._accepts:
            self._accepts = True
            self._loop.add_reader(self._listener.fileno(), self._accept, self._at_once)

    def _warn(self, sentence: str, *args: object) -> None:
        """Log a sentence, at most once a minute."""
        now = time.monotonic()
        if now - self._warned >= _WARN_EVERY.total_seconds():
            self._warned = now
            log.warning(sentence, *args)
