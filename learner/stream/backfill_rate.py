"""The rate at which the history is read, and the time at which its last row is expected."""

import time
from collections import deque
from collections.abc import Callable

from ingest.transport.protocol import HistoryProgress
from learner.state_dir.report import BackfillReport

_WINDOW_SECONDS = 30.0


class BackfillRate:
    """Rows per second over the last half minute. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque()
        """Times, and the rows that were read by then."""

    def report(self, progress: HistoryProgress | None) -> BackfillReport | None:
        """Return the report of the newest progress; None where there is none."""
        if progress is None:
            return None
        now = self._clock()
        self._marks.append((now, progress.rows_done))
        while len(self._marks) > 2 and self._marks[1][0] <= now - _WINDOW_SECONDS:
            self._marks.popleft()
        then, before = self._marks[0]
        rate = 0.0 if progress.done else (progress.rows_done - before) / max(1e-3, now - then)
        left = max(0, progress.rows - progress.rows_done)
        return BackfillReport(
            topics=list(progress.topics),
            rows_read=progress.rows_done,
            rows=progress.rows,
            files_read=progress.files_done,
            files=progress.files,
            file=progress.file or "",
            rate=rate,
            seconds_left=0.0 if progress.done else left / rate if rate > 0 else None,
            done=progress.done,
        )
