"""A background thread that repeats one piece of work, until it is stopped."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Self


class PeriodicThread:
    """A daemon thread, and a context manager that starts and stops it. Any thread may call the methods."""

    def __init__(
        self,
        name: str,
        work: Callable[[], float],
        patience: timedelta = timedelta(0),
        *,
        first: timedelta = timedelta(0),
        ended: Callable[[BaseException], object] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            name: of the thread.
            work: does one piece of work, and returns the seconds until the next one.
            patience: how long the end of the block waits for work that goes on.
            first: the pause before the first piece of work.
            ended: called by the thread with the exception of the work, which ends it; None: it is raised there.
        """
        self._work = work
        self._patience = patience
        self._first = first.total_seconds()
        self._ended = ended
        self._wake = threading.Event()
        self.stopping = False
        """Whether no piece of work begins any more."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        """Start the thread, and return this."""
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, at most for so many seconds."""
        self._thread.join(seconds)

    def wake(self) -> None:
        """End the current pause."""
        self._wake.set()

    def stop(self) -> None:
        """Begin no piece of work any more, and wait for the current one, at most for `patience`."""
        self.stopping = True
        self._wake.set()
        if self._patience and self._thread.ident is not None:
            self._thread.join(self._patience.total_seconds())

    def _run(self) -> None:
        pause = self._first
        try:
            while True:
                if pause:
                    self._wake.wait(pause)
                self._wake.clear()
                if self.stopping:
                    return
                pause = self._work()
        except BaseException as exc:
            if self._ended is None:
                raise
            self._ended(exc)
