"""The learner's status server: which requests it answers, and that no client can keep it from answering."""

import contextlib
import ctypes
import http.client
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from prometheus_client import CollectorRegistry

import anabranch.learner.status.status_server
from anabranch.learner.status import liveness
from anabranch.learner.status.liveness import LivenessServer
from anabranch.learner.status.status_server import serve_status
from tests.support.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def port():
    with serve_status("127.0.0.1:0", "secret", CollectorRegistry(), list) as port:
        yield port


def metrics_status(port, authorization):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics", headers={"Authorization": authorization} if authorization else {})
        return connection.getresponse().status


def health(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
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
def test_without_a_token_requests_for_another_host_are_refused(token, host, status):
    with serve_status("127.0.0.1:0", token, CollectorRegistry(), list) as port:
        for path in ("/healthz", "/metrics"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
            connection.request("GET", path, headers={"Host": host, "Authorization": "Bearer secret"})
            assert connection.getresponse().status == status
            connection.close()


def test_metrics_require_the_read_or_the_admin_token_as_serving_does():
    with serve_status("127.0.0.1:0", "read", CollectorRegistry(), list, admin_token="admin") as port:
        for header in ("Bearer read", "bearer read", "BEARER read", "Bearer admin", "bearer admin"):
            assert metrics_status(port, header) == 200, header
        for header in ("", "Bearer", "Bearer ", "Bearer rea", "Bearer readd", "Basic read", "read", "Bearer \xff"):
            assert metrics_status(port, header) == 401, header


def test_an_empty_admin_token_is_not_accepted():
    with serve_status("127.0.0.1:0", "read", CollectorRegistry(), list) as port:
        assert [metrics_status(port, header) for header in ("", "Bearer ", "Bearer admin")] == [401] * 3


def test_silent_connections_are_closed_for_new_ones_and_use_few_threads(port):
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS))
            for _ in range(100)
        ]
        assert health(port) == 200
        assert silent[0].recv(1) == b""
        # The thread of one that was closed ends a moment later.
        wait_until(
            lambda: threading.active_count() - before <= anabranch.learner.status.status_server._MOST_CONNECTIONS
        )


@pytest.mark.slow
def test_a_slow_client_does_not_extend_the_time_limit_of_its_connection(port, monkeypatch):
    monkeypatch.setattr(anabranch.learner.status.status_server, "_PATIENCE", timedelta(milliseconds=300))
    monkeypatch.setattr(anabranch.learner.status.status_server._QuietHandler, "timeout", None)  # of one read
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert slow.recv(1) == b""


def livez(port, method="GET", path="/livez", host="localhost"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, headers={"Host": host})
        reply = connection.getresponse()
        return reply.status, reply.read()


def test_livez_says_whether_the_loop_hangs():
    sentences: list[str] = []
    with serve_status("127.0.0.1:0", "", CollectorRegistry(), list, hang=lambda: next(iter(sentences), None)) as port:
        for path in ("/livez", "/livez?probe=1"):
            assert livez(port, path=path) == (200, b'{"ok": true, "problems": []}')
        assert livez(port, "HEAD") == (200, b"")
        assert livez(port, host="127.0.0.2")[0] == 200
        assert livez(port, host="elsewhere.example")[0] == 403
        assert livez(port, path="/livezz")[0] == 404
        sentences.append("the training loop has made no progress")
        wait_until(lambda: livez(port)[0] == 503)
        assert livez(port) == (503, b'{"ok": false, "problems": ["the training loop has made no progress"]}')
        assert livez(port, "HEAD") == (503, b"")


_ASK = """import socket
with socket.create_connection(("127.0.0.1", {port}), 20) as connection:
    connection.sendall(b"GET /livez HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    print(connection.makefile().read())
"""


def test_livez_is_answered_while_no_thread_of_the_process_runs(port, tmp_path):
    """A training thread that has Python's lock and gets no processor stops all other threads with it."""
    assert health(port) == 200
    (tmp_path / "ask.py").write_text(_ASK.format(port=port))
    command = shlex.join([sys.executable, "-I", "-S", str(tmp_path / "ask.py")])
    # Called with the lock, unlike all else that waits for a process.
    assert ctypes.PyDLL(None).system(f"{command} > {shlex.quote(str(tmp_path / 'reply'))}".encode()) == 0
    assert (tmp_path / "reply").read_text().endswith('{"ok": true, "problems": []}\n')


def test_a_process_that_runs_nothing_for_a_minute_hangs(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        answers = LivenessServer(listener, theirs, any_host=True)
        assert answers._reply(with_body=True).startswith(b"HTTP/1.0 200 OK")
        monkeypatch.setattr(liveness, "SILENCE_SECONDS", -1.0)
        reply = answers._reply(with_body=True)
        assert reply.startswith(b"HTTP/1.0 503")
        assert b"nothing in the learner's process has run for 0 s" in reply


def test_the_process_that_answers_is_started_again_after_it_was_killed(monkeypatch):
    started: list[subprocess.Popen[bytes]] = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Started)
    with serve_status("127.0.0.1:0", "secret", CollectorRegistry(), list) as port:
        assert livez(port)[0] == 200
        os.kill(started[0].pid, signal.SIGKILL)
        assert livez(port)[0] == 200
        assert health(port) == 200
    assert len(started) == 2


def test_a_connection_for_which_no_descriptor_is_left_is_dropped_and_the_next_one_is_answered(port, monkeypatch):
    received, lost = socket.recv_fds, []

    def receive(*args):
        data, descriptors, *rest = received(*args)
        if not lost:
            os.close(descriptors[0])
            lost.append(descriptors.pop())
        return data, descriptors, *rest

    monkeypatch.setattr(socket, "recv_fds", receive)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        health(port)
    assert health(port) == 200


def test_an_endless_request_head_is_refused(port, monkeypatch):
    monkeypatch.setattr(anabranch.learner.status.status_server, "_PATIENCE", timedelta(hours=1))
    monkeypatch.setattr(anabranch.learner.status.status_server._QuietHandler, "timeout", None)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n" + b"x: " + b"y" * 30_000 + b"\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_a_client_that_disconnects_without_a_request_is_not_logged(port, capfd):
    before = {*threading.enumerate()}  # of which those of another test may end
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it is a reset
    assert health(port) == 200
    wait_until(lambda: {*threading.enumerate()} <= before, "the end of both connections")
    assert capfd.readouterr().err == ""
