"""A rate, held smoothly."""

import threading
import time
from collections.abc import Callable

_SMALLEST_WAIT_SECONDS = 0.02
_FORGIVEN_SECONDS = 0.5


class Pacer:
    """Keeps events at a rate by waiting before them, a few events at a time; None does not wait at all.

    After a delay, it catches up by at most half a second's events.
    """

    def __init__(
        self,
        rate: float | None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._interval = 1 / rate if rate else 0.0
        self._clock = clock
        self._wait = wait
        self._due: float | None = None

    def pace(self) -> None:
        """Wait until the next event may go."""
        if not self._interval:
            return
        now = self._clock()
        due = now if self._due is None else max(self._due, now - _FORGIVEN_SECONDS)
        if due - now >= _SMALLEST_WAIT_SECONDS:
            self._wait(due - now)
        self._due = due + self._interval


class PacedThread:
    """A daemon thread whose work goes at a rate, until it is stopped; a subclass has the work, as `_run`."""

    def __init__(self, name: str, rate: float | None) -> None:
        self._stop = threading.Event()
        self._pacer = Pacer(rate, wait=self._stop.wait)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin the work."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread finish what it is at, and wait for its end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        """Do the work; paces itself by `_pacer`, and ends once `_stop` is set."""
        raise NotImplementedError
