"""A TCP balancer that learns of servers as Kubernetes' endpoints do: by their readiness, and with a delay."""

import contextlib
import socket
import threading
import time
from itertools import count

import httpx

from tests.support.waiting import PATIENCE_SECONDS

_PIECE = 65_536


class Balancer:
    """Connects clients with the servers that were ready a while ago, in turns. A context manager around its threads."""

    def __init__(self, addresses, delay, every=0.1):
        """`delay` seconds pass between a change of readiness and its effect, besides the `every` of polls."""
        self._addresses = addresses
        self._delay = delay
        self._every = every
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._history: list[tuple[float, list[str]]] = []
        self._turns = count()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._accept, self._poll)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind, error, trace):
        self._stop.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def endpoints(self):
        """Return the servers that were ready `delay` seconds ago."""
        due = time.monotonic() - self._delay
        return next((ready for when, ready in reversed(self._history.copy()) if when <= due), [])

    def _poll(self):
        with httpx.Client(timeout=PATIENCE_SECONDS) as client:  # of a server that is gone the connection is refused
            while not self._stop.wait(self._every):
                ready = [each for each in self._addresses if _is_ready(client, each)]
                self._history.append((time.monotonic(), ready))

    def _accept(self):
        while not self._stop.is_set():
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            endpoints = self.endpoints()
            if not endpoints:
                accepted.close()
                continue
            host, _, port = endpoints[next(self._turns) % len(endpoints)].partition("://")[2].partition(":")
            try:
                server = socket.create_connection((host, int(port)), timeout=10)
            except OSError:
                accepted.close()
                continue
            server.settimeout(None)
            thread = threading.Thread(target=_connect, args=(accepted, server), daemon=True)
            thread.start()
            self._threads.append(thread)


def _is_ready(client, address):
    try:
        return client.get(f"{address}/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def _connect(client, server):
    with client, server:
        other = threading.Thread(target=_pipe, args=(client, server), daemon=True)
        other.start()
        _pipe(server, client)
        other.join()


def _pipe(source, sink):
    """Copy until one end closes; then end both."""
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            sink.sendall(piece)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
