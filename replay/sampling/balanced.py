"""Samplers that sample from groups alike: classes, or clusters of embeddings.

Legend: H events held, n sampled, G groups.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from replay.embedding_index.embedding_tracker import UNKNOWN, EmbeddingTracker
from replay.reservoir.event_table import EventTable
from replay.sampling.base import MOST_STALE, PLACED, Choice, Slots, UniformSampler, stale_share
from replay.sampling.group_lists import GroupLists


class BalancedSampler(UniformSampler):
    """Every group comes as often as any other, and within a group every event; what a small one lacks, others give."""

    divisible = False

    def __init__(self, event_table: EventTable, group_of: Callable[[Slots], NDArray[np.int64]]) -> None:
        super().__init__(event_table)
        self._group_of = group_of
        self._groups = GroupLists()

    def sample(self, n: int, generator: np.random.Generator) -> Choice:
        """Deal n among the groups as evenly as their sizes allow, and choose within each."""
        slots = self._groups.sample(min(n, len(self._event_table)), generator)
        return Choice(generator.permutation(slots))

    def add(self, slots: Slots) -> None:
        """Put events into their groups."""
        self._groups.add(self._group_of(slots), slots)

    def remove(self, slots: Slots) -> None:
        """Take events out of their groups."""
        self._groups.discard(slots)


class ClusterSampler(BalancedSampler):
    """Every cluster of the model's embeddings comes as often as any other.

    Events whose cluster is not known, as after a restart, have the share of a sample that they are of the store. When
    the index process has found other clusters, all events are grouped anew. Within a cluster, those whose embeddings
    are of a model long gone come sooner: being sampled renews them.
    """

    def __init__(self, event_table: EventTable, tracker: EmbeddingTracker) -> None:
        super().__init__(event_table, lambda slots: tracker.clusters(slots).astype(np.int64))
        self._tracker = tracker
        self._grouped = tracker.training
        self._stale = np.empty(0, np.int32)

    def sample(self, n: int, generator: np.random.Generator) -> Choice:
        """Group anew if need be, and choose; one in eight makes way for an event of its cluster that is stale."""
        if self._grouped != self._tracker.training:
            self._grouped, self._groups = self._tracker.training, GroupLists()
            self.add(self._event_table.slots)
        any_ = UniformSampler.sample(self, n, generator).slots
        slots = any_[self._tracker.clusters(any_) == UNKNOWN]
        slots = np.concatenate([slots, self._groups.sample(len(any_) - len(slots), generator)])
        # Where the clusters have less than that, all of them are in.
        slots = np.concatenate([slots, any_[~np.isin(any_, slots)]])[: len(any_)]
        return Choice(generator.permutation(self._with_stale(slots, stale_share(n, generator))))

    def add(self, slots: Slots) -> None:
        """Put events into their groups, those that have one."""
        super().add(slots[self._tracker.clusters(slots) != UNKNOWN])

    def remove(self, slots: Slots) -> None:
        """Take events out of their groups."""
        super().remove(slots)
        self._stale = self._stale[~np.isin(self._stale, slots)]

    def _with_stale(self, slots: Slots, n: int) -> Slots:
        """Put at most n stale events in the places of others of their clusters; those without a place wait."""
        stale = self._stale
        if len(stale) < MOST_STALE:
            stale = np.concatenate([stale, self._tracker.stale(n)])
        clusters = self._tracker.clusters(slots).copy()
        clusters[np.isin(slots, stale)] = PLACED
        stale = stale[~np.isin(stale, slots)]
        waits = np.ones(len(stale), np.bool_)
        for at, cluster in enumerate(self._tracker.clusters(stale).tolist()):
            places = np.flatnonzero(clusters == cluster)[: n - int((~waits).sum())]
            if len(places):
                slots[places[0]], clusters[places[0]], waits[at] = stale[at], PLACED, False
        self._stale = stale[waits]
        return slots
