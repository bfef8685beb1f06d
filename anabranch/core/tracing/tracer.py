"""The tracer of a process, over OpenTelemetry's API. The only module that starts spans."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from anabranch.core.tracing.config import TracingSettings
from anabranch.core.tracing.context import LENGTH, MOST_LINKS, TRACEPARENT, TRACESTATE, is_sampled, is_tracestate
from anabranch.core.tracing.spans import NO_SPAN, Attributes, LeftOut, TracedSpan

_NANOSECONDS = 1_000_000_000
_random = random.Random()  # noqa: S311 no secret; not the interpreter's own, whose numbers a model may use


class RequestSpan:
    """The span of a request, child of its caller's. It is ended once; links may be added by another thread."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def context(self) -> SpanContext:
        """What other spans name it by."""
        return self._span.get_span_context()

    def link(self, context: SpanContext) -> None:
        """Link another span, such as that of the batch that answers the request, unless the request has ended."""
        if self._span.is_recording():
            self._span.add_link(context)

    def end(self, attributes: Attributes, *, failed: bool) -> None:
        """End it; `failed`: the server could not answer."""
        self._span.set_attributes(attributes)
        if failed:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class _OpenSpan(TracedSpan):
    """A span that is the current one of its thread while its block runs."""

    def __init__(self, start: Callable[[], trace.Span], on_start: Callable[[SpanContext], object] = bool) -> None:
        self._start = start
        self._on_start = on_start

    @override
    def set(self, name: str, value: str | int | float | bool) -> None:
        self._span.set_attribute(name, value)

    @override
    def __enter__(self) -> Self:
        self._span = self._start()
        self._on_start(self._span.get_span_context())
        self._use = trace.use_span(self._span, end_on_exit=True)
        self._use.__enter__()
        return self

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._use.__exit__(kind, error, trace)


class _Rate:
    """Allows so many a second; those of the last second, and of the one before the start, are saved up."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self._seconds = 1 / per_second
        self._clock = clock
        self._next = clock() - 1.0
        self._lock = threading.Lock()

    def allows_one(self) -> bool:
        """Take a turn; return whether there is one."""
        with self._lock:
            now = self._clock()
            self._next = max(self._next, now - 1.0)
            if self._next > now:
                return False
            self._next += self._seconds
            return True


class Tracer:
    """Decides what is traced, and starts spans. Any thread may use it.

    What is not traced never reaches OpenTelemetry: its sampler would cost as much as a tenth of a small request.
    """

    def __init__(
        self,
        tracer: trace.Tracer,
        settings: TracingSettings,
        left_out: LeftOut,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.left_out = left_out
        """Counts what is left out."""
        self._tracer = tracer
        self._sample = settings.sample
        self._requests = _Rate(settings.requests_per_second, clock)
        self._steps = _Rate(settings.steps_per_second, clock)
        self._propagator = TraceContextTextMapPropagator()

    def request(
        self, name: str, traceparent: str | None, tracestate: str | None, attributes: Callable[[], Attributes]
    ) -> RequestSpan | None:
        """Start the span of a request with these fields; None if it is not traced."""
        sampled = None if traceparent is None else is_sampled(traceparent)
        if sampled is False or (sampled is None and _random.random() >= self._sample):
            return None
        if not self._requests.allows_one():
            self.left_out("rate", 1)
            return None
        parent = Context() if sampled is None else self._parent(traceparent, tracestate)
        return RequestSpan(self._tracer.start_span(name, parent, SpanKind.SERVER, attributes()))

    def batch(self, name: str, requests: Sequence[RequestSpan], attributes: Attributes) -> TracedSpan:
        """Return the span of what is done for several requests at once: it and they are linked."""
        linked = requests[:MOST_LINKS]
        if len(linked) < len(requests):
            self.left_out("links", len(requests) - len(linked))
        links = [Link(each.context) for each in linked]

        def link_back(context: SpanContext) -> None:
            for each in linked:
                each.link(context)

        return _OpenSpan(
            lambda: self._tracer.start_span(name, Context(), SpanKind.INTERNAL, attributes, links), link_back
        )

    def step(self, name: str, traceparents: Sequence[str], attributes: Callable[[], Attributes]) -> TracedSpan:
        """Return the span of a step that learns from events with these contexts, or `NO_SPAN`."""
        if not traceparents and _random.random() >= self._sample:
            return NO_SPAN
        if not self._steps.allows_one():
            self.left_out("rate", 1)
            return NO_SPAN
        if (more := len(traceparents) - MOST_LINKS) > 0:
            self.left_out("links", more)
        parents = [self._parent(each, None) for each in traceparents[:MOST_LINKS]]
        links = [Link(trace.get_current_span(parent).get_span_context()) for parent in parents]
        return _OpenSpan(lambda: self._tracer.start_span(name, Context(), SpanKind.CONSUMER, attributes(), links))

    def span(self, name: str, attributes: Attributes | None = None) -> TracedSpan:
        """Return a span whose parent is the current one of the thread, if there is one."""
        return _OpenSpan(lambda: self._tracer.start_span(name, attributes=attributes))

    def record(self, name: str, seconds: float, attributes: Attributes | None = None) -> None:
        """Record a span that ends now and took `seconds`."""
        end = time.time_ns()
        span = self._tracer.start_span(name, attributes=attributes, start_time=end - round(seconds * _NANOSECONDS))
        span.end(end)

    def _parent(self, traceparent: str | None, tracestate: str | None) -> Context:
        fields = {TRACEPARENT: (traceparent or "")[:LENGTH]}
        if tracestate is not None and is_tracestate(tracestate):
            fields[TRACESTATE] = tracestate
        return self._propagator.extract(fields, Context())
