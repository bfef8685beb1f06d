"""The embeddings of held events, as a store uses them, and those of recent events.

Legend: N events of a call, D numbers of an embedding, R recent events, M events that each of N is compared
with.
"""

import numpy as np
from numpy.typing import NDArray

_NEAR = 0.05
"""Two events are near-duplicates below this fraction of the median squared distance of recent events of one label."""
_GROWTH = 3
"""So many times as many events of the label may be within twice that squared distance: a repetition is close to what it
repeats, and to nothing else. Where more are, events are dense in few dimensions, and are different for all that."""
_DECAY = 0.98
"""Of the running mean of that median."""
_LEAST = 50
"""So many recent events are needed before any event counts as a near-duplicate."""


class EventEmbeddings:
    """The embeddings of held events and their clusters: here those of a store whose policies need none.

    `replay.embedding_index` has the one that stores them. An event whose cluster is not known is in cluster 0, which is
    a group as well.
    """

    in_index = False
    """Whether embeddings are stored at all."""
    problem: str | None = None
    """One sentence on what does not work; any thread may ask."""

    def poll(self) -> int:
        """Receive new clusters, and return a number that grows each time that the events are in other clusters."""
        return 0

    def clusters(self, slots: NDArray[np.int32]) -> NDArray[np.int16]:
        """Return the clusters of the events in N slots; they change only with the number that `poll` returns."""
        return np.zeros(len(slots), np.int16)

    def clusters_of(self, _embedding_ND: NDArray[np.float32] | None, n: int) -> NDArray[np.int16]:
        """Return the nearest clusters of n embeddings; 0 where one is not finite, and for all if these are None."""
        return np.zeros(n, np.int16)

    def add(self, slots: NDArray[np.int32], embedding_ND: NDArray[np.float32] | None) -> None:
        """Add N events with their embeddings; None, and those that are not finite, count as unknown."""

    def update(self, slots: NDArray[np.int32], embedding_ND: NDArray[np.float32]) -> None:
        """Update the embeddings of N events, which a newer model has computed."""

    def remove(self, slots: NDArray[np.int32]) -> None:
        """Remove N events."""

    def query(self, step: int, embedding_ND: NDArray[np.float32]) -> None:
        """Search held events near new ones of this step, for later samples; does not wait for the answer."""

    def select_answer(self, step: int) -> None:
        """Select the answer for the sample of a step."""

    def close(self) -> None:
        """End what computes the answers."""


class RecentEmbeddings:
    """The last R events: embedding, scaled to length 1, label and slot. Used by one thread.

    An exact search of a few hundred recent events takes a fraction of a millisecond, and never misses one: for a
    comparison with what a stream brings now no index is needed.
    """

    def __init__(self, dim: int, room: int) -> None:
        self._embedding_RD = np.zeros((room, dim), np.float32)
        self._label = np.zeros(room, np.int64)
        self._slot = np.zeros(room, np.int64)
        self._count = 0
        self._median = 0.0
        """Squared distance; 0 while it is unknown."""

    def __len__(self) -> int:
        return min(self._count, len(self._label))

    @property
    def labels(self) -> NDArray[np.int64]:
        """Of each recent event, `[R]`."""
        return self._label[: len(self)]

    @property
    def slots(self) -> NDArray[np.int64]:
        """Of each recent event, `[R]`; -1 for one that was removed, or has none."""
        return self._slot[: len(self)]

    def add(self, embedding_ND: NDArray[np.float32], label: NDArray[np.int64], slots: NDArray[np.int32] | None) -> None:
        """Add N events, of which the oldest are replaced; their embeddings have length 1."""
        room = len(self._label)
        at = np.arange(self._count, self._count + len(label))[-room:] % room
        self._embedding_RD[at], self._label[at] = embedding_ND[-room:], label[-room:]
        self._slot[at] = -1 if slots is None else slots[-room:]
        self._count += len(label)

    def remove(self, slots: NDArray[np.int32]) -> None:
        """Clear the embeddings of the events in n slots."""
        at = np.flatnonzero(np.isin(self._slot, slots))
        self._embedding_RD[at], self._slot[at] = 0.0, -1

    def clear(self) -> None:
        """Remove all events."""
        self._embedding_RD[:], self._count = 0.0, 0

    def distances(self, embedding_ND: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the squared distance of each of N embeddings of length 1 to each recent one, `[N, R]`."""
        distance_NR: NDArray[np.float32] = 2.0 - 2.0 * (embedding_ND @ self._embedding_RD[: len(self)].T)
        return distance_NR

    def near_duplicates(self, embedding_ND: NDArray[np.float32], label: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of N events nearly repeat a recent one, or one before them, of the same label; add the others.

        Args:
            embedding_ND: of new events, finite numbers.
            label: of each event, -1 for none.
        """
        unit_ND, known = unit(embedding_ND), len(self)
        distance_NM = np.concatenate([self.distances(unit_ND), 2.0 - 2.0 * (unit_ND @ unit_ND.T)], axis=1)
        alike_NM = np.concatenate([self.labels, label])[None, :] == label[:, None]
        if known >= _LEAST and alike_NM[:, :known].any():
            median = float(np.median(distance_NM[:, :known][alike_NM[:, :known]]))
            self._median = _DECAY * self._median + (1 - _DECAY) * median if self._median else median
        alike_NM[:, known:] &= np.tri(len(label), k=-1, dtype=np.bool_)
        near, around = ((alike_NM & (distance_NM < limit * self._median)).sum(axis=1) for limit in (_NEAR, 2 * _NEAR))
        repeats: NDArray[np.bool_] = (near > 0) & (around <= _GROWTH * near)
        self.add(unit_ND[~repeats], label[~repeats], None)
        return repeats


def unit(embedding_ND: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return embeddings scaled to length 1, float32 `[N, D]`; those of length 0 stay."""
    length = np.linalg.norm(embedding_ND, axis=1, keepdims=True)
    unit_ND: NDArray[np.float32] = embedding_ND / np.maximum(length, np.finfo(np.float32).tiny)
    return unit_ND
