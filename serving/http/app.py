"""The web framework's module: routes, tokens, and the HTTP server itself. Imports neither Kafka, Redis nor FAISS.

The routes of the Open Inference Protocol v2, the dashboard with its `/api/...`, and `/metrics`. What they say is
decided elsewhere.
"""

import asyncio
import contextlib
import hmac
import importlib.metadata
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.config import ServingSettings, TlsSettings, Tokens
from serving.dashboard.assets import load_page
from serving.dashboard.status import Overview
from serving.errors import (
    BadRequestError,
    DeadlineExceededError,
    FramingError,
    HeadersError,
    RequestError,
    UnauthorizedError,
    UnsupportedEncodingError,
    shorten,
)
from serving.http.acceptor import Acceptor, most_connections
from serving.http.access_log import HEADER, RequestLog, name_of
from serving.http.auth import check_host, check_order
from serving.http.connection import Connection, H11Connection
from serving.http.listening_socket import tls_errors
from serving.http.openapi import whole
from serving.http.request_body import BodyReader, ClientDisconnectedError, DisconnectWatcher, HeldBytes
from serving.inference.service import Service
from serving.metrics import ServingMetrics
from serving.protocol.codec import HEADER_LENGTH
from serving.reporting.report import ServingReport

log = logging.getLogger("anabranch.serving")

_OPEN = frozenset({"/", "/v2/health/live", "/v2/health/ready"})
_NOT_STORED = {"cache-control": "no-store"}
_NO_SNIFFING = (b"x-content-type-options", b"nosniff")
_CLIENT_CLOSED_REQUEST = 499
_HEADER_LENGTH = HEADER_LENGTH.encode()
_CLOSE = (b"connection", b"close")
_MOST_FIELDS = 100
"""Header fields of a request."""
_AT_ONCE = 64
"""Connections accepted in one turn of the event loop."""
_LARGE_REPLY = 65_536
"""Bytes beyond which the transport says when a reply has been read."""


