"""Where spans go: to what `tracing.setup` has set, or by OTLP, exported in the background by OpenTelemetry's SDK."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.tracing.settings import TracingSettings
from anabranch.core.users_code import UsersCodeError, imported, in_one_line

NAME = "anabranch"
_MOST_WAITING = 2048
_OWN_SESSIONS = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
)
"""Variables that name what makes the session of an exporter."""
_LONGEST_END = timedelta(seconds=2)
"""How long the end of a process waits for the last spans."""


@contextlib.contextmanager
def open_provider(
    settings: TracingSettings, part: str, folder: Path, left_out: Callable[[str, int], object]
) -> Iterator[trace.Tracer]:
    """Yield the tracer of this process.

    Raises:
        SettingsError: `tracing.setup` fails, or a variable `OTEL_*` cannot be used.
    """
    logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)  # a caller's `tracestate` may be anything
    if settings.setup:
        _call(settings.setup, part, folder)
        yield trace.get_tracer(NAME)
        return
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    try:
        resource = Resource.create({} if named else {"service.name": f"{NAME}-{part}"})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        processor = BackgroundExport(_otlp_exporter(), left_out)
    except ValueError as exc:
        raise SettingsError(f"[tracing]: a variable OTEL_* cannot be used: {exc}") from exc
    provider.add_span_processor(processor)
    try:
        yield provider.get_tracer(NAME)
    finally:
        processor.shutdown()


def _call(reference: str, part: str, folder: Path) -> None:
    """Call the user's function with the name of the process."""
    try:
        imported(reference, folder)(part)
    except UsersCodeError as exc:
        raise SettingsError(f'tracing.setup = "{reference}": {exc}') from exc
    except (Exception, SystemExit) as exc:  # the user's own code may raise anything
        raise SettingsError(f'tracing.setup = "{reference}" fails: {in_one_line(exc)}') from exc


def _otlp_exporter() -> SpanExporter:
    protocol = os.environ.get(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    )
    if protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc
        except ImportError as exc:
            raise ValueError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL is grpc ({exc}): pip install opentelemetry-exporter-otlp-proto-grpc"
            ) from exc
        exporter: SpanExporter = Grpc()
        return exporter
    if protocol != "http/protobuf":
        raise ValueError(f'OTEL_EXPORTER_OTLP_PROTOCOL is "{protocol}"; set it to http/protobuf or grpc')
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    if any(os.environ.get(name) for name in _OWN_SESSIONS):
        return Http()  # the user's own
    from anabranch.core.bounded_session import BoundedSession

    return Http(session=BoundedSession())


class BackgroundExport(SpanProcessor):
    """The SDK's `BatchSpanProcessor`, which counts what it leaves out, and at its end waits two seconds at most.

    Spans for which its queue has no room, or whose export fails, are left out.
    """

    def __init__(
        self, exporter: SpanExporter, left_out: Callable[[str, int], object], most_waiting: int = _MOST_WAITING
    ) -> None:
        self._left_out = left_out
        self._most_waiting = most_waiting
        self._lock = threading.Lock()
        self._waiting = 0
        self._ended = False
        self._batches = BatchSpanProcessor(_Counted(exporter, self), most_waiting)

    @override
    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock:
            left_out = self._ended or self._waiting >= self._most_waiting
            self._waiting += not left_out
        if left_out:
            self._left_out("queue", 1)
        else:
            self._batches.on_end(span)

    def take(self, spans: int) -> bool:
        """Take spans that are about to be exported off the queue; return whether they are still to be exported."""
        with self._lock:
            self._waiting -= spans
            return not self._ended

    def failed(self, spans: int) -> None:
        """Count spans whose export has failed."""
        self._left_out("export", spans)

    @override
    def shutdown(self) -> None:
        """Export what waits, for two seconds at most, and count the rest as left out."""
        export = threading.Thread(target=self._batches.shutdown, name="tracing-end", daemon=True)
        export.start()
        export.join(_LONGEST_END.total_seconds())
        with self._lock:
            self._ended, waiting = True, self._waiting
        if waiting:
            self._left_out("export", waiting)


class _Counted(SpanExporter):
    """An exporter whose processor counts the spans that it takes and those that it could not export."""

    def __init__(self, exporter: SpanExporter, processor: BackgroundExport) -> None:
        self._exporter = exporter
        self._processor = processor

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if not self._processor.take(len(spans)):
            return SpanExportResult.FAILURE
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._processor.failed(len(spans))
        return result

    @override
    def shutdown(self) -> None:
        self._exporter.shutdown()
