"""One piece of work at a time in a thread of its own, for what the loop must not wait for."""

import threading
from collections.abc import Callable

from learner.deadline import Deadline


class Background:
    """Used by the loop's thread. An exception in the work is a bug, and comes up in `raise_bug`, where it is seen."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._bug: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether the last piece of work is not done yet."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], object]) -> None:
        """Begin a piece of work; the one before must be done."""
        assert not self.busy

        def run() -> None:
            try:
                work()
            except Exception as exc:  # noqa: BLE001 the top of a thread: `raise_bug` hands it on
                self._bug = exc

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self, deadline: Deadline | None = None) -> None:
        """Wait until the work is done, or the deadline is over."""
        if self._thread is not None:
            self._thread.join(None if deadline is None else deadline.left)

    def raise_bug(self) -> None:
        """Raise what the work raised, if it did."""
        if self._bug is not None:
            raise self._bug
