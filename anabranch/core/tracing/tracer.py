"""The tracer of a process, over OpenTelemetry's. The only module that starts spans."""

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from anabranch.core.tracing.context import LENGTH, MOST_LINKS, TRACEPARENT, TRACESTATE, Attributes, is_sampled
from anabranch.core.users_code import in_one_line

_NANOSECONDS = 1_000_000_000
_LONGEST_STATE = 512
"""Characters of `tracestate` that are continued at most, which the standard asks for at least."""
log = logging.getLogger(__name__)

_uniform = random.Random().random  # noqa: S311 no secret; not the interpreter's own, whose numbers a model may use


class RequestSpan:
    """The span of a request, child of its caller's: until `end`, which is called once."""

    __slots__ = ("_end", "span")

    def __init__(self, span: Span, end: Callable[[Span], object]) -> None:
        self.span = span
        self._end = end

    def end(self, attributes: Attributes, *, failed: bool) -> None:
        """End it; `failed`: the server could not answer."""
        self.span.set_attributes(attributes)
        if failed:
            self.span.set_status(StatusCode.ERROR)
        self._end(self.span)


class Tracer:
    """Decides what is traced, and starts spans. Any thread may use it.

    What is not traced never reaches OpenTelemetry, whose sampler takes 9 us: 6 % of a small request. What a sampler or
    a processor of `tracing.setup` raises costs its span alone, and reaches no request and no step.
    """

    def __init__(self, tracer: trace.Tracer, sample: float, left_out: Callable[[str, int], object]) -> None:
        """`sample`: the fraction that is traced of what has no context."""
        self._tracer = tracer
        self._sample = sample
        self._left_out = left_out
        self._has_failed = False
        self._propagator = TraceContextTextMapPropagator()

    def chooses(self, traceparent: str | None) -> bool:
        """Decide whether a request with this field in its head, if any, is traced."""
        sampled = None if traceparent is None else is_sampled(traceparent)
        return _uniform() < self._sample if sampled is None else sampled

    def request(
        self, name: str, traceparent: str | None, tracestate: str | None, attributes: Attributes
    ) -> RequestSpan:
        """Start the span of a request that is traced, with the fields of its head."""
        parent = self._parent(traceparent or "", tracestate)
        return RequestSpan(self._start(name, parent, SpanKind.SERVER, attributes), self._end)

    @contextlib.contextmanager
    def batch(self, name: str, requests: Sequence[RequestSpan], attributes: Attributes) -> Iterator[None]:
        """Trace what is done for several requests at once: it and they are linked."""
        linked = [each.span for each in requests[:MOST_LINKS]]
        links = [Link(span.get_span_context()) for span in linked]
        with self._current(name, Context(), SpanKind.INTERNAL, attributes, links) as batch:
            for span in linked:
                if span.is_recording():  # not over, such as by its time-out
                    span.add_link(batch.get_span_context())
            yield

    def step(
        self, name: str, traceparents: Sequence[str], attributes: Callable[[], Attributes]
    ) -> AbstractContextManager[object]:
        """Return the span of a step that learns from events with these contexts, if it is traced."""
        if not traceparents and _uniform() >= self._sample:
            return contextlib.nullcontext()
        parents = [trace.get_current_span(self._parent(each, None)) for each in traceparents[:MOST_LINKS]]
        links = [Link(span.get_span_context()) for span in parents]
        return self._current(name, Context(), SpanKind.CONSUMER, attributes(), links)

    def span(self, name: str, attributes: Attributes | None = None) -> AbstractContextManager[Span]:
        """Return a span whose parent is the current one of the thread, if there is one."""
        return self._current(name, attributes=attributes)

    def record(self, name: str, seconds: float, attributes: Attributes | None = None) -> None:
        """Record a span that ends now and took `seconds`."""
        end = time.time_ns()
        started = end - round(seconds * _NANOSECONDS)
        self._end(self._start(name, attributes=attributes, start_time=started), end)

    @contextlib.contextmanager
    def _current(self, *arguments: Any, **options: Any) -> Iterator[Span]:
        """Start a span, and let it be the current one of the thread while the block runs."""
        span = self._start(*arguments, **options)
        try:
            with trace.use_span(span):
                yield span
        finally:
            self._end(span)

    def _start(self, *arguments: Any, **options: Any) -> Span:
        try:
            return self._tracer.start_span(*arguments, **options)
        except Exception as exc:  # noqa: BLE001 the user's code may raise anything
            self._failed(exc)
            return INVALID_SPAN

    def _end(self, span: Span, time_ns: int | None = None) -> None:
        try:
            span.end(time_ns)
        except Exception as exc:  # noqa: BLE001 as above
            self._failed(exc)

    def _failed(self, error: Exception) -> None:
        self._left_out("setup", 1)
        if not self._has_failed:
            self._has_failed = True
            log.warning("a span is left out, as all later ones of this kind: %s", in_one_line(error))

    def _parent(self, traceparent: str, tracestate: str | None) -> Context:
        """Return the context of a sender who traces; an empty one for other fields."""
        if not is_sampled(traceparent):
            return Context()
        fields = {TRACEPARENT: traceparent[:LENGTH]}
        if tracestate is not None and len(tracestate) <= _LONGEST_STATE:
            fields[TRACESTATE] = tracestate
        return self._propagator.extract(fields, Context())
