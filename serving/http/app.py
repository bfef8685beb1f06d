"""The routes: the Open Inference Protocol v2, the dashboard with its `/api/...`, and `/metrics`.

Imports neither Kafka, Redis nor FAISS.
"""

import asyncio
import functools
import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from anabranch.core.tracing.context import TRACEPARENT, TRACESTATE
from anabranch.core.tracing.spans import current_tracer
from anabranch.learner.settings.pipeline import Tokens
from anabranch.serving.dashboard.assets import Page, load_page
from anabranch.serving.dashboard.status import Overview
from anabranch.serving.errors import (
    BadRequestError,
    DeadlineExceededError,
    RequestError,
    UnsupportedEncodingError,
    shorten,
)
from anabranch.serving.http.access_log import RequestLog
from anabranch.serving.http.auth import asks_for_token, check_admin
from anabranch.serving.http.middleware import (
    REQUEST_ID,
    AuthMiddleware,
    RequestIdMiddleware,
    error_response,
    header,
    json_response,
)
from anabranch.serving.http.openapi import OPERATIONS, build_openapi
from anabranch.serving.http.request_body import BodyReader, ClientDisconnectedError, DisconnectWatcher, HeldBytes
from anabranch.serving.inference.request_tracing import end_request, request_span
from anabranch.serving.inference.service import Service
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.protocol.codec import HEADER_LENGTH
from anabranch.serving.reporting.report import ServingReport
from anabranch.serving.settings import ServingSettings

if TYPE_CHECKING:
    from anabranch.core.tracing.tracer import Tracer

_OPEN = frozenset(path for path, operation in OPERATIONS.items() if not operation.needs_token)
_NOT_STORED = {"cache-control": "no-store"}
_CLIENT_CLOSED_REQUEST = 499
_HEADER_LENGTH = HEADER_LENGTH.encode()
_TRACEPARENT, _TRACESTATE = TRACEPARENT.encode(), TRACESTATE.encode()
_ROUTE = "/v2/models/{name}/infer"
_ROUTE_OF_VERSION = "/v2/models/{name}/versions/{version}/infer"
_PROBES = ("/live", "/ready")
_LONGEST_PATH = 256
"""Characters of the path that a span has: thousands of spans may wait for their export."""
_LARGE_REPLY = 65_536
"""Larger replies, in bytes, wait until the client has read them."""


def build_app(
    service: Service,
    settings: ServingSettings,
    metrics: ServingMetrics,
    overview: Overview,
    report: Callable[[], ServingReport],
    bodies: BodyReader,
) -> ASGIApp:
    """Return the ASGI application; it belongs to the thread of one event loop. `bodies` counts what requests hold."""
    infer = _Infer(service, settings, metrics, bodies)
    api = _Api(service, settings.tokens, metrics, overview, report, infer)
    steps, tokens = overview.history.steps, asks_for_token(settings.tokens)
    document = build_openapi(_version(), service.name, service.signature, steps, tokens=tokens)
    routes = [_route(path, each.method, getattr(api, each.name)) for path, each in OPERATIONS.items()]
    app = Starlette(
        routes=[*routes, _route("/openapi.json", "get", json_response(document))],
        exception_handlers={RequestError: _on_request_error, HTTPException: _on_http_exception, Exception: _on_bug},
    )
    app.router.redirect_slashes = False
    inner = AuthMiddleware(app, settings.tokens, metrics, _OPEN)
    return RequestIdMiddleware(inner, RequestLog(settings.request_log), lambda: service.draining)


