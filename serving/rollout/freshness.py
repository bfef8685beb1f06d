"""Freshness: the age of events, since append, when the first version that has learned them is served.

A manifest lists the events that its version is the first to have learned. Events of versions that were never served
count with the next one. Every event weighs the same, so a burst weighs more than a trickle.
"""

import numpy as np

from learner.errors import VersionError
from learner.state_dir.version import Versions
from learner.stream.record_times import RecordTimes
from serving.metrics import Ages

_MOST_TIMES = 32
_MOST_VERSIONS = 64


class FreshnessTracker:
    """Events learned by the versions since the served one. Used by the swap's thread."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._newest_read: int | None = None
        self._learned: dict[int, RecordTimes] = {}

    def read_new(self, numbers: list[int]) -> None:
        """Read the newly learned events of new versions, before those may be superseded and deleted.

        Versions that exist at the first call are skipped: they waited for this process to start.
        """
        if self._newest_read is None:
            self._newest_read = max(numbers, default=0)
        for number in numbers:
            if number > self._newest_read:
                self._newest_read = number
                self._read(number)

    def served(self, number: int, now: float) -> tuple[int, Ages]:
        """Return how many events version `number` is the first served one to have learned, and their ages at `now`."""
        bag = RecordTimes()
        for older in [older for older in self._learned if older <= number]:
            bag.join(self._learned.pop(older))
        ages = now - bag.quantiles(_MOST_TIMES)[::-1] / 1000
        return bag.rows, np.maximum(0.0, ages)

    def _read(self, number: int) -> None:
        try:
            learned = self._versions.manifest(number).learned
        except (VersionError, OSError):  # reported when it is to be served
            return
        if learned is None:
            return
        bag = self._learned[number] = RecordTimes()
        bag.add(np.array(learned.times_ms, np.int64), learned.rows)
        if len(self._learned) > _MOST_VERSIONS:
            first, second = sorted(self._learned)[:2]
            self._learned[second].join(self._learned.pop(first))
