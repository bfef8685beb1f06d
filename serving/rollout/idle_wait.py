"""Lets the thread that loads a version wait while requests run."""

import time
from collections.abc import Callable
from datetime import timedelta

_MOST = timedelta(milliseconds=250)
_POLL = timedelta(milliseconds=1)


class IdleWait:
    """Waits until no request waits or runs, at most `most` in all its calls together: versions are served under any
    load."""

    def __init__(
        self,
        is_idle: Callable[[], bool],
        limit: timedelta = _MOST,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._is_idle = is_idle
        self._left = limit.total_seconds()
        self._clock = clock
        self._sleep = sleep

    def __call__(self) -> None:
        """Return once no request waits or runs, or the time is over."""
        if self._left <= 0 or self._is_idle():
            return
        begin = self._clock()
        while not self._is_idle() and self._clock() - begin < self._left:
            self._sleep(_POLL.total_seconds())
        self._left -= self._clock() - begin
