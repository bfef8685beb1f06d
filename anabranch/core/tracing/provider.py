"""Where spans go: to what `tracing.setup` has set, or by OTLP, exported in the background.

The SDK of OpenTelemetry belongs to the user: the extra `otel` does not install it.
"""

import contextlib
import importlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from anabranch.core.errors import SettingsError
from anabranch.core.tracing.config import TracingSettings
from anabranch.core.tracing.recorder import Recorder
from anabranch.core.tracing.spans import LeftOut

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

NAME = "anabranch"
_MOST_WAITING = 4096
_AT_ONCE = 512
"""Spans of one request to the collector; once so many wait, it is made at once."""
_EXPORT_EVERY = timedelta(seconds=5)
"""As by the SDK's own processor: a request to the collector takes 3 ms of CPU time, however few spans it has."""
_RECORD_EVERY = timedelta(seconds=1)
"""With `tracing.setup`, whose processor may have spans wait once more."""
_DELAY = "OTEL_BSP_SCHEDULE_DELAY"
_LONGEST_DELAY = 3_600_000
_OWN_SESSIONS = (
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER",
    "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER",
)
"""Variables that name what makes the session of an exporter."""
_LONGEST_END = timedelta(seconds=2)
"""How long the end of a process waits for the last spans."""

log = logging.getLogger("anabranch.tracing")


@contextlib.contextmanager
def open_provider(
    settings: TracingSettings, part: str, folder: Path, left_out: LeftOut
) -> Iterator[tuple[trace.Tracer, Recorder]]:
    """Yield the tracer of this process, and what creates spans later.

    Raises:
        SettingsError: `tracing.setup` fails; or there is none, and the SDK or its exporter is not installed.
    """
    if settings.setup:
        _call(settings.setup, part, folder)
        with Recorder(left_out, _RECORD_EVERY) as recorder:
            yield trace.get_tracer(NAME), recorder
        return
    provider, processor = _otlp_provider(part, left_out)
    try:
        with Recorder(left_out, processor.every, processor.force_flush) as recorder:
            yield provider.get_tracer(NAME), recorder
    finally:
        processor.shutdown()


def _call(reference: str, part: str, folder: Path) -> None:
    module_name, _, name = reference.partition(":")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        getattr(importlib.import_module(module_name), name)(part)
    except (Exception, SystemExit) as exc:  # the user's own code may raise anything
        raise SettingsError(f'tracing.setup = "{reference}" fails: {type(exc).__name__}: {exc}') from exc


def _otlp_provider(part: str, left_out: LeftOut) -> tuple[Any, "BackgroundExport"]:
    """Return a provider that exports by OTLP, as the variables `OTEL_*` say."""
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        exporter = _otlp_exporter()
        resource = Resource.create({} if named else {"service.name": f"{NAME}-{part}"})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        processor = BackgroundExport(exporter, left_out, every=_export_every())
    except ImportError as exc:
        raise SettingsError(
            f"[tracing] without tracing.setup needs the SDK of OpenTelemetry and an exporter ({exc}): "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, or set tracing.setup"
        ) from exc
    except ValueError as exc:
        raise SettingsError(f"[tracing]: a variable OTEL_* cannot be used: {exc}") from exc
    provider.add_span_processor(processor)  # type: ignore[arg-type]
    return provider, processor


def _export_every() -> timedelta:
    """Return what the variable of the SDK's own processor says, in milliseconds."""
    delay = os.environ.get(_DELAY, "")
    if not delay:
        return _EXPORT_EVERY
    if not delay.isdecimal() or not 1 <= int(delay) <= _LONGEST_DELAY:
        raise ValueError(f'{_DELAY} is "{delay}"; set it to milliseconds, from 1 to {_LONGEST_DELAY}')
    return timedelta(milliseconds=int(delay))


def _otlp_exporter() -> "SpanExporter":
    protocol = os.environ.get(
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        exporter: SpanExporter = Grpc()
        return exporter
    if protocol != "http/protobuf":
        raise ValueError(f'OTEL_EXPORTER_OTLP_PROTOCOL is "{protocol}"; set it to http/protobuf or grpc')
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    if any(os.environ.get(name) for name in _OWN_SESSIONS):
        return Http()  # the user's own
    from anabranch.core.tracing.otlp_session import BoundedSession

    return Http(session=BoundedSession())


class BackgroundExport:
    """A span processor that exports ended spans in a daemon thread. No method but `shutdown` waits.

    Spans for which its queue has no room, or whose export fails, are left out and counted. The SDK's own processor
    does not count them.
    """

    def __init__(
        self,
        exporter: "SpanExporter",
        left_out: LeftOut,
        most_waiting: int = _MOST_WAITING,
        every: timedelta = _EXPORT_EVERY,
    ) -> None:
        self._exporter = exporter
        self._left_out = left_out
        self._most_waiting = most_waiting
        self.every = every
        """How long a span waits at most, unless an export is slow."""
        self._spans: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="tracing-export", daemon=True)
        self._thread.start()

    def on_start(self, span: object, parent_context: object = None) -> None:
        """Do nothing."""

    def _on_ending(self, span: object) -> None:
        """Do nothing; the SDK calls it."""

    def on_end(self, span: "ReadableSpan") -> None:
        """Enqueue a span that is sampled."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._stopping or len(self._spans) >= self._most_waiting:
            self._left_out("queue", 1)
        else:
            self._spans.append(span)
            if len(self._spans) == _AT_ONCE:
                self._wake.set()

    def force_flush(self, _timeout_millis: int = 0) -> bool:
        """Export soon; return whether all is exported."""
        self._wake.set()
        return not self._spans

    def shutdown(self) -> None:
        """Export what waits, for two seconds at most, and count the rest as left out."""
        self._stopping = True
        self._wake.set()
        self._thread.join(_LONGEST_END.total_seconds())
        if self._thread.is_alive():
            self._left_out("export", len(self._spans))
            self._spans.clear()
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._stopping or self._spans:
            self._wake.wait(self.every.total_seconds())
            if not self._stopping:
                self._wake.clear()
            while self._spans:
                self._export()

    def _export(self) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans: list[ReadableSpan] = []
        with contextlib.suppress(IndexError):  # `shutdown` may have cleared them
            while len(spans) < _AT_ONCE and self._spans:
                spans.append(self._spans.popleft())
        try:
            failed, why = self._exporter.export(spans) is not SpanExportResult.SUCCESS, "see the log of its exporter"
        except Exception as exc:  # noqa: BLE001 whatever an exporter raises must not end the thread
            failed, why = True, f"{type(exc).__name__}: {exc}"
        if failed:
            self._left_out("export", len(spans))
        if failed and not self._failed:
            log.warning("spans cannot be exported, and are left out: %s", why)
        self._failed = failed
