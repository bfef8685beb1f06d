"""Waits for a condition in tests."""

import os
import threading
import time
from typing import TypeVar

import pytest

T = TypeVar("T")

TAKES_MINUTES = pytest.mark.skipif(
    "ANABRANCH_TEST_LONG" not in os.environ, reason="takes minutes; set ANABRANCH_TEST_LONG=1"
)
PATIENCE_SECONDS = 100.0
"""Longer than anything that is awaited takes."""


def slowness():
    """Return how many times as long as on an idle machine things may take, at least 1: the load of a processor."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition, what="it", patience=PATIENCE_SECONDS):
    """Return the first true value of a condition; fail after `patience` seconds of an idle machine, and name `what`."""
    patience *= slowness()
    deadline = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {patience:g} s"
        threading.Event().wait(0.005)
    return value
