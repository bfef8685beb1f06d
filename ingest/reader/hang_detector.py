"""How long a process has sent no message while this process waited for one: how a hang is recognised."""

import time
from collections.abc import Callable
from enum import Enum

SILENT_SECONDS = 40.0
"""A process that sent nothing for this long hangs; a broker that is away blocks it for at most 30 s."""
ANSWER_SECONDS = 5.0
"""A process that was pinged and sent nothing for this long is reported as silent."""
_MOST_PER_CHECK_SECONDS = 1.0
"""Time between two checks counts up to this: beyond it this process was busy, or suspended itself."""


class Liveness(Enum):
    """What the time without a message says of a process."""

    ALIVE = "the time is short"
    PING = "the time is long enough to ask for a report, once"
    SILENT = "it was asked for a report, and has sent none yet"
    HUNG = "it was asked for a report, and sent none"


class HangDetector:
    """Counts the time since the last message of a process. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Start counting from zero: a message came, or a process was started."""
        self._seconds, self._checked_at = 0.0, self._clock()

    def check(self) -> Liveness:
        """Count the time since the last check, in which no message came, and return what it says of the process."""
        now, before, half = self._clock(), self._seconds, SILENT_SECONDS / 2
        self._seconds += min(now - self._checked_at, _MOST_PER_CHECK_SECONDS)
        self._checked_at = now
        if before < half <= self._seconds:
            return Liveness.PING
        if before < half + ANSWER_SECONDS <= self._seconds < SILENT_SECONDS:
            return Liveness.SILENT
        return Liveness.HUNG if self._seconds >= SILENT_SECONDS else Liveness.ALIVE
