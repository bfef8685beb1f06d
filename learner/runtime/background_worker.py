"""Runs one piece of work at a time in a background thread, so that the loop does not wait."""

import time
from collections.abc import Callable

from anabranch.core.job_thread import JobThread
from learner.runtime.shutdown import Deadline

_PATIENCE_SECONDS = 60.0


class BackgroundWorker:
    """A background thread for the loop's thread. An exception in the work is a bug, which `raise_bug` raises again.

    So is one in `check`, which is called before each piece of work; the work is skipped then.
    """

    def __init__(self, name: str, check: Callable[[], object] = bool) -> None:
        self._thread = JobThread(name)
        self._check = check
        self._began = 0.0
        self.unsettled = False
        """Whether work was started whose end no `raise_bug` has seen."""

    def overdue(self, location: str, every_seconds: float) -> str | None:
        """Return one sentence when the work takes over a minute and twice `every_seconds`; it writes to `location`.

        Any thread may call it. A disk that hangs raises no error.
        """
        bound = max(_PATIENCE_SECONDS, 2 * every_seconds)
        if not self.busy or time.monotonic() - self._began <= bound:
            return None
        return f"what is written to {location} has taken more than {bound:g} s so far; is it slow or away?"

    @property
    def busy(self) -> bool:
        """Whether a piece of work is running."""
        return self._thread.busy

    def start(self, work: Callable[[], object]) -> None:
        """Start a piece of work; the previous one must be done."""
        assert not self.busy
        self._began, self.unsettled = time.monotonic(), True
        self._thread.submit(lambda: (self._check(), work()))

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait until the work is done, or the deadline has passed."""
        self._thread.wait(None if deadline is None else deadline.left)

    def raise_bug(self) -> None:
        """Raise the exception of the work, if there was one."""
        self.unsettled = self._thread.busy
        self._thread.raise_bug()
