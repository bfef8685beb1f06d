"""How many events of each group are held, and the threshold of each.

Legend: N added events, H events held, G groups.
"""

import functools
import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_SLACK = 32
"""One in so many of k are held beyond k, so that one scan evicts many."""
_SAMPLE = 4096
_LEAST_SAMPLED = 64
"""Of a group that a sample has fewer of, it tells nothing."""
_BELOW = 0.94
"""Where in a sorted sample, by its k-th smallest, the events begin that are looked at one by one: none is missed."""
_GOLDEN_RATIO = 0.6180339887498949
_Value = TypeVar("_Value", bound=np.generic)


class Quotas:
    """Which events enter, and which of those held leave.

    An event whose priority is below the threshold of its group is held. Thresholds only fall: when more than k + k/32
    are held, the groups that have more than `level` keep so many, the smallest, in one scan, triggered by count, never
    by time. The level is the largest whole number at which not more than k are held in all. It is the same for what is
    held as for all that was ever added: a group that was never reduced has all of its events, one that was has
    more than the level.
    """

    def __init__(self, k: int, groups: int = 1) -> None:
        self.k = k
        self.limit = k + k // _SLACK
        """Events that are held at most between two calls."""
        self.at_once = max(64, min(1024, k // _SLACK))
        """Events that enter between two looks at how many are held. It follows from k alone, as who is held must."""
        self.thresholds = np.full(groups, np.inf)

    def slots_for(self, n: int) -> int:
        """Return how many free slots n events need at most that are added between two checkpoints.

        No more than can be held at any moment: new events that are evicted before a checkpoint free their slots.
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
        """Lower the thresholds to what fits, and return who stays, bool `[H]`.

        Args:
            held: the priorities of the events held, float64 `[H]`.
            group: theirs, int16 `[H]`.
            counts: how many of each group are held, int `[G]`; None: they are counted.
        """
        if len(held) <= self.k:
            return self.admits(held, group)
        counts = np.bincount(group, minlength=len(self.thresholds)) if counts is None else counts
        few = self._lower_one(held) if len(counts) == 1 else self._lower_groups(held, group, counts)
        stays = np.ones(len(held), np.bool_)
        stays[few] = self.admits(held.take(few), group.take(few))
        return stays

    def _lower_one(self, held: NDArray[np.float64]) -> NDArray[np.intp]:
        """Lower the threshold of the one group, and return who may have to leave: places that rise."""
        few = np.flatnonzero(held >= min(self.thresholds[0], _floor(_sampled(held), self.k / len(held))))
        few = few if len(few) >= len(held) - self.k else np.arange(len(held))
        self.thresholds[0] = _kth_smallest(held.take(few), self.k - (len(held) - len(few)))
        return few

    def _lower_groups(
        self, held: NDArray[np.float64], group: NDArray[np.int16], counts: NDArray[np.int64]
    ) -> NDArray[np.intp]:
        """Do the same for several."""
        most = level(counts, self.k)
        over = np.flatnonzero(counts > most)
        floors, sample, members = self.thresholds.copy(), _sampled(held), _sampled(group)
        for each in over.tolist():
            floors[each] = min(floors[each], _floor(sample[members == each], most / counts[each]))
        few, parts = _from(floors, held, group)
        missed = [each for each in over.tolist() if counts[each] - len(parts[each]) > most]
        if missed:
            floors[missed] = -np.inf
            few, parts = _from(floors, held, group)
        for each in over.tolist():
            self.thresholds[each] = _kth_smallest(parts[each], most - (counts[each] - len(parts[each])))
        return few


def level(counts: NDArray[np.int64], k: int) -> int:
    """Return the largest whole number q with sum(min(counts, q)) <= k, for counts `[G]` whose sum exceeds k."""
    rising = np.sort(counts)
    below = np.concatenate([[0], np.cumsum(rising)[:-1]])
    levels = (k - below) // np.arange(len(rising), 0, -1)
    return int(levels[np.flatnonzero(levels < rising)[0]])


def _kth_smallest(values: NDArray[np.float64], k: int) -> float:
    """Return the value that has exactly k smaller ones, were all different."""
    return float(np.partition(values, k)[k])


def _sampled(values: NDArray[_Value]) -> NDArray[_Value]:
    """Return some of H values, the same places of each column; where there are not many, none."""
    return values.take((_even() * len(values)).astype(np.intp)) if len(values) > 8 * _SAMPLE else values[:0]


@functools.cache
def _even() -> NDArray[np.float64]:
    """Return numbers from 0 to 1 that lie evenly and have no period, as groups that come in turn have one."""
    return np.sort(np.arange(_SAMPLE) * _GOLDEN_RATIO % 1.0)


def _floor(sample: NDArray[np.float64], part: float) -> float:
    """Return a value that mostly less than that part of all lie below, by a sample of them."""
    if len(sample) < _LEAST_SAMPLED:
        return -math.inf
    place = int(len(sample) * part * _BELOW)
    return float(np.partition(sample, place)[place])


def _from(
    floors: NDArray[np.float64], held: NDArray[np.float64], group: NDArray[np.int16]
) -> tuple[NDArray[np.intp], list[NDArray[np.float64]]]:
    """Return who is not below the floor of its group, places that rise, and their priorities by group."""
    few = np.flatnonzero(held >= floors[group])
    mine = group.take(few)
    order = np.argsort(mine, kind="stable")
    ends = np.cumsum(np.bincount(mine, minlength=len(floors)))
    return few, np.split(held.take(few.take(order)), ends[:-1])
