"""A server that is hostile costs neither memory nor the thread that asks it."""

import contextlib
import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from anabranch.core.bounded_session import BoundedSession, LateAnswerError, LongAnswerError


@pytest.fixture
def server_of():
    """`server_of(content, forever)`: serve an answer, which goes on with `forever` without end; returns the URL."""
    servers: list[ThreadingHTTPServer] = []
    ended = threading.Event()

    def serve(content, forever=b""):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                with contextlib.suppress(OSError):
                    self.wfile.write(content)
                    while forever and not ended.wait(0.005):
                        self.wfile.write(forever)

            def log_message(self, *_): ...

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    ended.set()
    for server in servers:
        server.shutdown()
        server.server_close()


def answer(content, *headers):
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(content), *headers]
    return b"\r\n".join([*lines, b"", content])


def test_an_answer_is_returned_as_it_was_sent(server_of):
    packed = gzip.compress(bytes(9_000_000))
    url = server_of(answer(packed, b"Content-Encoding: gzip"))
    with BoundedSession() as session:
        for _ in range(2):
            response = session.post(url, data=b"spans", timeout=60.0)
            assert (response.status_code, response.content) == (200, packed)


def test_a_long_answer_is_an_error(server_of):
    with BoundedSession() as session:
        with pytest.raises(LongAnswerError, match="longer than 65536 bytes"):
            session.post(server_of(answer(bytes(70_000))), data=b"spans", timeout=60.0)


def test_an_answer_that_breaks_off_is_an_error(server_of):
    begin = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nspans\r\nno length\r\n"
    with BoundedSession() as session, pytest.raises(requests.ConnectionError, match="broke off"):
        session.post(server_of(begin), data=b"spans", timeout=60.0)


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: ", b""])
@pytest.mark.parametrize("forever", [b" ", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_an_answer_without_end_is_an_error_at_the_timeout(server_of, begin, forever):
    with BoundedSession() as session:
        with pytest.raises(LateAnswerError, match=r"within 0\.1 s"):
            session.post(server_of(begin, forever), data=b"spans", timeout=0.1)
        response = session.post(server_of(answer(b"")), data=b"spans", timeout=60.0)
        assert response.status_code == 200


@pytest.mark.parametrize("begin", [b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Encoding: gzip\r\n\r\n"])
def test_an_answer_that_redirects_is_bounded_too(server_of, begin):
    with BoundedSession(most_bytes=100) as session, pytest.raises(LongAnswerError):
        session.post(server_of(begin, gzip.compress(bytes(9_000_000))), data=b"spans", timeout=60.0)


def test_an_answer_through_a_proxy_is_bounded_too(server_of, monkeypatch):
    monkeypatch.setenv("http_proxy", server_of(b"HTTP/1.1 200 OK\r\nX: ", b" "))
    monkeypatch.setenv("no_proxy", "")
    with BoundedSession() as session, pytest.raises(LateAnswerError):
        session.post("http://of.another.host", data=b"spans", timeout=0.1)
