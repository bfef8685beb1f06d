"""Who is kept: the hash reservoir, with quotas.

Every event has a priority that depends on itself and the seed alone, and of each group the smallest are kept. So what
is held is a pure function of the added events: adding one twice changes nothing, order does not matter, and two
reservoirs merge. With u uniform in (0, 1) and weight w the priority -ln(u)/w is exponential with rate w, and the k
smallest are a weighted sample without replacement (Efraimidis and Spirakis 2006). Mind the sign: with the smallest
kept, u**(1/w) would evict the heavy ones.

Legend: N candidate events, H events held, n events sampled, G groups.
"""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MOST_GROUPS = 2**15 - 1


@dataclass(frozen=True)
class Candidates:
    """N events that compete to be held.

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

    def priorities(self, candidates: Candidates, /) -> NDArray[np.float64]:
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
            share: of each event's group, held events / added events, float64 `[n]`.
            weight: the mean of all added events.
        """
        ...


class ReservoirAdmission:
    """A uniform sample of all added events, weighted by the events' weights."""

    name = "reservoir"
    groups = 1
    by_cluster = False

    def priorities(self, candidates: Candidates) -> NDArray[np.float64]:
        """-ln(u)/w; u is (identity + 1/2) / 2**64. Weight 0 is never kept: infinity."""
        with np.errstate(divide="ignore"):
            return exponentials(candidates.identity) / candidates.weight.astype(np.float64)

    def group(self, label: NDArray[np.int64], _cluster: NDArray[np.int16]) -> NDArray[np.int16]:
        """All compete with all."""
        return np.zeros(len(label), np.int16)

    def rates(
        self, threshold: NDArray[np.float64], _time_s: NDArray[np.uint32], share: NDArray[np.float64], _weight: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """An event of weight w is held when an exponential of rate w is below the threshold."""
        return threshold, share


class ClassBalancedAdmission(ReservoirAdmission):
    """Of every class as many, and within a class a uniform sample; events without a label count as one more class."""

    def __init__(self, classes: int) -> None:
        self.name = f"class-balanced {classes}"
        self.groups = classes + 1

    def group(self, label: NDArray[np.int64], _cluster: NDArray[np.int16]) -> NDArray[np.int16]:
        """The label is the group; -1 is the last one."""
        return np.where(label < 0, self.groups - 1, label).astype(np.int16)


class DiverseAdmission(ReservoirAdmission):
    """Of every cluster of the model's embeddings as many: where events are alike, more of them get no more room.

    Clusters move as the model learns, so that this depends on order and model. Adding an event again changes nothing
    all the same: one that is held is not added again.
    """

    by_cluster = True

    def __init__(self, clusters: int) -> None:
        self.name = f"diverse {clusters}"
        self.groups = clusters

    def group(self, _label: NDArray[np.int64], cluster: NDArray[np.int16]) -> NDArray[np.int16]:
        """The cluster is the group."""
        return cluster


class RecencyAdmission(ReservoirAdmission):
    """A sample in which an event half as likely stands for each `half_life` that it is older.

    The weight of an event is w * 2**(time/half_life); ln(-ln u) - ln w - time * ln(2)/half_life puts events in the same
    order as -ln(u) over that weight, without numbers that overflow (Efraimidis and Spirakis' A-ES in logarithms).
    """

    def __init__(self, half_life: timedelta) -> None:
        self.name = f"recent {half_life.total_seconds()}"
        self._decay = math.log(2) / half_life.total_seconds()

    def priorities(self, candidates: Candidates) -> NDArray[np.float64]:
        """Return ln(-ln u) - ln w - time * ln(2)/half_life; weight 0 is never kept: infinity."""
        with np.errstate(divide="ignore"):
            found: NDArray[np.float64] = np.log(exponentials(candidates.identity) / candidates.weight)
        return found - self._decay * candidates.time_s

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
    """Return the weight with which each of n held events represents the added events, float32 `[n]`.

    An event of weight w is held with probability 1 - exp(-w * rate): the inverse of that probability times w makes a
    sum over the sample an estimate of the weighted sum over the stream (Horvitz and Thompson 1952), here per added
    event. While everything is held that is w itself; when little is held it is the same for all.

    Args:
        weight: of each event, float32 `[n]`, on any device.
        rate: below which exponentials of rate w are held, float64 `[n]`; infinity while everything is.
        share: held events / added events, float64 `[n]`.
    """
    held = -torch.expm1(-weight.double() * rate)
    stands = weight.double() / held.clamp_min(torch.finfo(torch.float32).tiny) * share
    return torch.where(rate.isinf(), weight, stands.float())
