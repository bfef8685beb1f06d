"""The sampler `agreement`: less often what is probably labelled wrongly.

Legend: n events of a call, D numbers of an embedding, R recent events, K neighbours.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from replay.reservoir.event_table import EventTable
from replay.reservoir.recent_embeddings import RecentEmbeddings, unit
from replay.sampling.base import Slots
from replay.sampling.proportional import WeightedSampler

RECENT = 512
"""Replayed events that an event is compared with. They are a sample of the store, with embeddings of the present model:
an index of all would have older ones."""
_NEIGHBOURS = 10
_LEAST = 5 * _NEIGHBOURS
"""So many recent events are needed before any is compared."""
_MOST, _OWN = 7, 2
"""An event disagrees if so many of its neighbours have one other label, and at most so few its own. Where neighbours
disagree among themselves, the model is not good enough to judge."""
_RARELY = 0.125
"""The weight of an event that disagrees with its neighbours, where many do."""
_MANY, _FEW = 0.15, 0.12
"""Fractions of the compared events that disagree: above the first one labels are probably wrong, and weights apply
until it falls below the second. Fewer are rather events that are hard to learn."""
_UNKNOWN, _AGREES, _DISAGREES = range(3)


class AgreementSampler(WeightedSampler):
    """Samples an eighth as often what has another label than most of its nearest neighbours by the model's embedding.

    An event is compared each time that it is replayed, and until then sampled as often as any. While few disagree,
    samples are uniform.
    """

    uses_embeddings = True
    divisible = True
    """Weights differ by a factor of eight at most, so that parts of a choice differ little."""

    def __init__(self, event_table: EventTable, slots: int, recent: RecentEmbeddings) -> None:
        super().__init__(event_table, slots)
        self._recent = recent
        self._opinion = np.zeros(slots, np.int8)
        self._counts = np.zeros(3, np.int64)
        """Held events, by opinion."""
        self._avoids = False

    @override
    def add(self, slots: Slots) -> None:
        self._positions.take(slots)
        self._weigh(slots, 1.0)
        self._counts[_UNKNOWN] += len(slots)

    @override
    def remove(self, slots: Slots) -> None:
        super().remove(slots)
        self._recent.remove(slots)
        self._counts -= np.bincount(self._opinion[slots], minlength=3)
        self._opinion[slots] = _UNKNOWN

    @override
    def update_embeddings(self, slots: Slots, embedding_nD: NDArray[np.float32]) -> None:
        label = self._event_table.column("label", slots).astype(np.int64)
        labelled = label >= 0  # an event without a label cannot have a wrong one
        slots, label, unit_nD = slots[labelled], label[labelled], unit(embedding_nD[labelled])
        if len(slots) and np.count_nonzero(self._recent.slots >= 0) >= _LEAST:
            opinion = np.where(self._disagrees(slots, label, unit_nD), _DISAGREES, _AGREES)
            self._set(slots, opinion.astype(np.int8))
        # Each event is there once: otherwise the neighbours in a small store would be one event several times.
        self._recent.remove(slots)
        self._recent.add(unit_nD, label, slots)

    @override
    def state(self) -> dict[str, NDArray[np.generic]]:
        # Not the embeddings, which could be of erased events: soon there are new ones.
        opinions = self._opinion[self._event_table.slots]
        return {**super().state(), "opinions": opinions, "avoids": np.array([self._avoids])}

    @override
    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        super().restore(state)
        if {"opinions", "avoids"} <= state.keys():
            self._avoids = bool(state["avoids"][0])
            self._set(self._event_table.slots, state["opinions"].astype(np.int8))

    def _set(self, slots: Slots, opinion: NDArray[np.int8]) -> None:
        """Set the opinions on n events, and their weights."""
        self._counts += np.bincount(opinion, minlength=3) - np.bincount(self._opinion[slots], minlength=3)
        self._opinion[slots] = opinion
        known = int(self._counts[_AGREES:].sum())
        avoids = known >= _LEAST and self._counts[_DISAGREES] > (_FEW if self._avoids else _MANY) * known
        if avoids != self._avoids:
            self._avoids, slots = avoids, self._event_table.slots
        elif not avoids:
            return  # all weights are 1
        rarely = avoids & (self._opinion[slots] == _DISAGREES)
        self._weigh(slots, np.where(rarely, _RARELY, 1.0))

    def _disagrees(self, slots: Slots, label: NDArray[np.int64], unit_nD: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return which of n events have another label than most of their K nearest recent ones."""
        distance_nR = self._recent.distances(unit_nD)
        # An event is no neighbour of itself, nor is one that was removed.
        distance_nR[(self._recent.slots == slots[:, None]) | (self._recent.slots < 0)] = np.inf
        nearest_nK = np.argpartition(distance_nR, _NEIGHBOURS, axis=1)[:, :_NEIGHBOURS]
        label_nK = self._recent.labels[nearest_nK]
        # Of each neighbour, how many neighbours have the same label.
        alike_nK = (label_nK[:, :, None] == label_nK[:, None, :]).sum(axis=2)
        own = (label_nK == label[:, None]).sum(axis=1)
        disagrees: NDArray[np.bool_] = (own <= _OWN) & (alike_nK.max(axis=1) >= _MOST)
        return disagrees
