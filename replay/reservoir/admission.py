"""Admission policies: the priorities of a hash reservoir, and its groups.

The priority of an event depends only on the event and a secret seed, and each group keeps its smallest priorities. So
the held events are a pure function of the added events: adding an event twice changes nothing, order does not matter,
and two reservoirs can be merged. With u uniform in (0, 1) and weight w the priority -ln(u)/w is exponential with rate
w, and the k smallest are a weighted sample without replacement (Efraimidis and Spirakis 2006). Mind the sign: with the
smallest kept, u**(1/w) would evict the heavy events.

Legend: N candidate events, H events held, n events sampled, G groups.
"""

import math
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override


@dataclass(frozen=True)
class Candidates:
    """N events that compete to be held.

    Attributes:
        hashed: uint64 `[N]`, `keyed_hash` of the identities, uniformly distributed.
        weight: float32 `[N]`.
        time_s: of the record, seconds since 1970, `[N]`.
    """

    hashed: NDArray[np.uint64]
    weight: NDArray[np.float32]
    time_s: NDArray[np.uint32]


@dataclass(frozen=True)
class ClassFloor:
    """Each of C classes has at least this share of an equal part of the store, while there are as many events of it.

    Attributes:
        classes: C.
        share: from 0 to 1.
    """

    classes: int
    share: float


