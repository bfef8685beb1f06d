"""Waits for a condition in tests."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 100.0
"""Longer than anything takes on a machine that has ten times too much to do."""


def wait_until(condition: Callable[[], T], what: str = "it", patience: float = PATIENCE_SECONDS) -> T:
    """Return the first true value of a condition; fail after `patience` seconds, naming `what` was awaited."""
    deadline = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {patience:g} s"
        threading.Event().wait(0.005)
    return value
