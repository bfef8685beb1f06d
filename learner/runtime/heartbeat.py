"""Detects a training loop that hangs, or that other programs leave little processor time."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from prometheus_client import Gauge

PATIENCE = timedelta(minutes=1)
"""Longest time between two beats: the loop beats after every step, and ten times a second while it is idle."""

_MARK_SECONDS, _MARKS = 1.0, 11
_LITTLE = 0.35
"""Less than its due next to one busy program for each core, which is half."""


def processor_times() -> tuple[float, float]:
    """Return how long this thread has run and has waited for a core, in seconds; zeros where no kernel says so."""
    with contextlib.suppress(OSError, ValueError):
        ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9
    return 0.0, 0.0


class Heartbeat:
    """Detects a loop that no longer beats, or gets little processor time. The loop's thread beats; any may read.

    Before the first beat the loop starts, which may take long, so there is no problem then.
    """

    def __init__(
        self,
        gauge: Gauge,
        clock: Callable[[], float] = time.monotonic,
        processor_times: Callable[[], tuple[float, float]] = processor_times,
    ) -> None:
        self._gauge = gauge
        self._clock = clock
        self._processor_times = processor_times
        self._last: float | None = None
        self._marks: deque[tuple[float, float, float]] = deque(maxlen=_MARKS)

    def beat(self) -> None:
        """Record that the loop is at a boundary between steps."""
        self._last = self._clock()
        self._gauge.set_to_current_time()
        if not self._marks or self._last - self._marks[-1][0] >= _MARK_SECONDS:
            self._marks.append((self._last, *self._processor_times()))

    @property
    def problem(self) -> str | None:
        """One sentence when the last beat was too long ago."""
        if self._last is None or self._clock() - self._last < PATIENCE.total_seconds():
            return None
        return (
            f"the training loop has made no progress for more than {PATIENCE.total_seconds():.0f} s: "
            "the disk, the device or the model hangs; restart the learner if it does not continue"
        )

    @property
    def warning(self) -> str | None:
        """One sentence while other programs leave the loop's thread little of the processor time that it asks for."""
        if len(self._marks) < _MARKS:
            return None
        seconds, ran, waited = (now - then for now, then in zip(self._marks[-1], self._marks[0], strict=True))
        if ran + waited < seconds / 2 or ran >= _LITTLE * (ran + waited):
            return None
        return (
            f"training has got {ran / (ran + waited):.0%} of the processor time that it asked for in the last "
            f"{seconds:.0f} s: other programs use the cores; stop them, or give the learner its own"
        )
