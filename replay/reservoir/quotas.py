"""How many events of each group are held: quotas, and the thresholds that enforce them.

Legend: N added events, H events held, G groups.
"""

import functools
import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_SLACK = 32
"""Up to k / _SLACK events are held beyond k, so that one scan evicts many."""
_SAMPLE = 4096
_LEAST_SAMPLED = 64
"""A group with fewer events in the sample is scanned as a whole."""
_MARGIN = 0.94
"""Events above this fraction of the k-th smallest of a sample are examined one by one, so that none is missed."""
_GOLDEN_RATIO = 0.6180339887498949
_Value = TypeVar("_Value", bound=np.generic)


class Quotas:
    """Which events are admitted, and which held events are evicted.

    An event is held if its priority is below the threshold of its group. Thresholds only fall. When more than k + k/32
    events are held, one scan reduces each group that has more than `level` events to its `level` smallest. The scan is
    triggered by count, never by time. The level is the largest integer with which at most k events are held in total.
    It is the same for the held events as for all added events: a group that was never reduced has all of its events,
    and one that was reduced has more than the level.

    With floors, groups share one threshold instead, above which only those events are held without which a group would
    have fewer than its floor. That too is the same for the held events as for all added events.
    """

    def __init__(self, k: int, groups: int = 1, floors: NDArray[np.int64] | None = None) -> None:
        """Hold k events; `floors`: the least of each group, if it has as many, int64 `[G]` with a sum of at most k."""
        self.k = k
        self._floors = floors
        self.limit = k + k // _SLACK
        """The most events that are held between two calls."""
        self.at_once = max(64, min(1024, k // _SLACK))
        """Events that are inserted between two scans. Depends on k alone, since the held events depend on it."""
        self.thresholds = np.full(groups, np.inf)

    def slots_for(self, n: int) -> int:
        """Return how many free slots suffice for n events that are added between two checkpoints.

        At most as many as can be held at once: new events that are evicted before a checkpoint free their slots.
        """
        return max(self.at_once, min(n, self.limit + self.at_once))

    def admits(self, priority: NDArray[np.float64], group: NDArray[np.int16]) -> NDArray[np.bool_]:
        """Return which of N events are to be held, bool `[N]`."""
        limits = self.thresholds[0] if len(self.thresholds) == 1 else self.thresholds[group]
        admitted: NDArray[np.bool_] = priority < limits
        return admitted

    def lower(
        self, held: NDArray[np.float64], group: NDArray[np.int16], counts: NDArray[np.int64] | None = None
    ) -> NDArray[np.bool_]:
        """Lower the thresholds until at most k events are held, and return which stay, bool `[H]`.

        Args:
            held: the priorities of the held events, float64 `[H]`.
            group: their groups, int16 `[H]`.
            counts: the number of held events of each group, int `[G]`; None: they are counted.
        """
        if len(held) <= self.k:
            return self.admits(held, group)
        counts = np.bincount(group, minlength=len(self.thresholds)) if counts is None else counts
        if self._floors is not None:
            self._lower_to_floors(held, group, counts, self._floors)
            return self.admits(held, group)
        few = self._lower_one(held) if len(counts) == 1 else self._lower_groups(held, group, counts)
        stays = np.ones(len(held), np.bool_)
        stays[few] = self.admits(held.take(few), group.take(few))
        return stays

    def _lower_to_floors(
        self,
        held: NDArray[np.float64],
        group: NDArray[np.int16],
        counts: NDArray[np.int64],
        floors: NDArray[np.int64],
    ) -> None:
        """Lower the thresholds of all groups to a common one, but of those that would fall below their floors to it."""
        least, short = np.minimum(counts, floors), np.zeros(len(counts), np.bool_)
        while True:
            others, room = held[~short[group]], self.k - int(least[short].sum())
            common = _kth_smallest(others, room) if len(others) > room else math.inf
            # The more events the groups at their floors have, the lower is the threshold of the others.
            shorter = short | (np.bincount(group[held < common], minlength=len(counts)) < floors)
            if (shorter == short).all():
                break
            short = shorter
        self.thresholds[~short] = np.minimum(self.thresholds[~short], common)
        for each in np.flatnonzero(short & (counts > floors)).tolist():
            self.thresholds[each] = _kth_smallest(held[group == each], int(floors[each]))

    def _lower_one(self, held: NDArray[np.float64]) -> NDArray[np.intp]:
        """Lower the threshold of the only group; return the ascending positions of events that may be evicted."""
        few = np.flatnonzero(held >= min(self.thresholds[0], _floor(_sampled(held), self.k / len(held))))
        few = few if len(few) >= len(held) - self.k else np.arange(len(held))
        self.thresholds[0] = _kth_smallest(held.take(few), self.k - (len(held) - len(few)))
        return few

    def _lower_groups(
        self, held: NDArray[np.float64], group: NDArray[np.int16], counts: NDArray[np.int64]
    ) -> NDArray[np.intp]:
        """Lower the thresholds of several groups; return the ascending positions of events that may be evicted."""
        quota = level(counts, self.k)
        over = np.flatnonzero(counts > quota)
        floors, sample, members = self.thresholds.copy(), _sampled(held), _sampled(group)
        for each in over.tolist():
            floors[each] = min(floors[each], _floor(sample[members == each], quota / counts[each]))
        few, parts = _at_or_above(floors, held, group)
        missed = [each for each in over.tolist() if counts[each] - len(parts[each]) > quota]
        if missed:
            floors[missed] = -np.inf
            few, parts = _at_or_above(floors, held, group)
        for each in over.tolist():
            self.thresholds[each] = _kth_smallest(parts[each], quota - (counts[each] - len(parts[each])))
        return few


def level(counts: NDArray[np.int64], k: int) -> int:
    """Return the largest integer q with sum(min(counts, q)) <= k, for counts `[G]` whose sum exceeds k."""
    rising = np.sort(counts)
    below = np.concatenate([[0], np.cumsum(rising)[:-1]])
    levels = (k - below) // np.arange(len(rising), 0, -1)
    return int(levels[np.flatnonzero(levels < rising)[0]])


def _kth_smallest(values: NDArray[np.float64], k: int) -> float:
    """Return the value that has exactly k smaller ones, if all are different."""
    return float(np.partition(values, k)[k])


def _sampled(values: NDArray[_Value]) -> NDArray[_Value]:
    """Return a sample of H values, at the same positions of each column; empty if there are few values."""
    return values.take((_even() * len(values)).astype(np.intp)) if len(values) > 8 * _SAMPLE else values[:0]


@functools.cache
def _even() -> NDArray[np.float64]:
    """Return evenly spaced numbers from 0 to 1 without a period, since groups may alternate periodically."""
    return np.sort(np.arange(_SAMPLE) * _GOLDEN_RATIO % 1.0)


def _floor(sample: NDArray[np.float64], part: float) -> float:
    """Return a value below which, judging by a sample, normally less than `part` of all values are."""
    if len(sample) < _LEAST_SAMPLED:
        return -math.inf
    index = int(len(sample) * part * _MARGIN)
    return float(np.partition(sample, index)[index])


def _at_or_above(
    floors: NDArray[np.float64], held: NDArray[np.float64], group: NDArray[np.int16]
) -> tuple[NDArray[np.intp], list[NDArray[np.float64]]]:
    """Return the ascending positions of events at or above the floor of their group, and their priorities by group."""
    few = np.flatnonzero(held >= floors[group])
    groups = group.take(few)
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups, minlength=len(floors)))
    return few, np.split(held.take(few.take(order)), ends[:-1])
