"""Limits the log lines that network clients can cause in other libraries."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

LIMITED = ("uvicorn.error", "asyncio")
"""Loggers that write a line, or a traceback, for a request that is not HTTP."""

_MOST_LINES = 10
_EVERY = timedelta(seconds=1)


class RateLimit(logging.Filter):
    """Passes ten lines a second; the next one contains how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._since = 0.0
        self._written = 0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the line."""
        with self._lock:
            now = time.monotonic()
            if now - self._since >= _EVERY.total_seconds():
                self._since, self._written = now, 0
            if self._written >= _MOST_LINES:
                self._left_out += 1
                return False
            self._written += 1
            left_out, self._left_out = self._left_out, 0
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} lines before this one were left out)", ()
        return True


@contextlib.contextmanager
def limited_lines(names: tuple[str, ...] = LIMITED) -> Iterator[None]:
    """Limit each of these loggers separately while the block runs."""
    limits = [(logging.getLogger(name), RateLimit()) for name in names]
    for logger, limit in limits:
        logger.addFilter(limit)
    try:
        yield
    finally:
        for logger, limit in limits:
            logger.removeFilter(limit)
