"""Requests whose times of arrival are fixed in advance, sent by a separate process."""

import multiprocessing
import os
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import commands

_MOST_CONNECTIONS = 256
_PATIENCE_SECONDS = 10.0
_LEAD_SECONDS = 0.05


@dataclass(frozen=True)
class Answers:
    """The results of a turn's requests.

    Attributes:
        seconds: from arrival to the end of the answer, float64, in the order of the answers with status 200.
        refused: the others, by status; 0: the connection broke, or no answer came in time.
        late_p99: 99th percentile of the delay between arrival and sending, in seconds: the part of the generator in
            `seconds`.
    """

    seconds: NDArray[np.float64]
    refused: Counter[int]
    late_p99: float

    @property
    def failed(self) -> int:
        """Number of requests without a prediction."""
        return self.refused.total()

    def percentile(self, q: float) -> float:
        """Return a percentile of the seconds."""
        return float(np.percentile(self.seconds, q))


class Load:
    """Sends one request repeatedly on command; ends with the context.

    Connections are kept alive. There are enough of them that no request waits for the answer to another.
    """

    def __init__(self, url: str, body: bytes, headers: dict[str, str], cores: set[int] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        parts = urlsplit(url)
        head = {"Host": parts.netloc, "Content-Length": str(len(body)), **headers}
        lines = [f"POST {parts.path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        message = "\r\n".join(lines).encode() + body
        address = (parts.hostname, parts.port)
        self._process = context.Process(target=_serve, args=(theirs, address, message, cores), daemon=True)
        self._process.start()
        theirs.close()
        self._turns = 0

    def __enter__(self) -> "Load":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        commands.end(self._ours, self._process)

    def flood(self, clients: int, seconds: float) -> Answers:
        """Send for `seconds` from `clients` connections, each of which sends again after its answer."""
        self._ours.send((clients, seconds))
        return self.end()

    def begin(self, rate: float, seconds: float, *, again: bool = False) -> None:
        """Start sending `rate` requests a second for `seconds`, at random times: each turn has others, unless it has
        those of the turn before `again`; each run has the same."""
        self._turns += not again
        generator = np.random.default_rng(self._turns)
        self._ours.send(np.sort(generator.random(round(rate * seconds)) * seconds))

    def end(self) -> Answers:
        """Wait for the last answer."""
        answers: Answers = self._ours.recv()
        return answers

    def turn(self, rate: float, seconds: float, *, again: bool = False) -> Answers:
        """Send, and wait for the answers."""
        self.begin(rate, seconds, again=again)
        return self.end()


def _serve(connection: Connection, address: tuple[str, int], message: bytes, cores: set[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    client = _Client(address, message)
    for arrivals in commands.received(connection):
        connection.send(client.flood(*arrivals) if isinstance(arrivals, tuple) else client.turn(arrivals))


class _Client:
    """One thread and `select`, which takes microseconds where `epoll` of Python takes whole milliseconds."""

    def __init__(self, address: tuple[str, int], message: bytes) -> None:
        self._address = address
        self._message = message
        self._free: list[socket.socket] = []

    def turn(self, arrivals: Sequence[float]) -> Answers:
        begin = time.perf_counter() + _LEAD_SECONDS
        busy: dict[socket.socket, tuple[float, bytearray]] = {}
        refused: Counter[int] = Counter()
        seconds, late, sent = [], [], 0
        while sent < len(arrivals) or busy:
            now = time.perf_counter()
            due = begin + arrivals[sent] if sent < len(arrivals) else now + _PATIENCE_SECONDS
            if now >= due and len(busy) < _MOST_CONNECTIONS:
                late.append(now - due)
                sent += 1
                try:
                    busy[self._send()] = (due, bytearray())
                except OSError:
                    refused[0] += 1
                continue
            readable, _, _ = select.select(list(busy), [], [], max(0.0, due - now))
            if not readable and sent == len(arrivals):
                refused[0] += len(busy)
                for connection in busy:
                    connection.close()
                break
            for connection in readable:
                since, held = busy[connection]
                status = _received(connection, held)
                if status is None:
                    continue
                del busy[connection]
                if status == 200:
                    seconds.append(time.perf_counter() - since)
                else:
                    refused[status] += 1
                if status:
                    self._free.append(connection)
                else:
                    connection.close()
        return Answers(np.array(seconds), refused, float(np.percentile(late, 99)) if late else 0.0)

    def flood(self, clients: int, seconds: float) -> Answers:
        end = time.perf_counter() + seconds
        busy: dict[socket.socket, tuple[float, bytearray]] = {}
        taken: list[float] = []
        refused: Counter[int] = Counter()

        def ask(now: float) -> None:
            try:
                busy[self._send()] = (now, bytearray())
            except OSError:
                refused[0] += 1  # this client gives up

        for _ in range(clients):
            ask(time.perf_counter())
        while busy:
            readable, _, _ = select.select(list(busy), [], [], _PATIENCE_SECONDS)
            if not readable:
                refused[0] += len(busy)
                for connection in busy:
                    connection.close()
                break
            for connection in readable:
                since, held = busy[connection]
                status = _received(connection, held)
                if status is None:
                    continue
                del busy[connection]
                now = time.perf_counter()
                if status == 200 and now <= end:
                    taken.append(now - since)
                if status != 200:
                    refused[status] += 1
                if status:
                    self._free.append(connection)
                else:
                    connection.close()
                if now < end:
                    ask(now)
        return Answers(np.array(taken), refused, 0.0)

    def _send(self) -> socket.socket:
        connection = self._kept() or socket.create_connection(self._address, _PATIENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(self._message)
        return connection

    def _kept(self) -> socket.socket | None:
        """Return an open connection: the server may have closed connections that were not used for minutes."""
        while self._free:
            connection = self._free.pop()
            if not select.select([connection], [], [], 0)[0]:
                return connection
            connection.close()
        return None


def _received(connection: socket.socket, held: bytearray) -> int | None:
    """Take what has come; return the status once the answer is whole, 0 for a connection that broke."""
    try:
        data = connection.recv(65536)
    except OSError:
        return 0
    if not data:
        return 0
    held += data
    head, end, body = bytes(held).partition(b"\r\n\r\n")
    if not end:
        return None
    lines = head.lower().split(b"\r\n")
    length = next((int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")), 0)
    complete = body.endswith(b"0\r\n\r\n") if b"transfer-encoding: chunked" in lines else len(body) >= length
    return int(lines[0].split()[1]) if complete else None
