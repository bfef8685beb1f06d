"""The learner's status server: `/metrics`, `/healthz` and `/livez`.

A separate process accepts connections (see `liveness`): it answers `/livez`, also while no thread of this process
runs, and passes on all others.
"""

import contextlib
import errno
import io
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from anabranch.core.net import bind_error, names_loopback
from anabranch.core.tokens import bearer_token, is_token

_MOST_CONNECTIONS = 16
"""Largest number of open connections, each with a thread; one more closes the oldest."""
_PATIENCE = timedelta(seconds=10)
"""Longest duration of a connection."""
_MOST_HEAD_BYTES = 16_384
_SAY_EVERY = timedelta(seconds=1)
"""How often the process that answers `/livez` is informed that this one runs."""

log = logging.getLogger("anabranch.learner")


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        self._open: dict[socket.socket, float] = {}
        """Connections with the time at which each has to end, the oldest first."""
        self._lock = threading.Lock()
        self._answers: subprocess.Popen[bytes] | None = None
        self._said, self._say_at = b"", 0.0
        super().__init__(*args)

    def answer_livez(self, hang: Callable[[], str | None], *, any_host: bool) -> None:
        """Let a separate process accept the connections from now on, and answer `/livez` by what `hang` returns."""
        self._hang, self._any_host = hang, any_host
        self._listener = self.socket
        # Both ends stay open here, for the next process should this one be killed.
        self.socket, self._channel = socket.socketpair()
        self._start_answers()

    def _start_answers(self) -> None:
        descriptors = self._listener.fileno(), self._channel.fileno()
        script = str(Path(__file__).with_name("liveness.py"))
        self._answers = subprocess.Popen(
            [sys.executable, "-I", "-S", script, *map(str, descriptors), str(int(self._any_host))],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
        )

    def get_request(self) -> tuple[socket.socket, Any]:
        """Take a connection that the other process has accepted.

        Raises:
            OSError: it has ended, or this process has no descriptor left for it.
        """
        _, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1)
        if not descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(True)
        try:
            return connection, connection.getpeername()
        except OSError:
            connection.close()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                self._end(next(iter(self._open)))
            self._open[request] = time.monotonic() + _PATIENCE.total_seconds()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End the connections whose time is over, and say that this process runs; called several times a second."""
        now = time.monotonic()
        self._say(now)
        with self._lock:
            for request in [request for request, end in self._open.items() if end <= now]:
                self._end(request)

    def _say(self, now: float) -> None:
        """Write whether the training loop hangs to the process that answers `/livez`; start it again if it is gone."""
        hang = self._hang()
        said = json.dumps({"ok": hang is None, "problems": [] if hang is None else [hang]}).encode() + b"\n"
        if said == self._said and now < self._say_at:
            return
        self._said, self._say_at = said, now + _SAY_EVERY.total_seconds()
        assert self._answers is not None
        if self._answers.poll() is not None:
            code = self._answers.returncode
            log.warning("the process that answers /livez has ended with code %d; another one is started", code)
            with contextlib.suppress(OSError):  # no process may be started for now: again a second later
                self._start_answers()
        with contextlib.suppress(BlockingIOError):  # it does not read for now
            self.socket.send(said, socket.MSG_DONTWAIT)

    def server_close(self) -> None:
        """End the other process, and close all sockets."""
        super().server_close()
        if self._answers is not None:
            self._answers.kill()
            self._answers.wait()
            self._channel.close()
            self._listener.close()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: clients that send no request are expected."""

    def _end(self, request: socket.socket) -> None:
        """Wake the connection's thread, which closes it."""
        del self._open[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = _PATIENCE.total_seconds()

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(_head(self.connection))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 the name is the base class's
        """Log nothing: scrapes are frequent."""


def _head(connection: socket.socket) -> bytes:
    """Receive a request's head; raises ConnectionError when it is too long, or the connection ends before."""
    head = bytearray()
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
        received = connection.recv(4096)
        head += received
        if not received or len(head) > _MOST_HEAD_BYTES:
            raise ConnectionError("no request")
    return bytes(head)


@contextlib.contextmanager
def serve_status(
    address: str,
    token: str,
    registry: CollectorRegistry,
    problems: Callable[[], list[str]],
    warnings: Callable[[], list[str]] = list,
    *,
    hang: Callable[[], str | None] = lambda: None,
    admin_token: str = "",
) -> Iterator[int]:
    """Listen on `address` (`HOST:PORT`, port 0 takes a free one) in separate threads, and yield the port.

    `/healthz` answers 200 when `problems` returns nothing, else 503 with its sentences. Both answers contain those of
    `warnings`. `/livez` does so for `hang` alone, a problem that only a restart heals. `/metrics` requires `token` or
    `admin_token` as a bearer token. If `token` is empty, which only loopback allows, requests for another machine get
    403. All answer also while the training loop hangs.

    Raises:
        SettingsError: it cannot bind to the address.
    """
    metrics = make_wsgi_app(registry)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not token and not names_loopback(environ.get("HTTP_HOST", "")):
            start_response("403 Forbidden", [("Content-Type", "application/json")])
            return [json.dumps({"error": "ask for localhost, or set serving.tokens.read"}).encode()]
        if environ["PATH_INFO"] in ("/healthz", "/livez"):
            healthz = environ["PATH_INFO"] == "/healthz"
            sentences = problems() if healthz else [sentence for sentence in [hang()] if sentence]
            status = "503 Service Unavailable" if sentences else "200 OK"
            answer: dict[str, Any] = {"ok": not sentences, "problems": sentences}
            if healthz and (degraded := warnings()):
                answer["warnings"] = degraded
            start_response(status, [("Content-Type", "application/json")])
            return [json.dumps(answer).encode()]
        if environ["PATH_INFO"] == "/metrics":
            given = bearer_token(environ.get("HTTP_AUTHORIZATION", ""))
            if token and not is_token(given, token, admin_token):
                start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
                return [b""]
            page: Iterable[bytes] = metrics(environ, start_response)
            return page
        start_response("404 Not Found", [("Content-Type", "application/json")])
        return [json.dumps({"error": "there are /metrics, /healthz and /livez"}).encode()]

    host, _, port = address.rpartition(":")
    try:
        kind = _Server6 if ":" in host else _Server
        server = make_server(host.strip("[]"), int(port), application, kind, _QuietHandler)
    except OSError as exc:
        raise bind_error("learner.status", "learner.status", host, int(port), exc) from exc
    server.answer_livez(hang, any_host=bool(token))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="status", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
