"""The calls of `inference.GRPCInferenceService`: what each answers, and with which status it is refused."""

import asyncio
import importlib.metadata
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from typing_extensions import override

from anabranch.core.failures import panics_are_errors
from anabranch.core.tracing.context import TRACEPARENT, TRACESTATE
from anabranch.core.tracing.spans import current_tracer
from anabranch.serving.errors import BadRequestError, DeadlineExceededError, RequestError, TooManyRequestsError
from anabranch.serving.grpc.messages import MESSAGES, SERVICE
from anabranch.serving.grpc.tensors import parse_request, read_request, write_reply
from anabranch.serving.http.access_log import HEADER, name_of
from anabranch.serving.http.auth import check_one_authorization, check_read
from anabranch.serving.http.request_body import BodyReader, HeldBytes
from anabranch.serving.inference.request_tracing import end_request, request_span
from anabranch.serving.inference.service import Service, in_thread, is_large
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.settings import ServingSettings

if TYPE_CHECKING:
    from anabranch.core.tracing.tracer import Tracer


_GRACE_SECONDS = 1.0
"""How long a message may be on its way while others wait for their turn."""


class Intake:
    """Reads messages, some at a time. Belongs to the thread of one event loop.

    A message that has no turn stays with its client, but for the window of HTTP/2. While calls wait for a turn, one
    that takes longer than a second to send its message is refused, so that such calls cannot keep out the others.
    """

    def __init__(self, most: int) -> None:
        """`most`: messages that are read at a time, at least 1."""
        self._turns = asyncio.Semaphore(most)
        self._waiting = 0
        self._ends: dict[asyncio.Timeout, float] = {}
        """When each turn in progress ends, if others wait."""

    async def read(self, context: grpc.aio.ServicerContext) -> bytes:
        """Return the message of a call.

        Raises:
            BadRequestError: there is none.
            TooManyRequestsError: it is slow, and others wait.
        """
        await self._await_turn()
        end = asyncio.get_running_loop().time() + _GRACE_SECONDS
        limit = asyncio.timeout_at(end if self._waiting else None)
        try:
            async with limit:
                self._ends[limit] = end
                message = await context.read()
        except TimeoutError:
            raise TooManyRequestsError(
                f"the message did not arrive within {_GRACE_SECONDS:g} s, and other calls wait for their turn"
            ) from None
        finally:
            self._ends.pop(limit, None)
            self._turns.release()
        if message is grpc.aio.EOF:
            raise BadRequestError("the call has no message")
        assert isinstance(message, bytes)
        return message

    async def _await_turn(self) -> None:
        self._waiting += 1
        if self._turns.locked():
            for limit, end in self._ends.items():
                if not limit.expired():
                    limit.reschedule(end)
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1


log = logging.getLogger("anabranch.serving")

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""By the status of the same refusal over HTTP; others are INTERNAL."""
_CLIENT_CLOSED_REQUEST = 499
_INFER = f"{SERVICE}/ModelInfer"
_INFER_PATH = f"/{_INFER}"
_ATTRIBUTES = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": "ModelInfer"}
"""Of the span of a call."""
_OPEN = ("/grpc.health.v1.Health/Check", f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady")
"""Calls that need no token. Their messages are not read, so that they cannot hold anything."""
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""The messages `HealthCheckResponse` with status 1 and 2."""
_MOST_CALLS = 256
"""Calls with a message that are answered at a time."""

_Context: TypeAlias = grpc.aio.ServicerContext
_Call = Callable[[bytes, _Context], Awaitable[bytes]]
_Answer = Callable[[object, _Context], Awaitable[bytes]]
"""Reads the message of its call by the context, or reads none."""
Metadata = Iterable[tuple[str, str | bytes]] | None
"""What a call has in place of headers."""