class Admission:
    """An admission policy: the priority of each event, and the group in which it competes.

    This one keeps a uniform sample of all added events, weighted by the events' weights; or of the events of each
    class, as far as a floor demands. Others extend it.
    """

    kind = "reservoir"
    """The beginning of the name."""
    by_cluster = False
    """Whether groups are clusters of embeddings, which the index process computes."""

    def __init__(self, floor: ClassFloor | None = None) -> None:
        self._floor = floor
        self.groups = 1 if floor is None else floor.classes + 1
        """How many groups there are, G."""
        self.name = self.kind if floor is None else f"{self.kind} {floor.classes} {floor.share}"
        """Differs for policies under which some event has another priority or group."""

    def floors(self, k: int) -> NDArray[np.int64] | None:
        """Return the least events of each group in a store of k, int64 `[G]`; None: groups have equal quotas, and the
        others use what one does not fill."""
        if self._floor is None:
            return None
        # Events without a label, the last group, have none.
        return np.append(np.full(self._floor.classes, int(self._floor.share * k / self._floor.classes)), 0)

    def priorities(self, candidates: Candidates) -> NDArray[np.float64]:
        """Return the priority of each event, float64 `[N]`: a pure function of the event; the smallest are kept."""
        # -ln(u)/w with u = (identity + 1/2) / 2**64. Weight 0 gives infinity, which is never kept.
        with np.errstate(divide="ignore"):
            return exponentials(candidates.hashed) / candidates.weight.astype(np.float64)

    def group(self, label: NDArray[np.int64], _cluster: NDArray[np.int16]) -> NDArray[np.int16]:
        """Return the group of each event, int16 `[N]` in 0..G-1.

        Args:
            label: of each event, -1 for none; 0 where labels are no classes.
            _cluster: of its embedding; 0 while clusters are unknown.
        """
        return np.zeros(len(label), np.int16) if self.groups == 1 else _by_class(label, self.groups)

    def rates(
        self, threshold: NDArray[np.float64], _time_s: NDArray[np.uint32], share: NDArray[np.float64], _weight: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the rates and shares of n held events, which `importance` needs, float64 `[n]` each.

        Args:
            threshold: of each event's group, float64 `[n]`.
            _time_s: uint32 `[n]`.
            share: of each event's group, held events / added events, float64 `[n]`.
            _weight: the mean of all added events.
        """
        # An event of weight w is held if an exponential of rate w is below the threshold.
        return threshold, share


class ClassBalancedAdmission(Admission):
    """As many events of each class, a uniform sample within a class; events without a label are one more class."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.name = f"class-balanced {classes}"
        self.groups = classes + 1


class DistinctAdmission(Admission):
    """As `Admission`, of the events that the store admits as no near-duplicates of recent ones."""

    kind = "distinct"

    @override
    def rates(
        self, threshold: NDArray[np.float64], _time_s: NDArray[np.uint32], _share: NDArray[np.float64], weight: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        # Near-duplicates are added but not held, so that their share would weigh the others less.
        return threshold, share_of_mean(threshold, weight)


class DiverseAdmission(Admission):
    """As many events of each cluster of the model's embeddings: frequent similar events get no more room.

    Clusters move as the model learns, so the held events depend on order and model. Adding a held event again still
    changes nothing.
    """

    by_cluster = True

    def __init__(self, clusters: int) -> None:
        super().__init__()
        self.name = f"diverse {clusters}"
        self.groups = clusters

    @override
    def group(self, _label: NDArray[np.int64], cluster: NDArray[np.int16]) -> NDArray[np.int16]:
        return cluster

    @override
    def rates(
        self, threshold: NDArray[np.float64], _time_s: NDArray[np.uint32], _share: NDArray[np.float64], weight: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        # The clusters of earlier events are unknown, and so is how many were added to each.
        return threshold, share_of_mean(threshold, weight)


class RecencyAdmission(Admission):
    """A sample in which the probability of an event halves with each `half_life` of its age.

    The weight of an event is w * 2**(time/half_life). ln(-ln u) - ln w - time * ln(2)/half_life sorts events like
    -ln(u) over that weight, without overflow (Efraimidis and Spirakis' A-ES in logarithms).
    """

    def __init__(self, half_life: timedelta, floor: ClassFloor | None = None) -> None:
        self.kind = f"recent {half_life.total_seconds()}"
        super().__init__(floor)
        self._decay = math.log(2) / half_life.total_seconds()

    @override
    def priorities(self, candidates: Candidates) -> NDArray[np.float64]:
        with np.errstate(divide="ignore"):
            ageless: NDArray[np.float64] = np.log(exponentials(candidates.hashed) / candidates.weight)
        return ageless - self._decay * candidates.time_s

    @override
    def rates(
        self, threshold: NDArray[np.float64], time_s: NDArray[np.uint32], _share: NDArray[np.float64], weight: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        # Corrects for the weight, not for the age: an event of the mean weight keeps that weight.
        rate = np.exp(np.minimum(threshold + self._decay * time_s, 700.0))
        return rate, share_of_mean(rate, weight)


def _by_class(label: NDArray[np.int64], groups: int) -> NDArray[np.int16]:
    return np.where(label < 0, groups - 1, label).astype(np.int16)


def exponentials(hashed: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return -ln(u) of each event, float64 `[N]`, exponential with rate 1."""
    # log1p keeps the precision of u near 1, where the smallest priorities are.
    v = (~hashed).astype(np.float64) + 0.5
    return -np.log1p(-np.minimum(v / 2.0**64, 1.0 - 2.0**-53))


def share_of_mean(rate: NDArray[np.float64], weight: float) -> NDArray[np.float64]:
    """Return the probability that an event of the mean weight is held: with it as share, it keeps its weight."""
    share: NDArray[np.float64] = -np.expm1(-rate * weight)
    return share


def importance(weight: Tensor, rate: Tensor, share: Tensor) -> Tensor:
    """Return the weight with which each of n held events represents the added events, float32 `[n]`.

    An event of weight w is held with probability 1 - exp(-w * rate). Weighted by w over that probability, a sum over
    the sample estimates the weighted sum over the stream (Horvitz and Thompson 1952), here per added event. While
    everything is held this is w itself; when few events are held it is the same for all.

    Args:
        weight: of each event, float32 `[n]`, on any device.
        rate: events are held if an exponential of rate w is below it, float64 `[n]`; infinity while all are held.
        share: held events / added events, float64 `[n]`.
    """
    held = -torch.expm1(-weight.double() * rate)
    represented = weight.double() / held.clamp_min(torch.finfo(torch.float32).tiny) * share
    return torch.where(rate.isinf(), weight, represented.float())
