"""Tracks the embeddings of held events: sends them to the index process, and uses the clusters and answers it returns.

No method waits for that process. An event whose cluster is not known yet is in cluster 0, which is a group as well. The
samplers `similar` and `diverse` choose by these embeddings and clusters.

Legend: H events held, n events of a call or sampled, D numbers of an embedding, C clusters, Q queries.
"""

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.replay.embedding_index.client import NeighbourClient
from anabranch.replay.embedding_index.protocol import NO_ID
from anabranch.replay.reservoir.embeddings import EventEmbeddings
from anabranch.replay.reservoir.event_table import EventTable
from anabranch.replay.sampling.balanced import BalancedSampler, GroupLists
from anabranch.replay.sampling.base import Choice, Sampler, Slots

CLUSTERS = 65
"""The most groups of events by their embedding, including the one for events without a known cluster."""
_NEAREST = 10
"""Neighbours that are searched for each query."""
_MAX_QUERIES = 256
LAG = 12
"""A sample is near the new events of LAG steps earlier. The steps in between are for the query, its answer, and the
rows of the sample, which is chosen some steps ahead."""
UNKNOWN = np.int16(0)
"""The cluster of events whose cluster is not known."""


class EmbeddingTracker(EventEmbeddings):
    """The embeddings of the events in S slots. Used by the thread that has the store."""

    in_index = True

    def __init__(self, event_table: EventTable, slots: int, neighbours: NeighbourClient) -> None:
        self._event_table = event_table
        self.neighbours = neighbours
        """The client of the index process."""
        self._ids = np.full(slots, NO_ID, np.int64)
        self._cluster = np.zeros(slots, np.int16)
        self._centroids_CD: NDArray[np.float32] | None = None
        self._answers: dict[int, NDArray[np.int64]] = {}
        """By the step of the query."""
        self._nearest = np.empty(0, np.int64)
        self._step = 0
        self.indexed = np.zeros(slots, np.bool_)
        """The slots whose events were sent to the index."""
        self._generation = neighbours.generation
        self.training = 0
        """Grows each time that the events are assigned to new clusters."""

    @property
    @override
    def problem(self) -> str | None:  # type: ignore[override]
        return self.neighbours.problem

    @override
    def poll(self) -> int:
        if self._generation != self.neighbours.generation:
            self._generation = self.neighbours.generation
            self.indexed[:] = False
        for answer in self.neighbours.answers():
            # The nearest of every query come before the second of any.
            self._answers[answer.step] = answer.ids.T.reshape(-1)
        if (clusters := self.neighbours.clusters()) is not None:
            slots = self._slots_of(clusters.ids)
            held = slots >= 0
            self._cluster[:] = UNKNOWN
            self._cluster[slots[held]] = clusters.assigned[held] + 1
            self._centroids_CD, self.training = clusters.centroids, clusters.number
        return self.training

    @override
    def clusters(self, slots: NDArray[np.int32]) -> NDArray[np.int16]:
        clusters: NDArray[np.int16] = self._cluster[slots]
        return clusters

    @override
    def clusters_of(self, embedding_nD: NDArray[np.float32] | None, n: int) -> NDArray[np.int16]:
        if self._centroids_CD is None or embedding_nD is None:
            return np.zeros(n, np.int16)
        centroids_CD = self._centroids_CD
        distance_nC = np.square(centroids_CD).sum(axis=1) - 2 * embedding_nD @ centroids_CD.T
        nearest = distance_nC.argmin(axis=1).astype(np.int16) + np.int16(1)
        return np.where(np.isfinite(embedding_nD).all(axis=1), nearest, UNKNOWN)

    @override
    def query(self, step: int, embedding_QD: NDArray[np.float32]) -> None:
        self._step = step
        self.neighbours.query(step, embedding_QD[:_MAX_QUERIES], _NEAREST)

    @override
    def select_answer(self, step: int) -> None:
        # That of LAG steps earlier, or none if it has not arrived. Each answer is used for one sample. If the newest
        # was used again until another arrives, a slow index would replay the same few events repeatedly.
        self.poll()
        self._nearest = self._answers.pop(step - LAG, np.empty(0, np.int64))
        self._answers = {queried: ids for queried, ids in self._answers.items() if queried > step - LAG}

    def nearest(self) -> NDArray[np.int32]:
        """Return the slots of the events in the selected answer, nearest first, each once."""
        slots = self._slots_of(self._nearest)
        slots = slots[slots >= 0]
        return slots[np.sort(np.unique(slots, return_index=True)[1])].astype(np.int32)

    def stale(self, n: int) -> NDArray[np.int32]:
        """Return the slots of up to n events whose embeddings are of an old model; each is returned once."""
        ids = self.neighbours.stale(n)
        slots = self._slots_of(ids)
        self.neighbours.remove(ids[slots < 0])
        return slots[slots >= 0].astype(np.int32)

    @override
    def add(self, slots: NDArray[np.int32], embedding_nD: NDArray[np.float32] | None) -> None:
        # The id of an event is its slot, and half of its identity, which distinguishes it from earlier events.
        half = (self._event_table.identity(slots) >> np.uint64(32)).astype(np.int64)
        self._ids[slots] = (slots.astype(np.int64) << 32) | half
        if embedding_nD is not None:
            self._cluster[slots] = self.clusters_of(embedding_nD, len(slots))
            self.update(slots, embedding_nD)

    @override
    def update(self, slots: NDArray[np.int32], embedding_nD: NDArray[np.float32]) -> None:
        known = np.isfinite(embedding_nD).all(axis=1) & (self._ids[slots] != NO_ID)
        slots = slots[known]
        taken = self.neighbours.add(self._ids[slots], embedding_nD[known], self._step)
        self.indexed[slots[:taken]] = True

    @override
    def remove(self, slots: NDArray[np.int32]) -> None:
        ids = self._ids[slots]
        self.neighbours.remove(ids[ids != NO_ID])
        self._ids[slots], self._cluster[slots] = NO_ID, UNKNOWN
        self.indexed[slots] = False

    @override
    def close(self) -> None:
        self.neighbours.close()

    def _slots_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of events, -1 for events that are not held any more."""
        slots = ids >> 32
        return np.where((ids != NO_ID) & (self._ids[slots] == ids), slots, -1)


_STALE_SHARE = 8
_MAX_STALE = 64
"""The most stale events that wait for a sample of their cluster."""
_TAKEN = -1
"""Marks an event of a sample that must not be replaced."""


class NeighbourSampler(Sampler):
    """Samples the nearest old events, by the model's embedding, to the new events of LAG steps earlier.

    Training on the new events disturbs these most. Without an answer of the index process in time a sample is uniform.
    Events that are not in the index, as after a restart, are sampled in proportion to their number, which adds them to
    it. One event in eight is stale, with an embedding of an old model: sampling it updates the embedding.
    """

    def __init__(self, event_table: EventTable, tracker: EmbeddingTracker) -> None:
        super().__init__(event_table)
        self._tracker = tracker

    @override
    def sample(self, n: int, generator: np.random.Generator) -> Choice:
        any_ = self._uniform(n, generator)
        unindexed = any_[~self._tracker.indexed[any_]]
        stale = self._tracker.stale(min(_stale_share(n, generator), len(any_) - len(unindexed)))
        slots = np.concatenate([unindexed, stale, self._tracker.nearest(), any_])
        slots = slots[np.sort(np.unique(slots, return_index=True)[1])]
        return Choice(generator.permutation(slots[: len(any_)]))


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
        any_ = self._uniform(n, generator)
        slots = any_[self._tracker.clusters(any_) == UNKNOWN]
        slots = np.concatenate([slots, self._groups.sample(len(any_) - len(slots), generator)])
        # If the clusters have fewer events, the sample has all of them; the rest is uniform.
        slots = np.concatenate([slots, any_[~np.isin(any_, slots)]])[: len(any_)]
        return Choice(generator.permutation(self._with_stale(slots, _stale_share(n, generator))))

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
        if len(stale) < _MAX_STALE:
            stale = np.concatenate([stale, self._tracker.stale(n)])
        clusters = self._tracker.clusters(slots).copy()
        clusters[np.isin(slots, stale)] = _TAKEN
        stale = stale[~np.isin(stale, slots)]
        waits = np.ones(len(stale), np.bool_)
        for at, cluster in enumerate(self._tracker.clusters(stale).tolist()):
            matches = np.flatnonzero(clusters == cluster)[: n - int((~waits).sum())]
            if len(matches):
                slots[matches[0]], clusters[matches[0]], waits[at] = stale[at], _TAKEN, False
        self._stale = stale[waits]
        return slots


def _stale_share(n: int, generator: np.random.Generator) -> int:
    """Return how many of n events may be sampled because they are stale: an eighth, rounded randomly."""
    return (n + int(generator.integers(_STALE_SHARE))) // _STALE_SHARE
