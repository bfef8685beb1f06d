"""Who is kept: the hash reservoir, with quotas.

Every event has a priority that depends on itself and the seed alone, and of each group the smallest are kept. So what
is held is a pure function of what was offered: an event offered twice changes nothing, order does not matter, and two
reservoirs merge. With u uniform in (0, 1) and weight w the priority -ln(u)/w is exponential with rate w, and the k
smallest are a weighted sample without replacement (Efraimidis and Spirakis 2006). Mind the sign: with the smallest
kept, u**(1/w) would evict the heavy ones.

Legend: N events offered, H events held, n events drawn, G groups.
"""

import functools
import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SLACK = 32
"""One in so many of k are held beyond k, so that one scan evicts many."""
_SAMPLE = 4096
_LEAST_SAMPLED = 64
"""Of a group that a sample has fewer of, it tells nothing."""
_BELOW = 0.94
"""Where in a sorted sample, by its k-th smallest, the events begin that are looked at one by one: none is missed."""
_MOST_GROUPS = 2**15 - 1
_GOLDEN_RATIO = 0.6180339887498949
_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True)
class Offered:
    """N events that are offered.

    Attributes:
        identity: uint64 `[N]`, uniformly distributed.
        weight: float32 `[N]`.
        time_s: of the record, seconds since 1970, `[N]`.
    """

    identity: NDArray[np.uint64]
    weight: NDArray[np.float32]
    time_s: NDArray[np.uint32]


