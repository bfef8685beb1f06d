"""One budget of time that is handed down through the parts of a shutdown."""

import time
from datetime import timedelta


class Deadline:
    """A moment on the monotonic clock."""

    def __init__(self, budget: timedelta) -> None:
        self._at = time.monotonic() + budget.total_seconds()

    @property
    def left(self) -> float:
        """Seconds left, never less than 0."""
        return max(0.0, self._at - time.monotonic())
