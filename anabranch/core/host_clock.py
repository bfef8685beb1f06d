"""The time of this host, as far as a long-running process may rely on it.

The wall clock of a host may be wrong for a while: before NTP has set it, after a virtual machine was paused, or where
somebody sets it by hand. What is decided by a time that was too late, such as that an event has waited long enough,
cannot be taken back. A time that is too early only delays it. So a `HostClock` believes a step back at once, and a step
forward once it has lasted for some minutes.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

_CONFIRMED = timedelta(minutes=10)
"""A clock that is put right by hand or by NTP is ahead for a shorter time than this."""


class HostClock:
    """The wall clock, without its steps forward until they have lasted. May be used by several threads.

    It is never ahead of the wall clock, never goes back unless the wall clock does, and between two steps it runs as
    fast as the monotonic clock. The first time that it is asked for, the wall clock is believed.

    Use it as the upper bound of times that others write, such as record times: no state may only rise with these.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        confirmed: timedelta = _CONFIRMED,
    ) -> None:
        """Take the clocks, in seconds, and for how long a step forward has to last until it is believed."""
        self._wall, self._monotonic = wall, monotonic
        self._confirmed = confirmed.total_seconds()
        self._lock = threading.Lock()
        self._offset: float | None = None
        """Seconds from the monotonic clock to the wall clock that are believed."""
        self._later: tuple[float, float] | None = None
        """Since when the wall clock is later than that, and the lowest offset since then."""

    def now(self) -> float:
        """Return seconds since 1970."""
        with self._lock:
            # In this order a thread that is suspended in between sees a step forward, which is not believed yet.
            monotonic = self._monotonic()
            offset = self._wall() - monotonic
            if self._offset is None or offset <= self._offset:
                self._offset, self._later = offset, None
            else:
                since, lowest = self._later or (monotonic, offset)
                self._later = since, min(lowest, offset)
                if monotonic - since >= self._confirmed:
                    self._offset, self._later = self._later[1], None
            return monotonic + self._offset


HOST_CLOCK = HostClock()
"""The clock of this process."""
