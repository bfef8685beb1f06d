"""Runs one piece of work at a time in a background thread, so that the loop does not wait."""

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from learner.runtime.shutdown import Deadline

_PATIENCE_SECONDS = 60.0


class BackgroundWorker:
    """A background thread for the loop's thread. An exception in the work is a bug, which `raise_bug` raises again.

    So is one in `check`, which is called before each piece of work; the work is skipped then.

    The thread is kept: starting one waits until it is scheduled, which takes long on a busy core.
    """

    def __init__(self, name: str, check: Callable[[], object] = bool) -> None:
        self._name = name
        self._check = check
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._done = threading.Event()
        self._done.set()
        self._bug: Exception | None = None
        self._began = 0.0

    def overdue(self, path: Path, every_seconds: float) -> str | None:
        """Return one sentence when the work, which writes below `path`, takes over a minute and twice `every_seconds`.

        Any thread may call it. A disk that hangs raises no error.
        """
        bound = max(_PATIENCE_SECONDS, 2 * every_seconds)
        if not self.busy or time.monotonic() - self._began <= bound:
            return None
        return f"what is written to {path} has taken more than {bound:g} s so far; is its disk slow or away?"

    @property
    def busy(self) -> bool:
        """Whether a piece of work is running."""
        return not self._done.is_set()

    def start(self, work: Callable[[], object]) -> None:
        """Start a piece of work; the previous one must be done."""
        assert not self.busy
        self._began = time.monotonic()
        self._done.clear()
        self._queue.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait until the work is done, or the deadline has passed."""
        self._done.wait(None if deadline is None else deadline.left)

    def raise_bug(self) -> None:
        """Raise the exception of the work, if there was one."""
        if self._bug is not None:
            raise self._bug

    def _run(self) -> None:
        while True:
            self._do(self._queue.get())

    def _do(self, work: Callable[[], object]) -> None:
        """Run the work; no reference to it, and to its copies, is kept afterwards."""
        try:
            self._check()
            work()
        except Exception as exc:  # noqa: BLE001 the top of a thread: `raise_bug` raises it again
            self._bug = exc
        finally:
            del work
            self._done.set()
