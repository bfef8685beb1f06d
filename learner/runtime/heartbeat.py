"""Detects a training loop that hangs."""

import time
from collections.abc import Callable
from datetime import timedelta

from prometheus_client import Gauge

PATIENCE = timedelta(minutes=1)
"""Longest time between two beats: the loop beats after every step, and ten times a second while it is idle."""


class Heartbeat:
    """Detects a loop that no longer beats. The loop's thread beats; any thread may read `problem`.

    Before the first beat the loop starts, which may take long, so there is no problem then.
    """

    def __init__(self, gauge: Gauge, clock: Callable[[], float] = time.monotonic) -> None:
        self._gauge = gauge
        self._clock = clock
        self._last: float | None = None

    def beat(self) -> None:
        """Record that the loop is at a boundary between steps."""
        self._last = self._clock()
        self._gauge.set_to_current_time()

    @property
    def problem(self) -> str | None:
        """One sentence when the last beat was too long ago."""
        if self._last is None or self._clock() - self._last < PATIENCE.total_seconds():
            return None
        return (
            f"the training loop has made no progress for more than {PATIENCE.total_seconds():.0f} s: "
            "the disk, the device or the model hangs; restart the learner if it does not continue"
        )