class _Infer:
    """`POST .../infer`, as bare ASGI because it is the hot path."""

    def __init__(
        self, service: Service, settings: ServingSettings, metrics: ServingMetrics, bodies: BodyReader
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._bodies = bodies
        self._timeout = settings.timeout.total_seconds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        if (tracer := current_tracer()) is not None:
            field = header(scope, _TRACEPARENT)
            parent = None if field is None else field.decode("latin-1")
            if tracer.chooses(parent):
                _begin_span(tracer, parent, scope)
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
            response = error_response(exc)
        except TimeoutError:
            response = error_response(
                DeadlineExceededError(f"the request took longer than {self._timeout:g} s, which serving.timeout allows")
            )
        except ClientDisconnectedError:
            response = Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            self._metrics.request(response.status_code, time.perf_counter() - began)
            end_request(response.status_code, {"http.response.status_code": response.status_code})
        return response

    async def _answer(self, scope: Scope, receive: Receive, held: HeldBytes) -> Response:
        if header(scope, b"content-encoding") not in (None, b"identity"):
            raise UnsupportedEncodingError("send the body without Content-Encoding")
        header_length = _length(header(scope, _HEADER_LENGTH))
        path = scope["path_params"]
        body = await held.read(receive, header(scope, b"content-length"))
        async with DisconnectWatcher(receive):
            reply, length = await self._service.infer(
                path["name"], path.get("version"), body, header_length, scope.get("client"), scope[REQUEST_ID]
            )
        if length is None:
            return Response(reply, media_type="application/json")
        return Response(reply, headers={HEADER_LENGTH: str(length)}, media_type="application/octet-stream")


def _begin_span(tracer: "Tracer", parent: str | None, scope: Scope) -> None:
    state = header(scope, _TRACESTATE)
    route = _ROUTE_OF_VERSION if "version" in scope["path_params"] else _ROUTE
    attributes = {
        "http.request.method": scope["method"],
        "http.route": route,
        "url.path": scope["path"][:_LONGEST_PATH],
        "url.scheme": scope["scheme"],
    }
    name = f"{scope['method']} {route}"
    request_span.set(tracer.request(name, parent, None if state is None else state.decode("latin-1"), attributes))


async def _send(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a response. When this returns, a large one was written to the socket, not only buffered.

    The last message of a response waits only for the messages before it, so a large body is not the last one.
    """
    if len(response.body) <= _LARGE_REPLY:
        await response(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@dataclass(frozen=True)
class _Api:
    """The endpoints, by the names in `OPERATIONS`."""

    service: Service
    tokens: Tokens
    metrics: ServingMetrics
    overview: Overview
    report: Callable[[], ServingReport]
    infer: _Infer
    page: Page = field(default_factory=load_page)

    async def server_metadata(self, _request: Request) -> Response:
        return json_response(
            {"name": "anabranch", "version": _version(), "extensions": ["binary_tensor_data", "classification"]}
        )

    async def live(self, _request: Request) -> Response:
        self.service.check_alive()
        return json_response({"live": True})

    async def ready(self, _request: Request) -> Response:
        self.service.check_ready(self.service.name)
        return json_response({"ready": True})

    async def model_metadata(self, request: Request) -> Response:
        self.service.check_name(request.path_params["name"])
        return json_response(_metadata(self.service, [self.service.version.name] if self.service.version else []))

    async def version_metadata(self, request: Request) -> Response:
        return json_response(_metadata(self.service, [self.service.resident(**request.path_params).name]))

    async def model_ready(self, request: Request) -> Response:
        self.service.check_ready(**request.path_params)
        return json_response({**request.path_params, "ready": True})

    async def version_ready(self, request: Request) -> Response:
        return await self.model_ready(request)

    async def dashboard(self, request: Request) -> Response:
        if self.page.headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self.page.headers)
        return Response(self.page.content, headers=self.page.headers, media_type="text/html")

    async def status(self, _request: Request) -> Response:
        return json_response(await asyncio.to_thread(self.overview.status, self.report()), headers=_NOT_STORED)

    async def history(self, request: Request) -> Response:
        history, query = self.overview.history, request.query_params
        since, step = query.get("since", "0"), query.get("step", str(history.steps[0]))
        if not (since.isdecimal() and len(since) < 16 and step in map(str, history.steps)):
            raise BadRequestError(f"since is a whole number of seconds since 1970, and step one of {history.steps}")
        return json_response(await asyncio.to_thread(history.since, int(since), int(step)), headers=_NOT_STORED)

    async def rollout(self, request: Request) -> Response:
        get = request.headers.get
        check_admin(self.tokens, get("authorization", ""), get("host", ""), get("origin", ""))
        return json_response(await self.service.apply(**request.path_params), headers=_NOT_STORED)

    async def exposition(self, _request: Request) -> Response:
        content = await asyncio.to_thread(self.metrics.exposition)
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")


def _route(path: str, method: str, endpoint: Callable[..., Any]) -> Route:
    route = Route(path, endpoint)
    # Starlette adds HEAD to each GET; only probes ask in this way.
    route.methods = {method.upper(), *(["HEAD"] if path.endswith(_PROBES) else [])}
    return route


def _metadata(service: Service, versions: list[str]) -> dict[str, Any]:
    return {
        "name": service.name,
        "versions": versions,
        "platform": "pytorch",
        "inputs": [spec.metadata() for spec in service.signature.inputs.values()],
        "outputs": service.signature.describe_outputs(),
    }


async def _on_request_error(_request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestError)
    return error_response(exc)


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    sentence = f"{shorten(request.method)} {shorten(request.url.path)}: {exc.detail}"
    return json_response({"error": sentence}, exc.status_code, dict(exc.headers or {}))


async def _on_bug(request: Request, _exc: Exception) -> Response:
    sentence = f"internal server error; see the server log (request id {request.scope[REQUEST_ID]})"
    return json_response({"error": sentence}, 500)


def _length(value: bytes | None) -> int | None:
    if value is None:
        return None
    if not value.isdigit() or len(value) > 20:
        raise BadRequestError(f"{HEADER_LENGTH} is not a number")
    return int(value)


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("anabranch")
    except importlib.metadata.PackageNotFoundError:
        return "0"
