"""Samplers that balance groups: classes, or clusters of embeddings.

Legend: H events held, n sampled, G groups.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from replay.embedding_index.embedding_tracker import UNKNOWN, EmbeddingTracker
from replay.reservoir.event_table import EventTable
from replay.sampling.base import MAX_STALE, TAKEN, Choice, Slots, UniformSampler, stale_share
from replay.sampling.group_lists import GroupLists


class BalancedSampler(UniformSampler):
    """Samples each group equally often, and uniformly within a group; larger groups fill up for smaller ones."""

    divisible = False

    def __init__(self, event_table: EventTable, group_of: Callable[[Slots], NDArray[np.int64]]) -> None:
        super().__init__(event_table)
        self._group_of = group_of
        self._groups = GroupLists()

    @override
    def sample(self, n: int, generator: np.random.Generator) -> Choice:
        slots = self._groups.sample(min(n, len(self._event_table)), generator)
        return Choice(generator.permutation(slots))

    @override
    def add(self, slots: Slots) -> None:
        self._groups.add(self._group_of(slots), slots)

    @override
    def remove(self, slots: Slots) -> None:
        self._groups.discard(slots)


class ClusterSampler(BalancedSampler):
    """Samples each cluster of the model's embeddings equally often.

    Events without a known cluster, as after a restart, are sampled in proportion to their number. When the index
    process has trained new clusters, all events are grouped again. One event in eight is replaced by a stale one of its
    cluster, whose embedding is of an old model: sampling it updates the embedding.
    """

    def __init__(self, event_table: EventTable, tracker: EmbeddingTracker) -> None:
        super().__init__(event_table, lambda slots: tracker.clusters(slots).astype(np.int64))
        self._tracker = tracker
        self._grouped = tracker.training
        self._stale = np.empty(0, np.int32)

    @override
    def sample(self, n: int, generator: np.random.Generator) -> Choice:
        if self._grouped != self._tracker.training:
            self._grouped, self._groups = self._tracker.training, GroupLists()
            self.add(self._event_table.slots)
        any_ = UniformSampler.sample(self, n, generator).slots
        slots = any_[self._tracker.clusters(any_) == UNKNOWN]
        slots = np.concatenate([slots, self._groups.sample(len(any_) - len(slots), generator)])
        # If the clusters have fewer events, the sample has all of them; the rest is uniform.
        slots = np.concatenate([slots, any_[~np.isin(any_, slots)]])[: len(any_)]
        return Choice(generator.permutation(self._with_stale(slots, stale_share(n, generator))))

    @override
    def add(self, slots: Slots) -> None:
        super().add(slots[self._tracker.clusters(slots) != UNKNOWN])

    @override
    def remove(self, slots: Slots) -> None:
        super().remove(slots)
        self._stale = self._stale[~np.isin(self._stale, slots)]

    def _with_stale(self, slots: Slots, n: int) -> Slots:
        """Replace up to n events by stale ones of the same clusters; stale events without a match wait."""
        stale = self._stale
        if len(stale) < MAX_STALE:
            stale = np.concatenate([stale, self._tracker.stale(n)])
        clusters = self._tracker.clusters(slots).copy()
        clusters[np.isin(slots, stale)] = TAKEN
        stale = stale[~np.isin(stale, slots)]
        waits = np.ones(len(stale), np.bool_)
        for at, cluster in enumerate(self._tracker.clusters(stale).tolist()):
            matches = np.flatnonzero(clusters == cluster)[: n - int((~waits).sum())]
            if len(matches):
                slots[matches[0]], clusters[matches[0]], waits[at] = stale[at], TAKEN, False
        self._stale = stale[waits]
        return slots