def build_app(
    service: Service,
    settings: ServingSettings,
    metrics: ServingMetrics,
    overview: Overview,
    report: Callable[[], ServingReport],
) -> ASGIApp:
    """Return the whole application; it belongs to the thread of one event loop."""
    app = FastAPI(title="Anabranch", version=_version(), openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    infer = _Infer(service, settings, metrics)
    for path in ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"):
        app.router.routes.append(Route(path, infer, methods=["POST"]))
    _add_protocol_routes(app, service)
    _add_dashboard(app, overview, report)
    _add_orders(app, service, settings.tokens)
    _add_metrics(app, metrics)
    _add_description(app, service, overview.history.steps, tokens=bool(_tokens(settings.tokens)))
    return _RequestIdMiddleware(_AuthMiddleware(app, settings.tokens, metrics), RequestLog(settings.request_log))


def connection_class() -> type[Connection]:
    """Return the class of connections parsed by httptools where it is installed, else by h11."""
    try:
        from serving.http.httptools_connection import HttpToolsConnection
    except ModuleNotFoundError as exc:
        if exc.name != "httptools":
            raise
        return H11Connection
    return HttpToolsConnection


class HttpServer:
    """uvicorn on a socket that listens already; signals are left to the process."""

    def __init__(self, app: ASGIApp, settings: ServingSettings, folder: Path, shared: bool = False) -> None:
        """`shared` says that other processes take connections from the same socket: each takes one at a time."""
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=math.ceil(settings.timeout.total_seconds()),
                **_tls(settings.tls, folder),
            ),
            connection_class(),
            at_once=1 if shared else _AT_ONCE,
        )

    def load(self) -> None:
        """Read certificate and key; raises SettingsError when they cannot be used."""
        with tls_errors():
            self._server.config.load()

    async def serve(self, listener: socket.socket) -> None:
        """Answer requests until `stop`, then finish those in flight; closes the listener."""
        await self._server.serve([listener])

    def stop(self) -> None:
        """Take no more connections, and let `serve` end."""
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, whose connections come from an `Acceptor`."""

    def __init__(self, config: uvicorn.Config, connection: type[Connection], at_once: int) -> None:
        super().__init__(config)
        self._class = connection
        self._at_once = at_once

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        tls = self.config.ssl
        most = most_connections(tls=tls is not None)
        self._acceptor = Acceptor(sockets[0], self._connection, most, self._at_once, tls)
        self._acceptor.start()
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor.stop()
        await super().shutdown(sockets)

    def _connection(self) -> Connection:
        return self._class(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _RequestIdMiddleware:
    """Gives each request a name, which its answer carries and the log tells; all that ends a request ends here.

    An answer to a request whose body was not read closes the connection: nobody parses what still comes of it.
    """

    def __init__(self, app: ASGIApp, requests: RequestLog) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        name, status = name_of(_header(scope, HEADER)), 500
        unread = _has_body(scope)

        async def receive_noted() -> Message:
            nonlocal unread
            message = await receive()
            unread = message.get("more_body", False)
            return message

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (HEADER, name), _NO_SNIFFING, *([_CLOSE] if unread else [])]
            await send(message)

        try:
            await self._app(scope, receive_noted if unread else receive, send_named)
        except Exception:
            log.exception("request %s failed", name.decode())
        finally:
            self._requests.answered(name, scope["method"], scope["path"], status, time.perf_counter() - began)


class _AuthMiddleware:
    """Lets in who has a token, or asks for health or the empty dashboard.

    Where no read token is set: who asks for this machine.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, metrics: ServingMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._tokens = _tokens(tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check_head(scope)
            if scope["path"] not in _OPEN:
                self._check(scope)
        except RequestError as exc:
            if scope["path"].endswith("/infer"):
                self._metrics.request(exc.status, 0.0)
            await _error(exc)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if not self._tokens:
            check_host((_header(scope, b"host") or b"").decode("latin-1"))
            return
        scheme, _, token = (_header(scope, b"authorization") or b"").partition(b" ")
        matches = [hmac.compare_digest(token.strip(), known) for known in self._tokens]
        if scheme.lower() != b"bearer" or not any(matches):
            raise UnauthorizedError("send the header Authorization: Bearer and a token of this server")


class _Infer:
    """`POST .../infer`, as bare ASGI because it is the hot path."""

    def __init__(self, service: Service, settings: ServingSettings, metrics: ServingMetrics) -> None:
        self._service = service
        self._metrics = metrics
        self._bodies = BodyReader(settings)
        self._timeout = settings.timeout.total_seconds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        with HeldBytes(self._bodies) as held:
            response = await self._response(scope, receive, held, began)
            held.add(len(response.body))
            await _send(response, scope, receive, send)

    async def _response(self, scope: Scope, receive: Receive, held: HeldBytes, began: float) -> Response:
        response = Response(status_code=500)
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._answer(scope, receive, held)
        except RequestError as exc:
            response = _error(exc)
        except TimeoutError:
            response = _error(
                DeadlineExceededError(f"the request took longer than {self._timeout:g} s, which serving.timeout allows")
            )
        except ClientDisconnectedError:
            response = Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            self._metrics.request(response.status_code, time.perf_counter() - began)
        return response

    async def _answer(self, scope: Scope, receive: Receive, held: HeldBytes) -> Response:
        if _header(scope, b"content-encoding") not in (None, b"identity"):
            raise UnsupportedEncodingError("send the body without Content-Encoding")
        header_length = _length(_header(scope, _HEADER_LENGTH))
        path = scope["path_params"]
        body = await held.read(receive, _header(scope, b"content-length"))
        async with DisconnectWatcher(receive):
            reply, length = await self._service.infer(
                path["name"], path.get("version"), body, header_length, scope.get("client")
            )
        if length is None:
            return Response(reply, media_type="application/json")
        return Response(reply, headers={HEADER_LENGTH: str(length)}, media_type="application/octet-stream")


async def _send(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a response; a large one is sent when this returns, and not only handed to the transport.

    The last message of a response waits only for the messages before it, so a large body is not the last one.
    """
    if len(response.body) <= _LARGE_REPLY:
        await response(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _add_protocol_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v2", response_class=Response)
    async def server_metadata() -> Response:
        return _json({"name": "anabranch", "version": app.version, "extensions": ["binary_tensor_data"]})

    @app.get("/v2/health/live", response_class=Response)
    async def live() -> Response:
        return _json({"live": True})

    @app.get("/v2/health/ready", response_class=Response)
    async def ready() -> Response:
        service.resident(service.name)
        return _json({"ready": True})

    @app.get("/v2/models/{name}", response_class=Response)
    async def model_metadata(name: str) -> Response:
        service.check_name(name)
        return _json(_metadata(service, [service.version.name] if service.version else []))

    @app.get("/v2/models/{name}/versions/{version}", response_class=Response)
    async def version_metadata(name: str, version: str) -> Response:
        return _json(_metadata(service, [service.resident(name, version).name]))

    @app.get("/v2/models/{name}/ready", response_class=Response)
    async def model_ready(name: str) -> Response:
        service.resident(name)
        return _json({"name": name, "ready": True})

    @app.get("/v2/models/{name}/versions/{version}/ready", response_class=Response)
    async def version_ready(name: str, version: str) -> Response:
        service.resident(name, version)
        return _json({"name": name, "version": version, "ready": True})


def _add_dashboard(app: FastAPI, overview: Overview, report: Callable[[], ServingReport]) -> None:
    page = load_page()

    @app.get("/", response_class=Response)
    async def dashboard(request: Request) -> Response:
        if page.headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=page.headers)
        return Response(page.content, headers=page.headers, media_type="text/html")

    @app.get("/api/status", response_class=Response)
    async def status() -> Response:
        return _json(await asyncio.to_thread(overview.status, report()), headers=_NOT_STORED)

    @app.get("/api/history", response_class=Response)
    async def history(request: Request) -> Response:
        since, step = _since(request, overview.history.steps)
        points = await asyncio.to_thread(overview.history.since, since, step)
        return _json(points, headers=_NOT_STORED)


def _add_orders(app: FastAPI, service: Service, tokens: Tokens) -> None:
    @app.post("/api/versions/{version}:{action}", response_class=Response)
    async def order(version: str, action: str, request: Request) -> Response:
        header = request.headers.get
        check_order(tokens, header("authorization", ""), header("host", ""), header("origin", ""))
        return _json(await service.order(action, version), headers=_NOT_STORED)


def _since(request: Request, steps: Sequence[int]) -> tuple[int, int]:
    since, step = request.query_params.get("since", "0"), request.query_params.get("step", str(steps[0]))
    if not (since.isdecimal() and len(since) < 16 and step in map(str, steps)):
        raise BadRequestError(f"since is a whole number of seconds since 1970, and step one of {steps}")
    return int(since), int(step)


def _add_metrics(app: FastAPI, metrics: ServingMetrics) -> None:
    @app.get("/metrics", response_class=Response)
    async def exposition() -> Response:
        return Response(
            await asyncio.to_thread(metrics.exposition), media_type="text/plain; version=0.0.4; charset=utf-8"
        )


def _add_description(app: FastAPI, service: Service, steps: Sequence[int], *, tokens: bool) -> None:
    @app.get("/openapi.json", response_class=Response, include_in_schema=False)
    async def description() -> Response:
        return content

    content = _json(whole(app.openapi(), service.name, service.signature, steps, _OPEN, tokens=tokens))


def _tokens(tokens: Tokens) -> list[bytes]:
    """Return those that open the door; none where no read token is set."""
    known = [token.get_secret_value().encode() for token in (tokens.read, tokens.admin)]
    return [token for token in known if token] if known[0] else []


def _metadata(service: Service, versions: list[str]) -> dict[str, Any]:
    return {
        "name": service.name,
        "versions": versions,
        "platform": "pytorch",
        "inputs": [spec.metadata() for spec in service.signature.inputs.values()],
        "outputs": [spec.metadata() for spec in service.signature.outputs.values()],
    }


async def _on_request_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestError)
    return _error(exc)


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    sentence = f"{shorten(request.method)} {shorten(request.url.path)}: {exc.detail}"
    return _json({"error": sentence}, exc.status_code, dict(exc.headers or {}))


async def _on_bug(_request: Request, _exc: Exception) -> Response:
    return _json({"error": "the server failed; its log says how"}, 500)


def _error(exc: RequestError) -> Response:
    headers = {"connection": "close"} if exc.closes else {}
    if exc.retry_after is not None:
        headers["retry-after"] = str(math.ceil(exc.retry_after.total_seconds()))
    if isinstance(exc, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    return _json({"error": str(exc)}, exc.status, headers)


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0") != b"")
        for name, value in scope["headers"]
    )


def _check_head(scope: Scope) -> None:
    """Raise HeadersError for too many fields, FramingError for two ways of telling where the body ends."""
    if len(scope["headers"]) > _MOST_FIELDS:
        raise HeadersError(f"the request has {len(scope['headers'])} header fields; send {_MOST_FIELDS} at most")
    names = {name for name, _value in scope["headers"]}
    if {b"content-length", b"transfer-encoding"} <= names:
        raise FramingError("the request has both Content-Length and Transfer-Encoding; send one of them")


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


def _length(value: bytes | None) -> int | None:
    if value is None:
        return None
    if not value.isdigit() or len(value) > 20:
        raise BadRequestError(f"{HEADER_LENGTH} is not a number")
    return int(value)


def _tls(tls: TlsSettings, folder: Path) -> dict[str, Any]:
    if tls.cert is None or tls.key is None:
        return {}
    return {"ssl_certfile": folder / tls.cert, "ssl_keyfile": folder / tls.key}


def _version() -> str:
    try:
        return importlib.metadata.version("anabranch")
    except importlib.metadata.PackageNotFoundError:
        return "0"
