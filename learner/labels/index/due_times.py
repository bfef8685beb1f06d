"""Entries in the order of their times, for those that are due.

Entries are added in groups, which are in a heap by their earliest time. Where events come nearly in the order of time,
few groups have entries that are due and others; such a group is split by time, so that each entry is read a few times.

Legend: n entries of a call.
"""

import heapq
import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from learner.labels.index.numbers import Ids

_GROUP = 4096
"""Entries of a group at most."""
_OVERHEAD = 256
"""Bytes of the Python objects of a group."""
_NEVER = 2**63 - 1
_MOST_UNUSED = 1 / 8
"""The part of all entries that may have left otherwise."""
_SLACK = 4096
_MIXED = 3 / 4
"""A group of which more than this part is not due is split."""
_AT_ONCE = 16
"""Groups that `shrink` reads."""


class DueTimes:
    """Entries by time, where each takes 4 bytes.

    Args:
        times: the time of each entry in ms, int64; its owner sets it before `add`.
        waits: returns which of n entries still wait for their time, bool `[n]`.
    """

    def __init__(self, times: NDArray[np.int64], waits: Callable[[Ids], NDArray[np.bool_]]) -> None:
        self._times = times
        self._waits = waits
        self._groups: list[tuple[int, int, Ids]] = []
        """A heap by a lower bound of the times, then by number."""
        self._numbers = itertools.count()
        self._entries = 0
        """In the heap."""
        self._new = np.empty(_GROUP, np.int32)
        """The entries that are not in the heap yet."""
        self._new_count, self._new_first = 0, _NEVER
        self._next = 0
        """The group that `shrink` reads next."""

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        return self._new.nbytes + sum(ids.nbytes + _OVERHEAD for _, _, ids in self._groups)

    def add(self, ids: Ids) -> None:
        """Add n entries."""
        while len(ids):
            taken = ids[: _GROUP - self._new_count]
            self._new[self._new_count : self._new_count + len(taken)] = taken
            self._new_count += len(taken)
            self._new_first = min(self._new_first, int(self._times[taken].min()))
            if self._new_count == _GROUP:
                self._push_new()
            ids = ids[len(taken) :]

    def pop_before(self, time_ms: int) -> Ids:
        """Remove and return the entries with a time below `time_ms`, in the order of their numbers."""
        if self._new_first < time_ms:
            self._push_new()
        due = [np.empty(0, np.int32)]
        groups = []
        while self._groups and self._groups[0][0] < time_ms:
            groups.append(self._pop())
        for ids in groups:
            early = self._times[ids] < time_ms
            due.append(ids[early])
            rest = ids[~early]
            if len(rest) > _MIXED * len(ids):
                self._push_halves(rest)
            else:
                self._push(rest)
        return np.unique(np.concatenate(due))

    def pop_oldest(self, n: int) -> Ids:
        """Remove and return the n entries with the lowest times, in their order; fewer if there are no more."""
        self._push_new()
        ids = np.empty(0, np.int32)
        while self._groups and (len(ids) < n or self._groups[0][0] < self._times[ids[n - 1]]):
            ids = np.unique(np.concatenate([ids, self._pop()]))
            ids = ids[np.argsort(self._times[ids], kind="stable")]
        self._push_halves(ids[n:])
        return ids[:n]

    def shrink(self, waiting: int) -> None:
        """Leave out entries that left otherwise, of some groups, where they are too many; `waiting`: how many wait."""
        if self._entries - waiting <= self._entries * _MOST_UNUSED + _SLACK:
            return
        for _ in range(min(_AT_ONCE, len(self._groups))):
            self._next = (self._next + 1) % len(self._groups)
            first, number, ids = self._groups[self._next]
            stays = ids[self._waits(ids)]
            self._groups[self._next] = first, number, stays  # the bound still holds, and so does the heap's order
            self._entries += len(stays) - len(ids)

    def _pop(self) -> Ids:
        _, _, ids = heapq.heappop(self._groups)
        self._entries -= len(ids)
        return ids[self._waits(ids)]

    def _push_new(self) -> None:
        ids, self._new_count, self._new_first = self._new[: self._new_count].copy(), 0, _NEVER
        self._push(ids)

    def _push_halves(self, ids: Ids) -> None:
        """Add entries again, the half with the lower times apart from the others."""
        ids = ids[np.argsort(self._times[ids], kind="stable")]
        half = min(_GROUP, (len(ids) + 1) // 2)
        for begin in range(0, len(ids), max(1, half)):
            self._push(ids[begin : begin + half].copy())

    def _push(self, ids: Ids) -> None:
        if len(ids):
            heapq.heappush(self._groups, (int(self._times[ids].min()), next(self._numbers), ids))
            self._entries += len(ids)
