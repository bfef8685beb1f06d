"""The span of a request, from its head to its reply, and that of the batch that answers it and others."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING

from anabranch.core.tracing.spans import NO_SPAN, Attributes, TracedSpan, current_tracer
from serving.inference.batch_run import QueuedRequest

if TYPE_CHECKING:
    from anabranch.core.tracing.tracer import RequestSpan

request_span: "ContextVar[RequestSpan | None]" = ContextVar("request_span", default=None)
"""The span of the request that the current task answers; None if it is not traced."""


def begin_request(
    name: str, traceparent: str | None, tracestate: str | None, attributes: Callable[[], Attributes]
) -> None:
    """Start the span of the request that this task answers, if it is traced; called once a task and request.

    `traceparent` and `tracestate` are the fields of its head.
    """
    if (tracer := current_tracer()) is None:
        return
    if (
        span := tracer.request(name, traceparent, tracestate, attributes)
    ) is not None:  # otherwise the variable is None already
        request_span.set(span)


def end_request(status: int, attributes: Attributes) -> None:
    """End the span of the request that this task answers, with the HTTP status, or the like, of its reply."""
    if (span := request_span.get()) is not None:
        request_span.set(None)
        span.end(attributes, failed=status >= HTTPStatus.INTERNAL_SERVER_ERROR)


def batch_span(batch: Sequence[QueuedRequest]) -> TracedSpan:
    """Return the span of a batch, not started yet, linked with those of its requests that are traced, if any are."""
    tracer = current_tracer()
    if tracer is None:
        return NO_SPAN
    traced = [request.span for request in batch if request.span is not None]
    if not traced:
        return NO_SPAN
    attributes = {
        "anabranch.version": batch[0].version.number,
        "anabranch.batch.requests": len(batch),
        "anabranch.batch.rows": sum(request.rows for request in batch),
    }
    return tracer.batch("predict", traced, attributes)
