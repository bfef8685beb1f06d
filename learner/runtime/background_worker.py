"""One piece of work at a time in a thread of its own, for what the loop must not wait for."""

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from learner.runtime.shutdown import Deadline

_PATIENCE_SECONDS = 60.0


class BackgroundWorker:
    """Used by the loop's thread. An exception in the work is a bug, and comes up in `raise_bug`, where it is seen.

    So does one of `check`, which is called before each piece of work: that is not done then.

    The thread stays: to start one is to wait until it runs, which on a busy core takes as long as its turn does.
    """

    def __init__(self, name: str, check: Callable[[], object] = bool) -> None:
        self._name = name
        self._check = check
        self._thread: threading.Thread | None = None
        self._given: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._done = threading.Event()
        self._done.set()
        self._bug: Exception | None = None
        self._began = 0.0

    def overdue(self, path: Path, every_seconds: float) -> str | None:
        """Return one sentence when the work, which writes below `path`, takes a minute and twice as long as planned.

        Any thread may ask. A disk that hangs raises no error.
        """
        bound = max(_PATIENCE_SECONDS, 2 * every_seconds)
        if not self.busy or time.monotonic() - self._began <= bound:
            return None
        return f"what is written to {path} has taken more than {bound:g} s so far; is its disk slow or away?"

    @property
    def busy(self) -> bool:
        """Whether the last piece of work is not done yet."""
        return not self._done.is_set()

    def start(self, work: Callable[[], object]) -> None:
        """Begin a piece of work; the one before must be done."""
        assert not self.busy
        self._began = time.monotonic()
        self._done.clear()
        self._given.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait until the work is done, or the deadline is over."""
        self._done.wait(None if deadline is None else deadline.left)

    def raise_bug(self) -> None:
        """Raise what the work raised, if it did."""
        if self._bug is not None:
            raise self._bug

    def _run(self) -> None:
        while True:
            self._do(self._given.get())

    def _do(self, work: Callable[[], object]) -> None:
        """Do it; nothing holds on to the work, and what it has copied, once it is done."""
        try:
            self._check()
            work()
        except Exception as exc:  # noqa: BLE001 the top of a thread: `raise_bug` hands it on
            self._bug = exc
        finally:
            del work
            self._done.set()
