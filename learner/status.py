"""The learner's address: `/metrics` and `/healthz`."""

import contextlib
import hmac
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from ingest.errors import SettingsError
from ingest.loopback import names_loopback


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = 10  # seconds in which a request has to come, so that idle connections do not keep their threads

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 the name is the base class's
        """Scrapes are no news."""


@contextlib.contextmanager
def serve_status(
    address: str,
    token: str,
    registry: CollectorRegistry,
    ill: Callable[[], list[str]],
    notes: Callable[[], list[str]] = list,
) -> Iterator[int]:
    """Listen on `address` (`HOST:PORT`, port 0 takes a free one) in threads of its own, and yield the port.

    `/healthz` answers 200 when `ill` returns nothing, else 503 with its sentences; those of `notes` are
    told with either. `/metrics` wants `token` as a bearer token; where that is empty, as only loopback has it, requests
    that are for another machine get 403. Both answer also while the loop hangs.

    Raises:
        SettingsError: the address cannot be listened on.
    """
    metrics = make_wsgi_app(registry)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not token and not names_loopback(environ.get("HTTP_HOST", "")):
            start_response("403 Forbidden", [("Content-Type", "application/json")])
            return [json.dumps({"error": "ask for localhost, or set serving.tokens.read"}).encode()]
        if environ["PATH_INFO"] == "/healthz":
            sentences = ill()
            status = "503 Service Unavailable" if sentences else "200 OK"
            answer = {"ok": not sentences, "ill": sentences} | ({"notes": told} if (told := notes()) else {})
            start_response(status, [("Content-Type", "application/json")])
            return [json.dumps(answer).encode()]
        if environ["PATH_INFO"] == "/metrics":
            given = environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ")
            if token and not hmac.compare_digest(given.encode(), token.encode()):
                start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
                return [b""]
            page: Iterable[bytes] = metrics(environ, start_response)
            return page
        start_response("404 Not Found", [("Content-Type", "application/json")])
        return [json.dumps({"error": "there is /metrics and /healthz"}).encode()]

    host, _, port = address.rpartition(":")
    try:
        kind = _Server6 if ":" in host else _Server
        server = make_server(host.strip("[]"), int(port), application, kind, _QuietHandler)
    except OSError as exc:
        raise SettingsError(f'learner.status = "{address}" cannot be listened on: {exc.strerror or exc}') from exc
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="status", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
