"""ASGI middleware: request ids, tokens, limits of the request's head. Also renders errors as JSON responses."""

import logging
import math
import time
from collections.abc import Callable

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.learner.settings.pipeline import Tokens
from anabranch.serving.errors import BadRequestError, FramingError, HeadersError, RequestError, UnauthorizedError
from anabranch.serving.http.access_log import HEADER, RequestLog, name_of
from anabranch.serving.http.auth import check_one_authorization, check_read
from anabranch.serving.http.connection import PIPELINED
from anabranch.serving.metrics import ServingMetrics

log = logging.getLogger("anabranch.serving")

REQUEST_ID = "anabranch.request_id"
"""The key of a request's id in its ASGI scope."""

_NO_SNIFFING = (b"x-content-type-options", b"nosniff")
_CLOSE = (b"connection", b"close")
_MOST_FIELDS = 100
"""Header fields of a request."""


class RequestIdMiddleware:
    """Assigns an id to each request, adds it to the response and logs it. No exception passes this middleware.

    If the body was not read, the response closes the connection: nothing parses the rest of that body. So does each
    response while the server drains, unless the next request is there already: later ones go to another server.
    """

    def __init__(self, app: ASGIApp, requests: RequestLog, drains: Callable[[], bool] = bool) -> None:
        self._app = app
        self._drains = drains
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, with its id."""
        began = time.perf_counter()
        name, status = name_of(header(scope, HEADER)), 500
        scope[REQUEST_ID] = name.decode()
        unread = _has_body(scope)

        async def receive_and_track() -> Message:
            nonlocal unread
            message = await receive()
            unread = message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                closing = [_CLOSE] if unread or (self._drains() and not _has_next(scope)) else []
                message["headers"] = [*message["headers"], (HEADER, name), _NO_SNIFFING, *closing]
            await send(message)

        try:
            await self._app(scope, receive_and_track if unread else receive, send_with_id)
        except Exception:
            log.exception("request %s failed", scope[REQUEST_ID])
        finally:
            self._requests.answered(name, scope["method"], scope["path"], status, time.perf_counter() - began)


def _has_next(scope: Scope) -> bool:
    return PIPELINED in scope.get("state", {}) and bool(scope["state"][PIPELINED]())


class AuthMiddleware:
    """Rejects requests without a token of this server, except those for `open_paths`.

    Without a read token it accepts requests whose `Host` header names this machine.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens, metrics: ServingMetrics, open_paths: frozenset[str]) -> None:
        self._app = app
        self._tokens = tokens
        self._metrics = metrics
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        try:
            _check_head(scope)
            if scope["path"] not in self._open_paths:
                check_read(self._tokens, _text(scope, b"authorization"), _text(scope, b"host"))
        except RequestError as exc:
            if scope["path"].endswith("/infer"):
                self._metrics.request(exc.status, 0.0)
            await error_response(exc)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def error_response(exc: RequestError) -> Response:
    """Return the response to a request that is refused."""
    headers = {"connection": "close"} if exc.closes else {}
    if exc.retry_after is not None:
        headers["retry-after"] = str(math.ceil(exc.retry_after.total_seconds()))
    if isinstance(exc, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    return json_response({"error": str(exc)}, exc.status, headers)


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with `content` as JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of the first header of that lower-case name; None without one."""
    for key, value in scope["headers"]:
        if key == name:
            content: bytes = value
            return content
    return None


def _text(scope: Scope, name: bytes) -> str:
    return (header(scope, name) or b"").decode("latin-1")


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0") != b"")
        for name, value in scope["headers"]
    )


def _check_head(scope: Scope) -> None:
    """Raise HeadersError for too many fields, BadRequestError for two hosts or tokens, FramingError for two ends of the
    body."""
    if len(scope["headers"]) > _MOST_FIELDS:
        raise HeadersError(f"the request has {len(scope['headers'])} header fields; send {_MOST_FIELDS} at most")
    names = [name for name, _value in scope["headers"]]
    if names.count(b"host") > 1:  # a proxy may go by another one of them (RFC 9112, section 3.2)
        raise BadRequestError("the request has more than one Host header; send one")
    check_one_authorization(names.count(b"authorization"))
    if b"content-length" in names and b"transfer-encoding" in names:
        raise FramingError("the request has both Content-Length and Transfer-Encoding; send one of them")
