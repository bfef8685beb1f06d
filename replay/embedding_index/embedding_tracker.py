"""Tracks the embeddings of held events: sends them to the index process, and uses the clusters and answers it returns.

No method waits for that process. An event whose cluster is not known yet is in cluster 0, which is a group as well.

Legend: n events of a call, D numbers of an embedding, C clusters, Q queries.
"""

import numpy as np
from numpy.typing import NDArray

from replay.embedding_index.client import NeighbourClient
from replay.reservoir.event_table import EventTable

CLUSTERS = 65
"""The most groups of events by their embedding, including the one for events without a known cluster."""
_NEAREST = 10
"""Neighbours that are searched for each query."""
_MAX_QUERIES = 256
_NO_ID = -1
LAG = 12
"""A sample is near the new events of LAG steps earlier. The steps in between are for the query, its answer, and the
rows of the sample, which is chosen some steps ahead."""
UNKNOWN = np.int16(0)
"""The cluster of events whose cluster is not known."""


class EmbeddingTracker:
    """The embeddings of the events in S slots. Used by the thread that has the store."""

    def __init__(self, event_table: EventTable, slots: int, neighbours: NeighbourClient) -> None:
        self._event_table = event_table
        self._neighbours = neighbours
        self._ids = np.full(slots, _NO_ID, np.int64)
        self._cluster = np.zeros(slots, np.int16)
        self._next = np.zeros(slots, np.int16)
        self._centroids_CD: NDArray[np.float32] | None = None
        self._answers: dict[int, NDArray[np.int64]] = {}
        """By the step of the query."""
        self._nearest = np.empty(0, np.int64)
        self._step = 0
        self._indexed = np.zeros(slots, np.bool_)
        """The slots whose events were sent to the index."""
        self._generation = neighbours.generation
        self.training = 0
        """Grows each time that the events are assigned to new clusters."""

    @property
    def neighbours(self) -> NeighbourClient:
        """The client of the index process."""
        return self._neighbours

    def poll(self) -> int:
        """Receive the results of the index process, and return `training`."""
        if self._generation != self._neighbours.generation:
            self._generation = self._neighbours.generation
            self._indexed[:] = False
        for answer in self._neighbours.answers():
            # The nearest of every query come before the second of any.
            self._answers[answer.step] = answer.ids.T.reshape(-1)
        for ids, clusters in self._neighbours.assigned():
            slots = self._slots_of(ids)
            here = slots >= 0
            self._next[slots[here]] = clusters[here] + 1
        clusters_now = self._neighbours.clusters()
        if clusters_now is not None and clusters_now.number != self.training:
            self._cluster, self._next = self._next, np.zeros_like(self._next)
            self._centroids_CD, self.training = clusters_now.centroids, clusters_now.number
        return self.training

    def indexed(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which of n slots' events are in the index, bool `[n]`."""
        indexed: NDArray[np.bool_] = self._indexed[slots]
        return indexed

    def clusters(self, slots: NDArray[np.int32]) -> NDArray[np.int16]:
        """Return the clusters of the events in n slots; they change only when `training` grows."""
        clusters: NDArray[np.int16] = self._cluster[slots]
        return clusters

    def cluster_of(self, embedding_nD: NDArray[np.float32]) -> NDArray[np.int16]:
        """Return the nearest cluster of n embeddings; 0 while clusters are unknown, and if not finite."""
        if self._centroids_CD is None:
            return np.zeros(len(embedding_nD), np.int16)
        centroids_CD = self._centroids_CD
        distance_nC = np.square(centroids_CD).sum(axis=1) - 2 * embedding_nD @ centroids_CD.T
        nearest = distance_nC.argmin(axis=1).astype(np.int16) + np.int16(1)
        return np.where(np.isfinite(embedding_nD).all(axis=1), nearest, UNKNOWN)

    def query(self, step: int, embedding_QD: NDArray[np.float32]) -> None:
        """Search events near Q new ones of this step; the answer arrives some steps later."""
        self._step = step
        self._neighbours.query(step, embedding_QD[:_MAX_QUERIES], _NEAREST)

    def select_answer(self, step: int) -> None:
        """Select the answer for the sample of a step: that of LAG steps earlier, or none if it has not arrived.

        Each answer is used for one sample. If the newest was used again until another arrives, a slow index would
        replay the same few events repeatedly.
        """
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
        ids = self._neighbours.stale(n)
        slots = self._slots_of(ids)
        self._neighbours.remove(ids[slots < 0])
        return slots[slots >= 0].astype(np.int32)

    def add(self, slots: NDArray[np.int32], embedding_nD: NDArray[np.float32] | None) -> None:
        """Add n events with their embeddings; None, and those that are not finite, count as unknown."""
        self._assign_ids(slots)
        if embedding_nD is not None:
            self._cluster[slots] = self.cluster_of(embedding_nD)
            self.update(slots, embedding_nD)

    def update(self, slots: NDArray[np.int32], embedding_nD: NDArray[np.float32]) -> None:
        """Update the embeddings of n events, which a newer model has computed."""
        known = np.isfinite(embedding_nD).all(axis=1) & (self._ids[slots] != _NO_ID)
        slots = slots[known]
        taken = self._neighbours.add(self._ids[slots], embedding_nD[known], self._step)
        self._indexed[slots[:taken]] = True

    def remove(self, slots: NDArray[np.int32]) -> None:
        """Remove n events."""
        ids = self._ids[slots]
        self._neighbours.remove(ids[ids != _NO_ID])
        self._ids[slots], self._cluster[slots], self._next[slots] = _NO_ID, UNKNOWN, UNKNOWN
        self._indexed[slots] = False

    def restore(self, slots: NDArray[np.int32]) -> None:
        """Add the events of a checkpoint; their embeddings are computed when they are sampled."""
        self._assign_ids(slots)

    def close(self) -> None:
        """End the index process."""
        self._neighbours.close()

    def _assign_ids(self, slots: NDArray[np.int32]) -> None:
        """Assign ids to events: the slot, and half of the identity, which distinguishes it from earlier events."""
        half = (self._event_table.identity(slots) >> np.uint64(32)).astype(np.int64)
        self._ids[slots] = (slots.astype(np.int64) << 32) | half

    def _slots_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of events, -1 for events that are not held any more."""
        slots = ids >> 32
        return np.where((ids != _NO_ID) & (self._ids[slots] == ids), slots, -1)
