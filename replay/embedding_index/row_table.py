"""The events of the index: their ids by row number, and the ages of their embeddings.

Legend: n events of a call.
"""

import numpy as np
from numpy.typing import NDArray

from replay.embedding_index.faiss_lists import IdTable
from replay.embedding_index.protocol import NO_ID, Ids

_FIRST_ROOM = 4096
NO_CLUSTER = -1
"""The cluster of a row that is in none yet."""
_NEVER = np.iinfo(np.int64).max
_NONE: Ids = np.empty(0, np.int64)


class RowTable:
    """Numbered rows. A dropped row becomes a tombstone, and is reused only after `reclaim`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._top = 0
        self._free = _NONE
        self._ids = np.full(_FIRST_ROOM, NO_ID, np.int64)
        self._step = np.zeros(_FIRST_ROOM, np.int64)
        self._due = np.full(_FIRST_ROOM, _NEVER, np.int64)
        self._live = np.zeros(_FIRST_ROOM, np.bool_)
        self._cluster = np.full(_FIRST_ROOM, NO_CLUSTER, np.int16)
        self._table = IdTable()
        self.count = 0
        """Rows that have an event."""
        self.frozen = False
        """While set, no row is reused."""

    @property
    def top(self) -> int:
        """One more than the highest row number so far."""
        return self._top

    @property
    def tombstones(self) -> int:
        """Rows that were dropped and not reclaimed."""
        return self._top - self.count - len(self._free)

    @property
    def live(self) -> NDArray[np.bool_]:
        """Which rows have an event."""
        return self._live[: self._top]

    @property
    def bytes(self) -> int:
        """Bytes of the table."""
        return self._table.bytes + len(self._ids) * 27 + self._free.nbytes

    def put(self, ids: Ids, step: int, due: int) -> Ids:
        """Assign rows to events that have none, as far as there is room, and return the rows of those."""
        reused = _NONE if self.frozen else self._free[max(0, len(self._free) - len(ids)) :]
        if len(reused):
            self._free = self._free[: len(self._free) - len(reused)]
        fresh = min(len(ids) - len(reused), self._limit - self._top)
        rows = np.concatenate([reused, np.arange(self._top, self._top + fresh)])
        self._top += fresh
        self._make_room()
        ids = ids[: len(rows)]
        self._ids[rows], self._step[rows], self._due[rows], self._live[rows] = ids, step, due, True
        self.count += len(rows)
        self._record(ids, rows)
        return rows

    def drop(self, ids: Ids) -> None:
        """Drop events; unknown ids are ignored, and each id may occur only once."""
        rows = self._table.find(ids)
        rows = rows[rows >= 0]
        if len(rows):
            gone = self._ids[rows]
            self._live[rows] = False
            self._due[rows] = _NEVER
            self.count -= len(rows)
            self._record(gone, np.full(len(gone), -1, np.int64))

    def reclaim(self) -> None:
        """Allow reuse of the dropped rows, to which nothing refers any more."""
        self._free = np.flatnonzero(~self.live)

    def assign(self, rows: Ids, clusters: NDArray[np.int16]) -> None:
        """Set the clusters of rows."""
        self._cluster[rows] = clusters

    def assigned(self, begin: int, n: int) -> tuple[Ids, Ids]:
        """Return the ids and clusters of the events in up to n rows from `begin` on, without those in no cluster."""
        rows = np.arange(begin, min(begin + n, self._top))
        rows = rows[self._live[rows] & (self._cluster[rows] != NO_CLUSTER)]
        return self._ids[rows], self._cluster[rows].astype(np.int64)

    def ids(self, rows: Ids) -> Ids:
        """Return the ids of the events in rows of any shape, NO_ID for a row of -1."""
        return np.where(rows >= 0, self._ids[rows], NO_ID)

    def stale(self, n: int, newest: int, again: int) -> Ids:
        """Return the ids of the n oldest embeddings that are due, oldest first, and make them due again at `again`."""
        due = np.flatnonzero(self._due[: self._top] <= newest)
        if len(due) > n:
            due = due[np.argpartition(self._step[due], n)[:n]]
        due = due[np.argsort(self._step[due], kind="stable")]
        self._due[due] = again
        return self._ids[due]

    def ages(self, newest: int, bound: int) -> tuple[float, float, float]:
        """Return the mean and the maximum age in steps, and how many embeddings are older than `bound`."""
        if not self.count:
            return 0.0, 0.0, 0.0
        ages = newest - self._step[: self._top][self.live]
        return float(ages.mean()), float(ages.max()), float((ages > bound).sum())

    def _make_room(self) -> None:
        room = len(self._ids)
        while room < self._top:
            room *= 2
        if room > len(self._ids):
            more = room - len(self._ids)
            self._ids = np.concatenate([self._ids, np.full(more, NO_ID, np.int64)])
            self._step = np.concatenate([self._step, np.zeros(more, np.int64)])
            self._due = np.concatenate([self._due, np.full(more, _NEVER, np.int64)])
            self._live = np.concatenate([self._live, np.zeros(more, np.bool_)])
            self._cluster = np.concatenate([self._cluster, np.full(more, NO_CLUSTER, np.int16)])

    def _record(self, ids: Ids, rows: Ids) -> None:
        """Record the rows of ids; a table that is full of removed ids is replaced by a new one."""
        room = 2 * (self.count + len(ids))
        while not self._table.put(ids, rows):
            self._table = IdTable(room)
            live = np.flatnonzero(self.live)
            if self._table.put(self._ids[live], live):
                return
            room *= 2
