"""The learner's address: who is answered there, and that others cannot keep it from answering."""

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from prometheus_client import CollectorRegistry

import learner.runtime.status_server
from learner.runtime.status_server import serve_status


@pytest.fixture
def port() -> Iterator[int]:
    with serve_status("127.0.0.1:0", "secret", CollectorRegistry(), list) as port:
        yield port


def health(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/healthz")
        return connection.getresponse().status


@pytest.mark.parametrize(
    ("token", "host", "status"),
    [
        ("", "localhost", 200),
        ("", "[::1]:8001", 200),
        ("", "elsewhere.example:8001", 403),
        ("secret", "elsewhere.example:8001", 200),
    ],
)
def test_without_a_token_no_page_is_answered_whose_name_was_made_to_lead_here(
    token: str, host: str, status: int
) -> None:
    with serve_status("127.0.0.1:0", token, CollectorRegistry(), list) as port:
        for path in ("/healthz", "/metrics"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", path, headers={"Host": host, "Authorization": "Bearer secret"})
            assert connection.getresponse().status == status
            connection.close()


def test_connections_that_say_nothing_are_closed_for_others_and_hold_few_threads(port: int) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(100)]
        assert health(port) == 200
        assert silent[0].recv(1) == b""
        assert threading.active_count() - before <= 2 * learner.runtime.status_server._MOST_CONNECTIONS


def test_a_byte_now_and_then_does_not_lengthen_a_connections_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner.runtime.status_server, "_PATIENCE", timedelta(milliseconds=300))
    with socket.create_connection(("127.0.0.1", port), timeout=5) as slow:  # less than a read may take by itself
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert slow.recv(1) == b""


def test_a_head_without_end_is_not_kept(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n" + b"x: " + b"y" * 30_000 + b"\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_a_client_that_leaves_without_a_request_leaves_no_line(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it is a reset
    assert health(port) == 200
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert threading.active_count() == before
    assert capfd.readouterr().err == ""
