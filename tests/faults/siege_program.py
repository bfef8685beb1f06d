"""`python -m tests.faults.siege_program PORT STATUS_PORT SECONDS`: all attacks on a pipeline's HTTP addresses at once.

A separate process at nice 10, which connects to this machine alone. Each attack has a thread and keeps to a rate, so
that other clients are affected by the server and not by a lack of CPU time.
"""

import contextlib
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

HOST = "127.0.0.1"
INFER = b"POST /v2/models/faults/infer HTTP/1.1\r\nHost: localhost\r\n"
X = b'{"name":"x","shape":[1,3],"datatype":"FP32","data":[1,0,0]}'
LARGE = 15_900_000
"""Bytes of the largest requests, a little less than `serving.max_body_bytes`."""
SILENT, SILENT_STATUS, UNREAD = 1200, 200, 40
"""Connections that are open at a time."""


def paced(until: float, seconds: float) -> Iterator[None]:
    """Yield every `seconds` until the time `until`."""
    while (now := time.monotonic()) < until:
        yield
        time.sleep(max(0.0, min(now + seconds, until) - time.monotonic()))


class Held:
    """At most `most` open connections; a new one closes the oldest."""

    def __init__(self, port: int, most: int) -> None:
        self._port, self._most = port, most
        self.open: list[socket.socket] = []

    def add(self, first: bytes = b"") -> socket.socket:
        """Open one more, and send `first`."""
        if len(self.open) >= self._most:
            self.open.pop(0).close()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(10)
        client.connect((HOST, self._port))
        self.open.append(client)
        client.sendall(first)
        return client


def silent(port: int, status: int, until: float) -> None:
    """Connections that send nothing, and some that send a byte of a head now and again."""
    serving, learner = Held(port, SILENT), Held(status, SILENT_STATUS)
    dripping = Held(port, 50), Held(status, 50)
    for turn, _ in enumerate(paced(until, 0.02)):
        attempt(lambda: [serving.add() for _ in range(2)])
        attempt(learner.add)
        if turn % 10 == 0:
            attempt(lambda: [held.add(b"GET / HTTP/1.1\r\nX: ") for held in dripping])
            for client in [client for held in dripping for client in held.open]:
                attempt(lambda client=client: client.sendall(b"a"))  # type: ignore[misc]


def tiny_chunks(port: int, _status: int, until: float) -> None:
    """A chunked body of chunks of one byte, 60 kB a second, for another machine's name and for this one's."""
    heads = [INFER, INFER.replace(b"localhost", b"elsewhere.example")]
    held = Held(port, 1)
    for turn, _ in enumerate(paced(until, 0.1)):
        if turn % 10 == 0:
            attempt(lambda turn=turn: held.add(heads[turn // 10 % 2] + b"Transfer-Encoding: chunked\r\n\r\n"))  # type: ignore[misc]
        attempt(lambda: held.open[-1].sendall(b"1\r\na\r\n" * 1000))


def endless_head(port: int, _status: int, until: float) -> None:
    """A head of 1 MB a second."""
    held = Held(port, 1)
    fields = b"".join(b"h%05d: v\r\n" % number for number in range(10_000))
    for turn, _ in enumerate(paced(until, 0.1)):
        if turn % 10 == 0:
            attempt(lambda: held.add(b"GET / HTTP/1.1\r\nHost: localhost\r\n"))
        attempt(lambda: held.open[-1].sendall(fields))


def large_requests(port: int, _status: int, until: float) -> None:
    """A request of 16 MB each 5 s, whose bytes are not the model's data."""
    tensor = X.replace(b"[1,3]", b"[" + b"0," * (LARGE // 2) + b"0]")
    bodies = [
        b'{"inputs":['
        + X
        + b'],"parameters":{"timeout_ms":1,"min_trained_through":"'
        + b"e:0=1," * (LARGE // 6)
        + b'"}}',
        b'{"inputs":[' + tensor + b"]}",
        b'{"inputs":[' + X + b'],"outputs":[' + b'{"name":"prediction"},' * (LARGE // 22) + b'{"name":"prediction"}]}',
        b'{"inputs":[' + X + b'],"id":"' + b"i" * LARGE + b'"}',
    ]
    held = Held(port, UNREAD)  # the replies are not read
    for turn, _ in enumerate(paced(until, 5.0)):
        body = bodies[turn % len(bodies)]
        attempt(lambda body=body: held.add(INFER + b"Content-Length: %d\r\n\r\n" % len(body) + body))  # type: ignore[misc]


def unread(port: int, _status: int, until: float) -> None:
    """Requests whose replies, of 0.4 MB, are not read."""
    rows = 4000
    data = b",".join([b"1,0,0"] * rows)
    body = b'{"inputs":[{"name":"x","shape":[%d,3],"datatype":"FP32","data":[%s]}]}' % (rows, data)
    held = Held(port, UNREAD)
    for _ in paced(until, 0.5):
        attempt(lambda: held.add(INFER + b"Content-Length: %d\r\n\r\n" % len(body) + body))


def log_lines(port: int, status: int, until: float) -> None:
    """Bytes that are not HTTP, and upgrades that are not supported, a hundred times a second."""
    upgrade = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    for _ in paced(until, 0.02):
        for address, first in ((port, b"\0\r\n\r\n"), (port, upgrade), (status, b"\0\r\n\r\n")):
            attempt(lambda address=address, first=first: Held(address, 1).add(first).close())  # type: ignore[misc]


ATTACKS: tuple[Callable[[int, int, float], None], ...] = (
    silent,
    tiny_chunks,
    endless_head,
    large_requests,
    unread,
    log_lines,
)


def attempt(act: Callable[[], object]) -> None:
    """Call `act`; the server may close the connection."""
    with contextlib.suppress(OSError, IndexError):
        act()


def main() -> None:
    """Run all attacks for the seconds of the command line."""
    port, status, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    os.nice(10)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=attack, args=(port, status, until)) for attack in ATTACKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
