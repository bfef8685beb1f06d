"""Lets the thread that loads a version wait while requests run."""

import time
from collections.abc import Callable
from datetime import timedelta

_MOST = timedelta(milliseconds=250)
_POLL = timedelta(milliseconds=1)
_TURN = timedelta(microseconds=200)
"""How long the thread may run between two rests."""
_REST = timedelta(microseconds=20)


class IdleWait:
    """Waits until no request waits or runs, at most `most` in all its calls together: versions are served under any
    load.

    A request that has just arrived counts as waiting once the event loop's thread has the interpreter's lock, for which
    it would wait up to the 5 ms of `sys.getswitchinterval`. So the thread that loads rests regularly: while it sleeps,
    any other thread gets the lock and the core.
    """

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
        self._rested = clock()

    def __call__(self) -> None:
        """Return once no request waits or runs, or the time is over."""
        begin = self._clock()
        if self._left <= 0:
            return
        if begin - self._rested >= _TURN.total_seconds():
            self._sleep(_REST.total_seconds())
        elif self._is_idle():
            return
        while not self._is_idle() and self._clock() - begin < self._left:
            self._sleep(_POLL.total_seconds())
        self._rested = self._clock()
        self._left -= self._rested - begin
