"""Freshness: how old events are, from append, when the first version that has learned them is served.

A version tells of the events that it is the first to have learned; those of versions that were never served are served
with the next. Ages are those of all events alike, so a burst weighs more than a trickle.
"""

import numpy as np

from learner.errors import VersionError
from learner.state_dir.version import Versions
from learner.stream.record_times import RecordTimes
from serving.metrics import Ages

_MOST_TIMES = 32
_MOST_VERSIONS = 64


class FreshnessTracker:
    """What the versions since the served one have learned. Used by the swap's thread."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._heard: int | None = None
        self._learned: dict[int, RecordTimes] = {}

    def hear(self, numbers: list[int]) -> None:
        """Read what new versions have learned, before they may be superseded and deleted.

        Those that are there at the first call are passed over: how long they waited for this process says nothing.
        """
        if self._heard is None:
            self._heard = max(numbers, default=0)
        for number in numbers:
            if number > self._heard:
                self._heard = number
                self._read(number)

    def served(self, number: int, now: float) -> tuple[int, Ages]:
        """Return how many events are served from `now` on that were not, and their ages; `number` is served."""
        bag = RecordTimes()
        for older in [older for older in self._learned if older <= number]:
            bag.join(self._learned.pop(older))
        ages = now - bag.quantiles(_MOST_TIMES)[::-1] / 1000
        return bag.rows, np.maximum(0.0, ages)

    def _read(self, number: int) -> None:
        try:
            learned = self._versions.manifest(number).learned
        except (VersionError, OSError):  # which is told of when it is to be served
            return
        if learned is None:
            return
        bag = self._learned[number] = RecordTimes()
        bag.add(np.array(learned.times_ms, np.int64), learned.rows)
        if len(self._learned) > _MOST_VERSIONS:
            first, second = sorted(self._learned)[:2]
            self._learned[second].join(self._learned.pop(first))
