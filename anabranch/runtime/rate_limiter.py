"""A rate, held smoothly."""

import time
from collections.abc import Callable

_SMALLEST_WAIT_SECONDS = 0.02
_FORGIVEN_SECONDS = 0.5


class Pacer:
    """Keeps events at a rate by waiting before them, a few events at a time; None does not wait at all.

    After a delay, it catches up by at most half a second's events.
    """

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._interval = 1 / rate if rate else 0.0
        self._clock = clock
        self._wait = wait
        self._due: float | None = None

    def pace(self) -> None:
        """Wait until the next event may go."""
        if not self._interval:
            return
        now = self._clock()
        due = now if self._due is None else max(self._due, now - _FORGIVEN_SECONDS)
        if due - now >= _SMALLEST_WAIT_SECONDS:
            self._wait(due - now)
        self._due = due + self._interval