class Admission(Protocol):
    """The policy: the priority by which an event competes, and the group that it competes in."""

    name: str
    """Tells it from every policy under which some event has another priority or group."""
    groups: int
    """How many groups there are, G. The groups share the room evenly; what one does not fill is for the others."""
    by_cluster: bool
    """Whether groups are clusters, which have to be found."""

    def priorities(self, offered: Offered, /) -> NDArray[np.float64]:
        """Return the priority of each event, float64 `[N]`: a pure function of the event; the smallest are kept."""
        ...

    def group(self, label: NDArray[np.int64], cluster: NDArray[np.int16], /) -> NDArray[np.int16]:
        """Return the group of each event, int16 `[N]` in 0..G-1.

        Args:
            label: of each event, -1 for none; 0 where labels are no classes.
            cluster: where its embedding lies; 0 while clusters are not known.
        """
        ...

    def rates(
        self, threshold: NDArray[np.float64], time_s: NDArray[np.uint32], share: NDArray[np.float64], weight: float, /
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what `importance` needs of n events held, float64 `[n]` twice: their rates and shares.

        Args:
            threshold: of each event's group, float64 `[n]`.
            time_s: uint32 `[n]`.
            share: of each event's group, held events / offered events, float64 `[n]`.
            weight: the mean of all that were offered.
        """
        ...


class Reservoir:
    """A uniform sample of all that was offered, weighted by the events' weights."""

    name = "reservoir"
    groups = 1
    by_cluster = False

    def priorities(self, offered: Offered) -> NDArray[np.float64]:
        """-ln(u)/w; u is (identity + 1/2) / 2**64. Weight 0 is never kept: infinity."""
        with np.errstate(divide="ignore"):
            return exponentials(offered.identity) / offered.weight.astype(np.float64)

    def group(self, label: NDArray[np.int64], _cluster: NDArray[np.int16]) -> NDArray[np.int16]:
        """All compete with all."""
        return np.zeros(len(label), np.int16)

    def rates(
        self, threshold: NDArray[np.float64], _time_s: NDArray[np.uint32], share: NDArray[np.float64], _weight: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """An event of weight w is held when an exponential of rate w is below the threshold."""
        return threshold, share


class ClassBalanced(Reservoir):
    """Of every class as many, and within a class a uniform sample; events without a label count as one more class."""

    def __init__(self, classes: int) -> None:
        self.name = f"class-balanced {classes}"
        self.groups = classes + 1

    def group(self, label: NDArray[np.int64], _cluster: NDArray[np.int16]) -> NDArray[np.int16]:
        """The label is the group; -1 is the last one."""
        return np.where(label < 0, self.groups - 1, label).astype(np.int16)


class Diverse(Reservoir):
    """Of every cluster of the model's embeddings as many: where events are alike, more of them get no more room.

    Clusters move as the model learns, so that this depends on order and model. Offering an event again changes nothing
    all the same: one that is held is not added again.
    """

    by_cluster = True

    def __init__(self, clusters: int) -> None:
        self.name = f"diverse {clusters}"
        self.groups = clusters

    def group(self, _label: NDArray[np.int64], cluster: NDArray[np.int16]) -> NDArray[np.int16]:
        """The cluster is the group."""
        return cluster


class Recent(Reservoir):
    """A sample in which an event half as likely stands for each `half_life` that it is older.

    The weight of an event is w * 2**(time/half_life); ln(-ln u) - ln w - time * ln(2)/half_life puts events in the same
    order as -ln(u) over that weight, without numbers that overflow (Efraimidis and Spirakis' A-ES in logarithms).
    """

    def __init__(self, half_life: timedelta) -> None:
        self.name = f"recent {half_life.total_seconds()}"
        self._decay = math.log(2) / half_life.total_seconds()

    def priorities(self, offered: Offered) -> NDArray[np.float64]:
        """Return ln(-ln u) - ln w - time * ln(2)/half_life; weight 0 is never kept: infinity."""
        with np.errstate(divide="ignore"):
            found: NDArray[np.float64] = np.log(exponentials(offered.identity) / offered.weight)
        return found - self._decay * offered.time_s

    def rates(
        self, threshold: NDArray[np.float64], time_s: NDArray[np.uint32], _share: NDArray[np.float64], weight: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Only the weight is made up for, not the age: an event of the mean weight counts as that."""
        rate = np.exp(np.minimum(threshold + self._decay * time_s, 700.0))
        return rate, -np.expm1(-rate * weight)


def exponentials(identity: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return -ln(u) of each event, float64 `[N]`, exponential with rate 1."""
    # log1p keeps the precision of u near 1, where the smallest priorities lie.
    v = (~identity).astype(np.float64) + 0.5
    return -np.log1p(-np.minimum(v / 2.0**64, 1.0 - 2.0**-53))


def importance(weight: Tensor, rate: Tensor, share: Tensor) -> Tensor:
    """Return the weight with which each of n held events stands for those that were offered, float32 `[n]`.

    An event of weight w is held with probability 1 - exp(-w * rate): the inverse of that probability times w makes a
    sum over the sample an estimate of the weighted sum over the stream (Horvitz and Thompson 1952), here per event
    offered. While everything is held that is w itself; when little is held it is the same for all.

    Args:
        weight: of each event, float32 `[n]`, on any device.
        rate: below which exponentials of rate w are held, float64 `[n]`; infinity while everything is.
        share: held events / offered events, float64 `[n]`.
    """
    held = -torch.expm1(-weight.double() * rate)
    stands = weight.double() / held.clamp_min(torch.finfo(torch.float32).tiny) * share
    return torch.where(rate.isinf(), weight, stands.float())


class Quotas:
    """Which events enter, and which of those held leave.

    An event whose priority is below the threshold of its group is held. Thresholds only fall: when more than k + k/32
    are held, the groups that have more than `level` keep so many, the smallest, in one scan, triggered by count, never
    by time. The level is the largest whole number at which not more than k are held in all. It is the same for what is
    held as for all that was ever offered: a group that was never cut has all of its events, one that was cut has more
    than the level.
    """

    def __init__(self, k: int, groups: int = 1) -> None:
        self.k = k
        self.limit = k + k // _SLACK
        """Events that are held at most between two calls."""
        self.at_once = max(64, min(1024, k // _SLACK))
        """Events that enter between two looks at how many are held. It follows from k alone, as who is held must."""
        self.thresholds = np.full(groups, np.inf)

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
