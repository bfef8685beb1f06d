"""The tracer of a process, over OpenTelemetry's API. The only module that starts spans."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from anabranch.core.tracing.config import TracingSettings
from anabranch.core.tracing.context import (
    LENGTH,
    LONGEST_STATE,
    MOST_LINKS,
    TRACEPARENT,
    TRACESTATE,
    is_sampled,
    is_tracestate,
)
from anabranch.core.tracing.recorder import Recorder
from anabranch.core.tracing.spans import NO_SPAN, Attributes, LeftOut, TracedSpan

_NANOSECONDS = 1_000_000_000
_uniform = random.Random().random  # noqa: S311 no secret; not the interpreter's own, whose numbers a model may use


class RequestSpan:
    """The span of a request, child of its caller's: from now until `end`, which is called once.

    It is one object for the collector of garbage, which goes over all that wait; OpenTelemetry's span is many.
    """

    __slots__ = (
        *("_attributes", "_began", "_ended", "_failed", "_last", "_name"),
        *("_span", "_tracer", "_traceparent", "_tracestate", "batch"),
    )

    def __init__(
        self, tracer: "Tracer", name: str, traceparent: str, tracestate: str | None, attributes: Attributes
    ) -> None:
        self._began = time.time_ns()
        self._ended = 0
        self._tracer = tracer
        self._name = name
        self._traceparent = traceparent
        self._tracestate = tracestate
        self._attributes = attributes
        self._span: trace.Span | None = None
        self.batch: BatchSpan | None = None
        """The batch that answers it, if one began before its end."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._ended > 0

    def end(self, attributes: Attributes, *, failed: bool) -> None:
        """End it; `failed`: the server could not answer."""
        self._last = attributes
        self._failed = failed
        self._ended = time.time_ns()
        self._tracer.recorder.put(self)

    def create(self) -> None:
        """See `EndedSpan`."""
        span = self.started()
        if self.batch is not None:
            self.batch.started()  # which links it
            self.batch = None
        span.set_attributes(self._last)
        if self._failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._ended)

    def started(self) -> trace.Span:
        """Return OpenTelemetry's span, started if it is not yet. Called in the recorder's thread."""
        if self._span is None:
            parent = self._tracer.parent(self._traceparent, self._tracestate)
            start = self._tracer.api.start_span
            self._span = start(self._name, parent, SpanKind.SERVER, self._attributes, start_time=self._began)
        return self._span


class BatchSpan:
    """The span of a batch: what its block does. It is not the current one of its thread."""

    __slots__ = ("_attributes", "_began", "_ended", "_error", "_name", "_requests", "_span", "_tracer")

    def __init__(self, tracer: "Tracer", name: str, requests: Sequence[RequestSpan], attributes: Attributes) -> None:
        """It is linked with `requests`, and they with it."""
        self._tracer = tracer
        self._name = name
        self._requests = requests
        self._attributes = attributes
        self._span: trace.Span | None = None

    def __enter__(self) -> None:
        self._began = time.time_ns()
        for request in self._requests:
            if not request.is_over:
                request.batch = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = time.time_ns()
        self._error = error
        self._tracer.recorder.put(self)

    def create(self) -> None:
        """See `EndedSpan`."""
        span = self.started()
        if self._error is not None:
            span.record_exception(self._error, timestamp=self._ended)
            span.set_status(Status(StatusCode.ERROR, f"{type(self._error).__name__}: {self._error}"))
        span.end(self._ended)

    def started(self) -> trace.Span:
        """Return OpenTelemetry's span, started and linked if it is not yet. Called in the recorder's thread."""
        if self._span is None:
            spans = [request.started() for request in self._requests]
            links = [Link(span.get_span_context()) for span in spans]
            start = self._tracer.api.start_span
            self._span = start(self._name, Context(), SpanKind.INTERNAL, self._attributes, links, self._began)
            for request, span in zip(self._requests, spans, strict=True):
                if request.batch is self and span.is_recording():
                    span.add_link(self._span.get_span_context())
            self._requests = ()  # otherwise they would hold each other
        return self._span


class _OpenSpan(TracedSpan):
    """A span that is the current one of its thread while its block runs."""

    def __init__(self, start: Callable[[], trace.Span]) -> None:
        self._start = start

    @override
    def set(self, name: str, value: str | int | float | bool) -> None:
        self._span.set_attribute(name, value)

    @override
    def __enter__(self) -> Self:
        self._span = self._start()
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
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.left_out = left_out
        """Counts what is left out."""
        self.recorder = recorder
        """Creates the spans of requests and batches."""
        self.api = tracer
        """OpenTelemetry's."""
        self._sample = settings.sample
        self._requests = _Rate(settings.requests_per_second, clock)
        self._steps = _Rate(settings.steps_per_second, clock)
        self._propagator = TraceContextTextMapPropagator()

    def chooses(self, traceparent: str | None) -> bool:
        """Decide whether a request with this field in its head, if any, is traced."""
        sampled = None if traceparent is None else is_sampled(traceparent)
        if sampled is False or (sampled is None and _uniform() >= self._sample):
            return False
        if self._requests.allows_one():
            return True
        self.left_out("rate", 1)
        return False

    def request(
        self, name: str, traceparent: str | None, tracestate: str | None, attributes: Attributes
    ) -> RequestSpan:
        """Start the span of a request that is traced, with the fields of its head."""
        field = (traceparent or "")[: LENGTH + 1]  # thousands of spans may wait: no more than `is_sampled` needs
        return RequestSpan(self, name, field, tracestate and tracestate[: LONGEST_STATE + 1], attributes)

    def batch(self, name: str, requests: Sequence[RequestSpan], attributes: Attributes) -> BatchSpan:
        """Return the span of what is done for several requests at once: it and they are linked."""
        linked = requests[:MOST_LINKS]
        if len(linked) < len(requests):
            self.left_out("links", len(requests) - len(linked))
        return BatchSpan(self, name, linked, attributes)

    def step(self, name: str, traceparents: Sequence[str], attributes: Callable[[], Attributes]) -> TracedSpan:
        """Return the span of a step that learns from events with these contexts, or `NO_SPAN`."""
        if not traceparents and _uniform() >= self._sample:
            return NO_SPAN
        if not self._steps.allows_one():
            self.left_out("rate", 1)
            return NO_SPAN
        if (more := len(traceparents) - MOST_LINKS) > 0:
            self.left_out("links", more)
        parents = [self.parent(each, None) for each in traceparents[:MOST_LINKS]]
        links = [Link(trace.get_current_span(parent).get_span_context()) for parent in parents]
        return _OpenSpan(lambda: self.api.start_span(name, Context(), SpanKind.CONSUMER, attributes(), links))

    def span(self, name: str, attributes: Attributes | None = None) -> TracedSpan:
        """Return a span whose parent is the current one of the thread, if there is one."""
        return _OpenSpan(lambda: self.api.start_span(name, attributes=attributes))

    def record(self, name: str, seconds: float, attributes: Attributes | None = None) -> None:
        """Record a span that ends now and took `seconds`."""
        end = time.time_ns()
        span = self.api.start_span(name, attributes=attributes, start_time=end - round(seconds * _NANOSECONDS))
        span.end(end)

    def parent(self, traceparent: str, tracestate: str | None) -> Context:
        """Return the context of a sender who traces; an empty one for other fields."""
        if not is_sampled(traceparent):
            return Context()
        fields = {TRACEPARENT: traceparent[:LENGTH]}
        if tracestate is not None and is_tracestate(tracestate):
            fields[TRACESTATE] = tracestate
        return self._propagator.extract(fields, Context())
