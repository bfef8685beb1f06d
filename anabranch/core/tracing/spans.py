"""The spans of this process: what the code that is traced calls. Imports nothing of OpenTelemetry before `tracing`.

There is one tracer for each process, as there is one for logs; without one, each call costs a comparison.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from prometheus_client import CollectorRegistry, Counter
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.tracing.config import TracingSettings

if TYPE_CHECKING:
    from anabranch.core.tracing.tracer import Tracer

Attributes = Mapping[str, str | int | float | bool]
LeftOut = Callable[[str, int], object]
"""Counts spans, or links of spans, that were left out: the reason, and how many."""


class TracedSpan(Protocol):
    """A span in progress; a context manager, which ends it."""

    def set(self, name: str, value: str | int | float | bool) -> None:
        """Set an attribute."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _NoSpan(TracedSpan):
    """In place of a span that is not traced."""

    @override
    def set(self, name: str, value: str | int | float | bool) -> None:
        pass

    @override
    def __enter__(self) -> Self:
        return self

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


NO_SPAN: TracedSpan = _NoSpan()
_tracers: "list[Tracer]" = []
"""The tracer of this process, if it traces."""


def left_out_counter(registry: CollectorRegistry) -> Counter:
    """Return the metric of what tracing left out."""
    return Counter(
        "anabranch_tracing_left_out",
        "Spans and links left out: queue (full), export (failed), rate (of requests or steps), links (too many).",
        ["reason"],
        registry=registry,
    )


@contextlib.contextmanager
def tracing(settings: TracingSettings | None, part: str, folder: Path, left_out: LeftOut) -> Iterator[None]:
    """Trace this process while the block runs; do nothing without settings.

    Args:
        settings: `[tracing]`.
        part: "serving" or "learner".
        folder: the config's folder, last on the Python path: `tracing.setup` may be there.
        left_out: counts what is left out. Called by any thread.

    Raises:
        SettingsError: OpenTelemetry, or what it needs, is not installed, or `tracing.setup` fails.
    """
    if settings is None:
        yield
        return
    try:
        # Imported here since it is an extra.
        from anabranch.core.tracing.provider import open_provider
        from anabranch.core.tracing.tracer import Tracer
    except ImportError as exc:
        raise SettingsError(
            f'[tracing] needs opentelemetry-api ({exc}): pip install "anabranch[otel]", or take the section out'
        ) from exc
    with open_provider(settings, part, folder, left_out) as (tracer, recorder):
        _tracers.append(Tracer(tracer, settings, left_out, recorder))
        try:
            yield
        finally:
            _tracers.pop()


def current_tracer() -> "Tracer | None":
    """Return the tracer of this process; None where it does not trace."""
    return _tracers[-1] if _tracers else None


def span(name: str, attributes: Attributes | None = None) -> TracedSpan:
    """Return a span, not started yet; of one that is entered within another, in the same thread, that is the parent."""
    return _tracers[-1].span(name, attributes) if _tracers else NO_SPAN


def record(name: str, seconds: float, attributes: Attributes | None = None) -> None:
    """Record a span that ends now and took `seconds`."""
    if _tracers:
        _tracers[-1].record(name, seconds, attributes)


def count_left_out(reason: str, count: int) -> None:
    """Count links that were left out before they came to a span."""
    if _tracers and count:
        _tracers[-1].left_out(reason, count)
