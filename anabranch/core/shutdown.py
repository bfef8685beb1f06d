"""The time budget of a shutdown, which is passed down through its parts."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta


class Deadline:
    """A point in time on the monotonic clock."""

    def __init__(self, budget: timedelta) -> None:
        self._at = time.monotonic() + budget.total_seconds()

    @property
    def left(self) -> float:
        """Seconds left, never less than 0."""
        return max(0.0, self._at - time.monotonic())


@contextlib.contextmanager
def hard_stop_after(stop: threading.Event, stop_timeout: timedelta) -> Iterator[None]:
    """End the process when `stop_timeout` has passed since `stop` was set: a step, a device or a disk may hang."""
    done = threading.Event()

    def watch() -> None:
        stop.wait()
        if not done.wait(stop_timeout.total_seconds()):
            sys.stderr.write("anabranch: learner.stop_timeout exceeded; exiting without cleanup\n")
            os._exit(1)

    threading.Thread(target=watch, name="stop-timeout", daemon=True).start()
    try:
        yield
    finally:
        done.set()
