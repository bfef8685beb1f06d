"""The routes: the Open Inference Protocol v2, the dashboard with its `/api/...`, and `/metrics`.

Imports neither Kafka, Redis nor FAISS.
"""

import asyncio
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.config import ServingSettings, Tokens
from serving.dashboard.assets import load_page
from serving.dashboard.status import Overview
from serving.errors import (
    BadRequestError,
    DeadlineExceededError,
    RequestError,
    UnsupportedEncodingError,
    shorten,
)
from serving.http.access_log import RequestLog
from serving.http.auth import asks_for_token, check_admin
from serving.http.middleware import (
    REQUEST_ID,
    AuthMiddleware,
    RequestIdMiddleware,
    error_response,
    header,
    json_response,
)
from serving.http.openapi import build_openapi
from serving.http.request_body import BodyReader, ClientDisconnectedError, DisconnectWatcher, HeldBytes
from serving.inference.service import Service
from serving.metrics import ServingMetrics
from serving.protocol.codec import HEADER_LENGTH
from serving.reporting.report import ServingReport

_OPEN = frozenset({"/", "/v2/health/live", "/v2/health/ready"})
_NOT_STORED = {"cache-control": "no-store"}
_CLIENT_CLOSED_REQUEST = 499
_HEADER_LENGTH = HEADER_LENGTH.encode()
_LARGE_REPLY = 65_536
"""Larger replies, in bytes, wait until the client has read them."""


def build_app(
    service: Service,
    settings: ServingSettings,
    metrics: ServingMetrics,
    overview: Overview,
    report: Callable[[], ServingReport],
) -> ASGIApp:
    """Return the ASGI application; it belongs to the thread of one event loop."""
    app = FastAPI(title="Anabranch", version=_version(), openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    infer = _Infer(service, settings, metrics)
    for path in ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"):
        app.router.routes.append(Route(path, infer, methods=["POST"]))
    _add_protocol_routes(app, service)
    _add_dashboard(app, overview, report)
    _add_rollout_commands(app, service, settings.tokens)
    _add_metrics(app, metrics)
    _add_description(app, service, overview.history.steps, tokens=asks_for_token(settings.tokens))
    return RequestIdMiddleware(AuthMiddleware(app, settings.tokens, metrics, _OPEN), RequestLog(settings.request_log))


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
            response = error_response(exc)
        except TimeoutError:
            response = error_response(
                DeadlineExceededError(f"the request took longer than {self._timeout:g} s, which serving.timeout allows")
            )
        except ClientDisconnectedError:
            response = Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            self._metrics.request(response.status_code, time.perf_counter() - began)
        return response

    async def _answer(self, scope: Scope, receive: Receive, held: HeldBytes) -> Response:
        if header(scope, b"content-encoding") not in (None, b"identity"):
            raise UnsupportedEncodingError("send the body without Content-Encoding")
        header_length = _length(header(scope, _HEADER_LENGTH))
        path = scope["path_params"]
        body = await held.read(receive, header(scope, b"content-length"))
        async with DisconnectWatcher(receive):
            reply, length = await self._service.infer(
                path["name"], path.get("version"), body, header_length, scope.get("client")
            )
        if length is None:
            return Response(reply, media_type="application/json")
        return Response(reply, headers={HEADER_LENGTH: str(length)}, media_type="application/octet-stream")


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


def _add_protocol_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v2", response_class=Response)
    async def server_metadata() -> Response:
        return json_response({"name": "anabranch", "version": app.version, "extensions": ["binary_tensor_data"]})

    @app.get("/v2/health/live", response_class=Response)
    async def live() -> Response:
        return json_response({"live": True})

    @app.get("/v2/health/ready", response_class=Response)
    async def ready() -> Response:
        service.resident(service.name)
        return json_response({"ready": True})

    @app.get("/v2/models/{name}", response_class=Response)
    async def model_metadata(name: str) -> Response:
        service.check_name(name)
        return json_response(_metadata(service, [service.version.name] if service.version else []))

    @app.get("/v2/models/{name}/versions/{version}", response_class=Response)
    async def version_metadata(name: str, version: str) -> Response:
        return json_response(_metadata(service, [service.resident(name, version).name]))

    @app.get("/v2/models/{name}/ready", response_class=Response)
    async def model_ready(name: str) -> Response:
        service.resident(name)
        return json_response({"name": name, "ready": True})

    @app.get("/v2/models/{name}/versions/{version}/ready", response_class=Response)
    async def version_ready(name: str, version: str) -> Response:
        service.resident(name, version)
        return json_response({"name": name, "version": version, "ready": True})


def _add_dashboard(app: FastAPI, overview: Overview, report: Callable[[], ServingReport]) -> None:
    page = load_page()

    @app.get("/", response_class=Response)
    async def dashboard(request: Request) -> Response:
        if page.headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=page.headers)
        return Response(page.content, headers=page.headers, media_type="text/html")

    @app.get("/api/status", response_class=Response)
    async def status() -> Response:
        return json_response(await asyncio.to_thread(overview.status, report()), headers=_NOT_STORED)

    @app.get("/api/history", response_class=Response)
    async def history(request: Request) -> Response:
        since, step = _since(request, overview.history.steps)
        points = await asyncio.to_thread(overview.history.since, since, step)
        return json_response(points, headers=_NOT_STORED)


def _add_rollout_commands(app: FastAPI, service: Service, tokens: Tokens) -> None:
    @app.post("/api/versions/{version}:{action}", response_class=Response)
    async def rollout(version: str, action: str, request: Request) -> Response:
        get = request.headers.get
        check_admin(tokens, get("authorization", ""), get("host", ""), get("origin", ""))
        return json_response(await service.apply(action, version), headers=_NOT_STORED)


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

    content = json_response(build_openapi(app.openapi(), service.name, service.signature, steps, _OPEN, tokens=tokens))


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


def _version() -> str:
    try:
        return importlib.metadata.version("anabranch")
    except importlib.metadata.PackageNotFoundError:
        return "0"
