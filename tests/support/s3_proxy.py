"""A proxy between an S3 client and its server, with faults by script.

    with S3Proxy(s3.options["endpoint"]) as proxy:
        proxy.fault = lambda method, path: SLOW_DOWN if method == "PUT" else None

Requests are signed with the proxy's address, which the server accepts, since the header `Host` is passed on.
"""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit

_PIECE = 64 * 1024


@dataclass(frozen=True)
class Answer:
    """An error of S3 that the proxy answers, without passing the request on."""

    status: int
    code: str


SLOW_DOWN = Answer(503, "SlowDown")
INTERNAL_ERROR = Answer(500, "InternalError")
NO_REPLY = Answer(0, "the server does what it is asked to, and its reply is lost")
CLOSED = Answer(-1, "the connection is closed before the request")

Fault = Callable[[str, str], Answer | None]
"""Returns what happens to a request, by its method and its path; None: it is passed on."""


def no_fault(method, path):
    """Pass each request on."""
    return


def some_of(answer, fails, of, method=""):
    """Return a fault that gives the first `fails` of each `of` requests this answer."""
    lock, count = threading.Lock(), -1

    def fault(each, path):
        nonlocal count
        if method and each != method:
            return None
        with lock:
            count += 1
            return answer if count % of < fails else None

    return fault


class Response(NamedTuple):
    """What a server answers."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class S3Proxy:
    """Passes HTTP requests on to `endpoint` until its context ends; clients use `endpoint` of this."""

    def __init__(self, endpoint):
        self._target = urlsplit(endpoint).netloc
        self.fault: Fault = no_fault
        self.bytes_per_second = float("inf")
        """Of all requests together."""
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request, also of those with a fault."""
        self.answered: list[Answer] = []
        """The faults so far."""
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._server = _Server(self)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def options(self, options):
        """Return the options of a prefix with this endpoint."""
        return {**options, "endpoint": self.endpoint}

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def decide(self, method, path):
        """Record a request, and return what happens to it."""
        self.requests.append((method, path))
        if (answer := self.fault(method, path)) is not None:
            self.answered.append(answer)
        return answer

    def pass_on(self, method, path, headers, body):
        """Send a request to the server, and return its response."""
        with contextlib.closing(http.client.HTTPConnection(self._target, timeout=60)) as connection:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            response = connection.getresponse()
            return Response(response.status, dict(response.getheaders()), response.read())

    def throttle(self, size):
        """Wait as long as `size` bytes take, after those of other requests."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.bytes_per_second
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy):
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request, client_address):
        """Log nothing: clients close connections."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def _answer(self):
        proxy = self.server.proxy
        answer = proxy.decide(self.command, self.path)
        if answer == CLOSED:
            self._hang_up()
            return
        body = self._body(proxy)
        if answer is not None and answer != NO_REPLY:
            content = f"<Error><Code>{answer.code}</Code><Message>by script</Message></Error>".encode()
            self._reply(
                answer.status, {"Content-Type": "application/xml", "Content-Length": str(len(content))}, content
            )
            return
        status, headers, content = proxy.pass_on(self.command, self.path, dict(self.headers.items()), body)
        if answer == NO_REPLY:
            self._hang_up()
            return
        headers = {k: v for k, v in headers.items() if k.lower() not in ("transfer-encoding", "connection")}
        if self.command != "HEAD":
            headers["Content-Length"] = str(len(content))
        self._reply(status, headers, content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

    def _body(self, proxy):
        left, pieces = int(self.headers.get("Content-Length") or 0), []
        while left:
            piece = self.rfile.read(min(left, _PIECE))
            left -= len(piece)
            proxy.throttle(len(piece))
            pieces.append(piece)
        return b"".join(pieces)

    def _reply(self, status, headers, content):
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _hang_up(self):
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format, *args):  # noqa: A002 the name is the base class's
        """Log nothing."""
