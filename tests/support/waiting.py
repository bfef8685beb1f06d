"""Waits for a condition in tests."""

import os
import threading
import time
from datetime import timedelta
from typing import TypeVar

import pytest

T = TypeVar("T")

TAKES_MINUTES = pytest.mark.skipif(
    "ANABRANCH_TEST_LONG" not in os.environ, reason="takes minutes; set ANABRANCH_TEST_LONG=1"
)
PATIENCE_SECONDS = 100.0
"""Longer than anything that is awaited takes."""
PATIENCE = timedelta(seconds=PATIENCE_SECONDS)


def slowness():
    """Return how many times as long as on an idle machine things may take, at least 1: the load of a processor."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Patience:
    """Seconds of an idle machine, from now on: the load is that at their end, since it may come after their begin."""

    def __init__(self, seconds=PATIENCE_SECONDS):
        self._seconds, self._begin = seconds, time.monotonic()

    def lasts(self):
        """Return whether they are not over."""
        passed = time.monotonic() - self._begin
        return passed < self._seconds or passed < self._seconds * slowness()

    def check(self, what="it did not come true"):
        """Fail once they are over, and say `what`, a value or a function that returns it."""
        if not self.lasts():
            pytest.fail(f"after {time.monotonic() - self._begin:.0f} s: {what() if callable(what) else what}")


def wait_until(condition, what="it", patience=PATIENCE_SECONDS, every=0.005):
    """Return the first true value of a condition, which is tried `every` so many seconds.

    Fail after `patience` seconds of an idle machine, and say `what` has not come true.
    """
    left = Patience(patience)
    while not (value := condition()):
        left.check(lambda: f"{what() if callable(what) else what} did not come true")
        threading.Event().wait(every)
    return value
