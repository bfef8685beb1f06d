"""A TCP proxy that closes, stalls, delays, throttles and corrupts connections on command.

A Kafka broker advertises its address in its metadata, so that clients would bypass the proxy; the proxy replaces that
address. Both have the same length in Kafka's protocol, where a port is an int32.
"""

import contextlib
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass

_CHUNK = 16_384
_POLL_SECONDS = 0.02
_LARGE = 1_000
"""Smallest chunk that is corrupted, in bytes: the flipped bit is in the contents, not in the length of a reply."""


@dataclass(frozen=True)
class Fault:
    """A fault of every connection.

    Attributes:
        closed: connections are closed, and new ones refused.
        stalled: no bytes pass, and connections stay open.
        delay_seconds: delay of each chunk.
        bytes_per_second: of each connection and direction.
        corrupted: probability that a bit of a large chunk to the client is flipped.
    """

    closed: bool = False
    stalled: bool = False
    delay_seconds: float = 0.0
    bytes_per_second: float = float("inf")
    corrupted: float = 0.0


class Proxy:
    """Forwards to a server until its context ends; clients connect to `address`."""

    def __init__(self, target: str, seed: int = 0) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self._advertised = host.encode() + struct.pack(">i", int(port))
        self._replaced = host.encode() + struct.pack(">i", self._port)
        self._dice = random.Random(seed)
        self._fault = Fault()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        self.corruptions = 0
        """Number of flipped bits."""
        self.connections = 0
        """Number of connections so far."""

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._listener.close()
        self._hang_up()

    def suffer(self, fault: Fault) -> None:
        """Apply a fault from now on, instead of the previous one."""
        self._fault = fault
        if fault.closed:
            self._hang_up()

    def heal(self) -> None:
        """Pass all bytes again."""
        self._fault = Fault()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._fault.closed:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self.connections += 1
            with self._lock:
                self._open |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink, source is server), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, to_client: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK):
                self._wait(len(chunk))
                if to_client:
                    chunk = self._spoiled(chunk.replace(self._advertised, self._replaced))
                sink.sendall(chunk)
        for connection in (source, sink):
            with self._lock:
                self._open.discard(connection)
            _close(connection)

    def _wait(self, size: int) -> None:
        while self._fault.stalled and not self._closed.wait(_POLL_SECONDS):
            pass
        wait = self._fault.delay_seconds + size / self._fault.bytes_per_second
        if wait:
            time.sleep(wait)

    def _spoiled(self, chunk: bytes) -> bytes:
        if len(chunk) < _LARGE or self._dice.random() >= self._fault.corrupted:
            return chunk
        self.corruptions += 1
        index = self._dice.randrange(len(chunk) // 2, len(chunk))
        return chunk[:index] + bytes([chunk[index] ^ 1 << self._dice.randrange(8)]) + chunk[index + 1 :]

    def _hang_up(self) -> None:
        with self._lock:
            hung, self._open = self._open, set()
        for connection in hung:
            _close(connection)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
