"""A server that is hostile, or always sends in time, costs neither memory nor the thread that asks it."""

import contextlib
import gzip
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from anabranch.core.bounded_session import BoundedSession, LateAnswerError, LongAnswerError
from anabranch.core.socket_deadline import SocketDeadline
from tests.support.waiting import PATIENCE_SECONDS


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
            response = session.post(url, data=b"spans", timeout=PATIENCE_SECONDS)
            assert (response.status_code, response.content) == (200, packed)


def test_a_long_answer_is_an_error(server_of):
    with BoundedSession() as session:
        with pytest.raises(LongAnswerError, match="longer than 65536 bytes"):
            session.post(server_of(answer(bytes(70_000))), data=b"spans", timeout=PATIENCE_SECONDS)


def test_an_answer_that_breaks_off_is_an_error(server_of):
    begin = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nspans\r\nno length\r\n"
    with BoundedSession() as session, pytest.raises(requests.ConnectionError, match="broke off"):
        session.post(server_of(begin), data=b"spans", timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: ", b""])
@pytest.mark.parametrize("forever", [b" ", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_an_answer_without_end_is_an_error_at_the_timeout(server_of, begin, forever):
    with BoundedSession() as session:
        with pytest.raises(LateAnswerError, match=r"within 0\.1 s"):
            session.post(server_of(begin, forever), data=b"spans", timeout=0.1)
        response = session.post(server_of(answer(b"")), data=b"spans", timeout=PATIENCE_SECONDS)
        assert response.status_code == 200


@pytest.mark.parametrize("begin", [b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Encoding: gzip\r\n\r\n"])
def test_an_answer_that_redirects_is_bounded_too(server_of, begin):
    with BoundedSession(most_bytes=100) as session, pytest.raises(LongAnswerError):
        session.post(server_of(begin, gzip.compress(bytes(9_000_000))), data=b"spans", timeout=PATIENCE_SECONDS)


def test_an_answer_through_a_proxy_is_bounded_too(server_of, monkeypatch):
    monkeypatch.setenv("http_proxy", server_of(b"HTTP/1.1 200 OK\r\nX: ", b" "))
    monkeypatch.setenv("no_proxy", "")
    with BoundedSession() as session, pytest.raises(LateAnswerError):
        session.post("http://of.another.host", data=b"spans", timeout=0.1)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_peer_that_always_sends_in_time_is_cut_off_at_the_deadline(pair):
    ours, theirs = pair
    deadline = SocketDeadline()
    deadline.watch(ours)
    ended = threading.Event()

    def drip():
        while not ended.wait(0.005):
            try:
                theirs.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with deadline.ends_within(0.05):
            while ours.recv(65536):
                pass
    finally:
        ended.set()
        thread.join()
    assert deadline.expired
    deadline.close()


def test_an_exchange_that_ends_in_time_leaves_the_connection_as_it_is(pair):
    ours, theirs = pair
    deadline = SocketDeadline()
    deadline.watch(ours)
    with deadline.ends_within(60):
        theirs.send(b"x")
        assert ours.recv(1) == b"x"
    assert not deadline.expired
    deadline.close()
    theirs.send(b"y")
    assert ours.recv(1) == b"y"


def test_a_connection_that_is_opened_after_the_deadline_ends_at_once(pair):
    ours, _ = pair
    deadline = SocketDeadline()
    with deadline.ends_within(0):
        while not deadline.expired:
            pass
        deadline.watch(ours)
        assert ours.recv(1) == b""
    deadline.close()
