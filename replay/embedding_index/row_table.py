"""Which events the index has: their ids by row number, and how old their embeddings are.

Legend: n events of a call.
"""

import numpy as np
from numpy.typing import NDArray

from replay.embedding_index.faiss_lists import IdTable
from replay.embedding_index.protocol import NO_ID, Ids

_FIRST_ROOM = 4096
NO_CLUSTER = -1
"""In no cluster yet."""
_NEVER = np.iinfo(np.int64).max
_NONE: Ids = np.empty(0, np.int64)


class RowTable:
    """Numbered rows. One that is let go becomes a tombstone, and is given out again only after `reclaim`."""

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
        """While set, no row is given out a second time."""

    @property
    def top(self) -> int:
        """All rows so far are below."""
        return self._top

    @property
    def tombstones(self) -> int:
        """Rows that were let go and not reclaimed."""
        return self._top - self.count - len(self._free)

    @property
    def live(self) -> NDArray[np.bool_]:
        """Which rows have an event."""
        return self._live[: self._top]

    @property
    def bytes(self) -> int:
        """Bytes of all that is noted."""
        return self._table.bytes + len(self._ids) * 27 + self._free.nbytes

    def put(self, ids: Ids, step: int, due: int) -> Ids:
        """Give rows to events, of which none has one, and return those of as many as there is room for."""
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
        self._note(ids, rows)
        return rows

    def drop(self, ids: Ids) -> None:
        """Let events go, those of them that are there; each is named once."""
        rows = self._table.find(ids)
        rows = rows[rows >= 0]
        if len(rows):
            gone = self._ids[rows]
            self._live[rows] = False
            self._due[rows] = _NEVER
            self.count -= len(rows)
            self._note(gone, np.full(len(gone), -1, np.int64))

    def reclaim(self) -> None:
        """Give out again what was let go, once nothing refers to it."""
        self._free = np.flatnonzero(~self.live)

    def assign(self, rows: Ids, clusters: NDArray[np.int16]) -> None:
        """Note which clusters rows are in."""
        self._cluster[rows] = clusters

    def assigned(self, begin: int, n: int) -> tuple[Ids, Ids]:
        """Return the events of the rows from `begin` on, n at most, that are in clusters, and which these are."""
        rows = np.arange(begin, min(begin + n, self._top))
        rows = rows[self._live[rows] & (self._cluster[rows] != NO_CLUSTER)]
        return self._ids[rows], self._cluster[rows].astype(np.int64)

    def ids(self, rows: Ids) -> Ids:
        """Return the events of rows, NO_ID where a row is -1; any shape."""
        return np.where(rows >= 0, self._ids[rows], NO_ID)

    def stale(self, n: int, newest: int, again: int) -> Ids:
        """Return the n events whose embeddings are oldest, of those that are due, and make them due at `again`."""
        due = np.flatnonzero(self._due[: self._top] <= newest)
        if len(due) > n:
            due = due[np.argpartition(self._step[due], n)[:n]]
        due = due[np.argsort(self._step[due], kind="stable")]
        self._due[due] = again
        return self._ids[due]

    def ages(self, newest: int, bound: int) -> tuple[float, float, float]:
        """Return the mean and the greatest age in steps, and how many are older than `bound`."""
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

    def _note(self, ids: Ids, rows: Ids) -> None:
        """Note ids in the table; one that is full of what has gone is made anew."""
        room = 2 * (self.count + len(ids))
        while not self._table.put(ids, rows):
            self._table = IdTable(room)
            here = np.flatnonzero(self.live)
            if self._table.put(self._ids[here], here):
                return
            room *= 2
