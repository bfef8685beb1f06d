"""The span of a request, from its head to its reply, and that of the batch that answers it and others."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING

from anabranch.core.tracing.context import Attributes
from anabranch.core.tracing.spans import NO_SPAN, current_tracer
from anabranch.serving.inference.batch_run import QueuedRequest

if TYPE_CHECKING:
    from anabranch.core.tracing.tracer import RequestSpan

request_span: "ContextVar[RequestSpan | None]" = ContextVar("request_span", default=None)
"""The span of the request that the current task answers, set once a task and request; None if it is not traced."""


def end_request(status: int, attributes: Attributes) -> None:
    """End the span of the request that this task answers, with the HTTP status, or the like, of its reply."""
    if (span := request_span.get()) is not None:
        request_span.set(None)
        span.end(attributes, failed=status >= HTTPStatus.INTERNAL_SERVER_ERROR)


def batch_span(batch: Sequence[QueuedRequest]) -> AbstractContextManager[object]:
    """Return the span of a batch, not started yet, linked with those of its requests that are traced, if any are."""
    for request in batch:
        if request.span is not None:
            return _traced_batch(batch)
    return NO_SPAN


def _traced_batch(batch: Sequence[QueuedRequest]) -> AbstractContextManager[object]:
    if (tracer := current_tracer()) is None:
        return NO_SPAN
    attributes = {
        "anabranch.version": batch[0].version.number,
        "anabranch.batch.requests": len(batch),
        "anabranch.batch.rows": sum(request.rows for request in batch),
    }
    return tracer.batch("predict", [request.span for request in batch if request.span is not None], attributes)
