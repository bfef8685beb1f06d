"""How long a process has said nothing while this one was there to hear it: what tells one that hangs."""

import time
from collections.abc import Callable
from enum import Enum

SILENT_SECONDS = 40.0
"""Longer than a broker that is away holds an ingest process up: requests to it have 30 s at most."""
ANSWER_SECONDS = 5.0
"""After so long without an answer a process that was asked is said to be silent."""
_AT_ONCE_SECONDS = 1.0
"""Between two looks no more counts: in the rest of it this process was busy, or itself suspended."""


class Liveness(Enum):
    """What silence tells."""

    NOTHING = "it is not long yet"
    ASK = "a process with nothing to say is to be asked for a word, once"
    SILENT = "it was asked, and has not answered yet"
    HANGS = "it was asked, and has said nothing"


class HangDetector:
    """Begins when a process starts, and anew with each of its words."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.heard()

    def heard(self) -> None:
        """Begin anew."""
        self._seconds, self._looked = 0.0, self._clock()

    def look(self) -> Liveness:
        """Count the time since the last look, in which no word came."""
        now, before, half = self._clock(), self._seconds, SILENT_SECONDS / 2
        self._seconds += min(now - self._looked, _AT_ONCE_SECONDS)
        self._looked = now
        if before < half <= self._seconds:
            return Liveness.ASK
        if before < half + ANSWER_SECONDS <= self._seconds < SILENT_SECONDS:
            return Liveness.SILENT
        return Liveness.HANGS if self._seconds >= SILENT_SECONDS else Liveness.NOTHING
