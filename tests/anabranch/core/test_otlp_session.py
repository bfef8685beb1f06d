"""A collector of spans that is hostile costs neither memory nor the thread that exports."""

import contextlib
import gzip
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from anabranch.core.tracing.otlp_session import BoundedSession


@pytest.fixture
def collector() -> Iterator[Callable[[bytes, bytes], str]]:
    """`collector(content, forever)`: serve an answer, which goes on with `forever` without end; returns the URL."""
    servers: list[ThreadingHTTPServer] = []
    ended = threading.Event()

    def serve(content: bytes, forever: bytes = b"") -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                with contextlib.suppress(OSError):
                    self.wfile.write(content)
                    while forever and not ended.wait(0.005):
                        self.wfile.write(forever)

            def log_message(self, *_: object) -> None: ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    ended.set()
    for server in servers:
        server.shutdown()
        server.server_close()


def answer(content: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(content), *headers]
    return b"\r\n".join([*lines, b"", content])


def test_an_answer_is_returned_as_it_was_sent(collector) -> None:
    packed = gzip.compress(bytes(9_000_000))
    url = collector(answer(packed, b"Content-Encoding: gzip"))
    with BoundedSession() as session:
        for _ in range(2):
            response = session.post(url, data=b"spans", timeout=60.0)
            assert (response.status_code, response.content) == (200, packed)


def test_a_long_answer_is_an_error(collector) -> None:
    with BoundedSession() as session:
        with pytest.raises(requests.ConnectionError, match="longer than 65536 bytes"):
            session.post(collector(answer(bytes(70_000))), data=b"spans", timeout=60.0)


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: ", b""])
@pytest.mark.parametrize("forever", [b" ", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_an_answer_without_end_is_an_error_at_the_timeout(collector, begin: bytes, forever: bytes) -> None:
    with BoundedSession() as session:
        with pytest.raises(requests.ConnectionError):
            session.post(collector(begin, forever), data=b"spans", timeout=0.1)
        response = session.post(collector(answer(b"")), data=b"spans", timeout=60.0)
        assert response.status_code == 200
