"""Exponential back-off with jitter: processes that failed together do not retry together."""

import random
from datetime import timedelta

_MOST_DOUBLINGS = 30
_random = random.Random()  # noqa: S311 no secret; not the interpreter's own, whose numbers a model may use


class Backoff:
    """Delays before retries in a row: `first`, then twice as long each time, at most `longest`.

    Each delay is shortened by a random part of up to a half. Used by one thread at a time.
    """

    def __init__(self, first: timedelta, longest: timedelta, *, retry_at_once: bool = False) -> None:
        """With `retry_at_once` the first retry has no delay, and `first` is the delay before the second."""
        self._first = first.total_seconds()
        self._longest = longest.total_seconds()
        self._free_retries = 1 if retry_at_once else 0
        self._failures = 0

    def next(self) -> float:
        """Count a failure, and return the seconds to wait before the retry."""
        self._failures += 1
        return self.seconds_after(self._failures)

    def reset(self) -> None:
        """Start again with the shortest delay."""
        self._failures = 0

    def seconds_after(self, failures: int) -> float:
        """Return the seconds to wait after this many failures in a row; counts nothing."""
        doublings = failures - 1 - self._free_retries
        if doublings < 0:
            return 0.0
        longest = min(self._longest, self._first * 2.0 ** min(doublings, _MOST_DOUBLINGS))
        return longest * _random.uniform(0.5, 1.0)
