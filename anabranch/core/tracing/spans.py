"""The spans of this process: what the code that is traced calls. Imports nothing of OpenTelemetry before `tracing`.

There is one tracer for each process, as there is one for logs; without one, each call costs a comparison.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter

from anabranch.core.extras import needs
from anabranch.core.tracing.context import Attributes
from anabranch.core.tracing.settings import TracingSettings

if TYPE_CHECKING:
    from anabranch.core.tracing.tracer import Tracer


class TracedSpan(Protocol):
    """A span in progress, such as OpenTelemetry's."""

    def set_attribute(self, key: str, value: str | int | float | bool) -> None:
        """Set an attribute."""
        ...


class _NoSpan:
    """In place of a span that is not traced."""

    def set_attribute(self, key: str, value: str | int | float | bool) -> None:
        pass


NO_SPAN: AbstractContextManager[TracedSpan] = contextlib.nullcontext(_NoSpan())
_tracers: "list[Tracer]" = []
"""The tracer of this process, if it traces."""


def left_out_counter(registry: CollectorRegistry) -> Counter:
    """Return the metric of what tracing left out."""
    return Counter(
        "anabranch_tracing_left_out",
        "Spans left out: queue (full), export (failed), setup (raised).",
        ["reason"],
        registry=registry,
    )


@contextlib.contextmanager
def tracing(
    settings: TracingSettings | None, part: str, folder: Path, left_out: Callable[[str, int], object]
) -> Iterator[None]:
    """Trace this process while the block runs; do nothing without settings.

    Args:
        settings: `[tracing]`.
        part: "serving" or "learner".
        folder: the config's folder, last on the Python path: `tracing.setup` may be there.
        left_out: counts spans that are left out, with the reason. Called by any thread.

    Raises:
        SettingsError: OpenTelemetry is not installed, one of its variables cannot be used, or `tracing.setup` fails.
    """
    if settings is None:
        yield
        return
    with needs("[tracing]", "OpenTelemetry", "otel", "take the section out"):
        from anabranch.core.tracing.provider import open_provider
        from anabranch.core.tracing.tracer import Tracer
    with open_provider(settings, part, folder, left_out) as tracer:
        _tracers.append(Tracer(tracer, settings.sample, left_out))
        try:
            yield
        finally:
            _tracers.pop()


def current_tracer() -> "Tracer | None":
    """Return the tracer of this process; None where it does not trace."""
    return _tracers[-1] if _tracers else None


def span(name: str, attributes: Attributes | None = None) -> AbstractContextManager[TracedSpan]:
    """Return a span, not started yet; of one that is entered within another, in the same thread, that is the parent."""
    return _tracers[-1].span(name, attributes) if _tracers else NO_SPAN


def record(name: str, seconds: float, attributes: Attributes | None = None) -> None:
    """Record a span that ends now and took `seconds`."""
    if _tracers:
        _tracers[-1].record(name, seconds, attributes)
