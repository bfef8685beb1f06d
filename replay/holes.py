"""Counts the events that a store was to hold and does not, and says so from time to time."""

import logging
import time

_QUIET_SECONDS = 10.0
"""Between two lines in the log."""

log = logging.getLogger(__name__)


class Holes:
    """A running total. Used by one thread."""

    def __init__(self) -> None:
        self.count = 0
        self._told, self._tell_at = 0, 0.0

    def add(self, rows: int) -> None:
        """Count so many more."""
        self.count += rows
        if self.count > self._told and time.monotonic() >= self._tell_at:
            log.warning("%d events could not be kept, %d since the start", self.count - self._told, self.count)
            self._told, self._tell_at = self.count, time.monotonic() + _QUIET_SECONDS
