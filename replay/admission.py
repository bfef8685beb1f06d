"""Who is kept: the hash reservoir.

Every event has a priority that depends on its identity, its weight and the seed alone, and the k smallest are kept. So
what is held is a pure function of what was offered: an event offered twice changes nothing, order does not matter, and
two reservoirs merge by keeping the k smallest of both. With u uniform in (0, 1) and weight w the priority -ln(u)/w is
exponential with rate w, and the k smallest are a weighted sample without replacement (Efraimidis and Spirakis 2006).
Mind the sign: with the smallest kept, u**(1/w) would evict the heavy ones.

Legend: N events offered, H events held.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SLACK = 32
"""One in so many of k are held beyond k, so that one scan evicts many."""


def priorities(identity: NDArray[np.uint64], weight: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return -ln(u)/w of each event, float64 `[N]`; u is (identity + 1/2) / 2**64. Weight 0 is never kept: infinity."""
    # log1p keeps the precision of u near 1, where the smallest priorities lie.
    v = (~identity).astype(np.float64) + 0.5
    with np.errstate(divide="ignore"):
        return -np.log1p(-np.minimum(v / 2.0**64, 1.0 - 2.0**-53)) / weight.astype(np.float64)


def importance(weight: Tensor, threshold: float, share: float) -> Tensor:
    """Return the weight with which each of n held events stands for those that were offered, float32 `[n]`.

    An event of weight w is held with probability 1 - exp(-w * threshold): the inverse of that probability times w makes
    a sum over the sample an estimate of the weighted sum over the stream (Horvitz and Thompson 1952), here per event
    offered. While everything is held that is w itself; when little is held it is the same for all.

    Args:
        weight: of each event, float32 `[n]`, on any device.
        threshold: below which priorities are held.
        share: held events / offered events.
    """
    if math.isinf(threshold):
        return weight
    return weight / -torch.expm1(-weight * threshold).clamp_max(-torch.finfo(torch.float32).tiny) * share


class Reservoir:
    """Which events enter, and which of those held leave.

    Every event with a priority below `threshold` is held. The threshold only falls: when more than k + k/32 are held it
    becomes the k-th smallest priority, and what is not below it leaves, in one scan, triggered by count, never by time.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.limit = k + k // _SLACK
        """Events that are held at most between two calls."""
        self.threshold = np.inf

    def admits(self, priority: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which of N events are to be held, bool `[N]`."""
        return priority < self.threshold

    def lower(self, held: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Lower the threshold to the k smallest of the priorities held, and return who stays, bool `[H]`."""
        if len(held) > self.k:
            self.threshold = float(np.partition(held, self.k)[self.k])
        return held < self.threshold