class InferenceCalls:
    """Answers calls. Belongs to the thread of one event loop."""

    def __init__(
        self, service: Service, settings: ServingSettings, metrics: ServingMetrics, bodies: BodyReader
    ) -> None:
        """`bodies` counts the bytes that requests of HTTP hold, too."""
        self._service = service
        self._tokens = settings.tokens
        self._timeout = settings.timeout.total_seconds()
        self._metrics = metrics
        self._bodies = bodies
        self._intake = Intake(int(settings.max_held_bytes // settings.max_body_bytes))
        self._most_calls = min(_MOST_CALLS, settings.max_queue)
        self._calls = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler of all calls; messages are bytes for it, so that their size is counted."""
        unary = {
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
        }
        answers: dict[str, _Answer] = {f"/{SERVICE}/{name}": partial(self._read, call) for name, call in unary.items()}
        answers[_INFER_PATH] = self._infer
        answers |= dict(zip(_OPEN, (self._health, self._live, self._ready), strict=True))
        return _Handler(answers, self._check_read)

    async def _health(self, _messages: object, _context: _Context) -> bytes:
        return _SERVING if self._is_ready() else _NOT_SERVING

    async def _live(self, _messages: object, _context: _Context) -> bytes:
        return _written("ServerLiveResponse", live=_passes(self._service.check_alive))

    async def _ready(self, _messages: object, _context: _Context) -> bytes:
        return _written("ServerReadyResponse", ready=self._is_ready())

    def _is_ready(self) -> bool:
        return _passes(partial(self._service.check_ready, self._service.name))

    async def _read(self, call: _Call, _messages: object, context: _Context) -> bytes:
        """Read the message of a call and answer it, in the time that a request may take, from its head on."""
        if self._calls >= self._most_calls:
            raise TooManyRequestsError(f"this server answers {self._calls} calls already")
        self._calls += 1
        context.add_done_callback(self._done)
        left: float | None = context.time_remaining()
        try:
            # Not `wait_for`, which runs the answer in another task before Python 3.12.
            async with asyncio.timeout(self._timeout if left is None else min(self._timeout, left)):
                return await call(await self._intake.read(context), context)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the request took longer than its deadline, or than the {self._timeout:g} s of serving.timeout"
            ) from None

    def _done(self, _context: _Context) -> None:
        """Count a call no longer. A reply that its client does not read keeps its call from being done."""
        self._calls -= 1

    async def _model_ready(self, body: bytes, _context: _Context) -> bytes:
        asked = _parsed("ModelReadyRequest", body)
        self._service.check_name(asked.name)
        ready = _passes(partial(self._service.check_ready, asked.name, asked.version or None))
        return _written("ModelReadyResponse", ready=ready)

    async def _server_metadata(self, _body: bytes, _context: _Context) -> bytes:
        return _written("ServerMetadataResponse", name="anabranch", version=importlib.metadata.version("anabranch"))

    async def _model_metadata(self, body: bytes, _context: _Context) -> bytes:
        asked = _parsed("ModelMetadataRequest", body)
        resident, signature = self._service.resident(asked.name, asked.version or None), self._service.signature
        return _written(
            "ModelMetadataResponse",
            name=self._service.name,
            versions=[resident.name],
            platform="pytorch",
            inputs=[spec.metadata() for spec in signature.inputs.values()],
            outputs=[spec.metadata() for spec in signature.outputs.values()],
        )

    async def _infer(self, messages: object, context: _Context) -> bytes:
        began, status = time.perf_counter(), _CLIENT_CLOSED_REQUEST
        if (tracer := current_tracer()) is not None:
            _begin_span(tracer, context.invocation_metadata() or ())
        try:
            reply = await self._read(self._predict, messages, context)
        except RequestError as exc:
            status = exc.status
            raise
        except Exception:
            status = 500
            raise
        else:
            status = 200
            return reply
        finally:
            self._metrics.request(status, time.perf_counter() - began)
            end_request(status, {"rpc.grpc.status_code": _grpc_code(status)})

    async def _predict(self, body: bytes, context: _Context) -> bytes:
        held = HeldBytes(self._bodies)
        context.add_done_callback(held.release)
        self._bodies.check_room(len(body))
        held.add(len(body))
        service = self._service
        long = service.signature.is_long(len(body))
        message = await in_thread(long, parse_request, service.signature, body)
        service.check_name(message.model_name)
        request = await in_thread(long, read_request, service.signature, message)
        version = message.model_version or None
        del message  # it may be much larger than the request
        chosen, answers = await service.predict(request, version, context.peer())
        reply = await in_thread(
            is_large(answers),
            write_reply,
            request,
            answers,
            service.signature,
            service.name,
            chosen.name,
            chosen.progress,
        )
        held.add(len(reply))
        if service.log_answer is not None:
            service.log_answer(service.signature, _request_id(context), chosen, request, answers)
        service.compare(chosen, request, answers)
        return reply

    def _check_read(self, path: str, metadata: Metadata) -> None:
        """Raise RequestError for a call without a token of this server; called before its message is read."""
        if path in _OPEN:
            return
        given = [value for key, value in metadata or () if key == "authorization" and isinstance(value, str)]
        try:
            check_one_authorization(len(given))
            # No page of a browser can make such a call, so there is no Host to check.
            check_read(self._tokens, given[0] if given else "", "localhost")
        except RequestError as exc:
            if path == _INFER_PATH:
                self._metrics.request(exc.status, 0.0)
            raise


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a call, which reads the message itself: without a token it reads none, so that nobody can
    hold the place of a call for longer than an answer takes."""

    def __init__(self, answers: Mapping[str, _Answer], check: Callable[[str, Metadata], object]) -> None:
        self._handlers = {
            path: grpc.stream_unary_rpc_method_handler(_refusing(answer)) for path, answer in answers.items()
        }
        self._check = check

    @override
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        handler = self._handlers.get(handler_call_details.method)
        if handler is None:
            return None
        try:
            self._check(handler_call_details.method, handler_call_details.invocation_metadata)
        except RequestError as exc:
            return grpc.stream_unary_rpc_method_handler(partial(_refuse, exc))
        return handler


def _refusing(answer: _Answer) -> _Answer:
    """Return a call that answers what `answer` raises with a status and a sentence."""

    async def answer_or_refuse(messages: object, context: _Context) -> bytes:
        try:
            with panics_are_errors():
                return await answer(messages, context)
        except RequestError as exc:
            await _refuse(exc, messages, context)
        except Exception:
            log.exception("a call failed")
            await context.abort(grpc.StatusCode.INTERNAL, "the server failed on this request; see its log")
        raise AssertionError("abort raises")

    return answer_or_refuse


async def _refuse(exc: RequestError, _messages: object, context: _Context) -> None:
    after = exc.retry_after
    hints = () if after is None else (("retry-after", str(math.ceil(after.total_seconds()))),)
    await context.abort(_CODES.get(exc.status, grpc.StatusCode.INTERNAL), str(exc), hints)


def _begin_span(tracer: "Tracer", metadata: Iterable[tuple[str, str | bytes]]) -> None:
    parent = _text(metadata, TRACEPARENT)
    if tracer.chooses(parent):
        request_span.set(tracer.request(_INFER, parent, _text(metadata, TRACESTATE), _ATTRIBUTES))


def _request_id(context: _Context) -> str:
    given = _text(context.invocation_metadata() or (), HEADER.decode())
    return name_of(None if given is None else given.encode()).decode()


def _text(metadata: Iterable[tuple[str, str | bytes]], key: str) -> str | None:
    """Return the first value of a key; None without one."""
    for name, value in metadata:
        if name == key and isinstance(value, str):
            return value
    return None


def _grpc_code(status: int) -> int:
    if status in (HTTPStatus.OK, _CLIENT_CLOSED_REQUEST):
        code = grpc.StatusCode.OK if status == HTTPStatus.OK else grpc.StatusCode.CANCELLED
    else:
        code = _CODES.get(status, grpc.StatusCode.INTERNAL)
    return int(code.value[0])


def _passes(check: Callable[[], object]) -> bool:
    try:
        check()
    except RequestError:
        return False
    return True


def _parsed(name: str, body: bytes) -> Any:
    try:
        return MESSAGES[name].FromString(body)
    except DecodeError as exc:
        raise BadRequestError(f"the message is no {name}") from exc


def _written(message: str, /, **fields: object) -> bytes:
    written: bytes = MESSAGES[message](**fields).SerializeToString()
    return written
