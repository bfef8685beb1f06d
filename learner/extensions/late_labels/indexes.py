"""Indexes of entries that are rows of arrays: by the hash of a key, by time, and which numbers are free.

Legend: n keys or entries of a call, m matches, R entries of a run.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_GROWTH = 4
_LONGEST = 2**22
"""Longer runs are not merged: a merge of so many takes less than a second."""
_MOST_UNUSED_KEYS = 1 / 16
"""The part of all entries of a key index that may be out of use."""
_GROUP = 4096
"""Entries of a group at most."""
_OVERHEAD = 256
"""Bytes of the Python objects of a group."""
_NEVER = 2**63 - 1
_MOST_UNUSED_TIMES = 1 / 8
"""The part of all entries by time that may have left otherwise."""
_SLACK = 4096
_MIXED = 3 / 4
"""A group of which more than this part is not due is split."""
_AT_ONCE = 16
"""Groups that `shrink` reads."""

Ids = NDArray[np.int32]
"""Numbers, int32 `[n]`."""


class Numbers:
    """Numbers below `limit`: those that were released are taken again before higher ones.

    `used` is above the highest that was ever taken.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._free: list[Ids] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers that may be taken again."""
        return sum(ids.nbytes for ids in self._free)

    @property
    def free(self) -> int:
        """How many may be taken."""
        return self.limit - self.used + sum(map(len, self._free))

    def take(self, count: int) -> Ids:
        """Return `count` numbers, which must be free."""
        parts, missing = list[Ids](), count
        while missing and self._free:
            last = self._free.pop()
            parts.append(last[:missing])
            if missing < len(last):
                self._free.append(last[missing:])
            missing -= len(parts[-1])
        assert self.used + missing <= self.limit
        parts.append(np.arange(self.used, self.used + missing, dtype=np.int32))
        self.used += missing
        return joined_ids(parts)

    def release(self, ids: Ids) -> None:
        """Release numbers."""
        if len(ids):
            self._free.append(ids)


def joined_ids(parts: Sequence[Ids]) -> Ids:
    """Return the numbers of several parts."""
    return np.concatenate([np.empty(0, np.int32), *parts])


@dataclass(frozen=True)
class _KeyRun:
    keys_R: NDArray[np.uint32]
    """The lower half of each key, ascending."""
    ids_R: Ids

    def __len__(self) -> int:
        return len(self.ids_R)


class KeyIndex:
    """Entries by key, any number for each key; a key of 0 is no key.

    It has sorted runs of entries with half of the bits of their keys; a new run is merged with the previous one while
    that is less than `_GROWTH` times as long (the logarithmic method: Bentley and Saxe 1980). Unlike a hash table it
    needs no loop over the entries of one key, and stays fast where many entries have the same key. Entries that are no
    longer in use are left out at the next merge.

    Args:
        keys: the key of each entry, uint64; its owner sets it before `add`.
        used: whether an entry is in use: 0 for no.
    """

    def __init__(self, keys: NDArray[np.uint64], used: NDArray[np.uint8]) -> None:
        self._keys = keys
        self._used = used
        self._runs: list[_KeyRun] = []
        self._entries = 0
        self._next = 0
        """The run that `_shrink` reads next."""

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return sum(run.keys_R.nbytes + run.ids_R.nbytes for run in self._runs)

    def add(self, ids: Ids) -> None:
        """Add n entries."""
        keys = self._keys[ids]
        if not keys.all():
            ids, keys = ids[keys != 0], keys[keys != 0]
        if not len(ids):
            return
        half = keys.astype(np.uint32)
        order = np.argsort(half, kind="stable")
        self._runs.append(_KeyRun(half[order], ids[order]))
        self._entries += len(ids)
        while len(self._runs) > 1 and self._merges(*map(len, self._runs[-2:])):
            last = [self._in_use(run) for run in self._runs[-2:]]
            half, ids = np.concatenate([run.keys_R for run in last]), np.concatenate([run.ids_R for run in last])
            order = np.argsort(half, kind="stable")  # fast for two runs that are sorted
            self._entries += len(ids) - sum(map(len, self._runs[-2:]))
            self._runs[-2:] = [_KeyRun(half[order], ids[order])]

    def find(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.intp], Ids]:
        """Return the entries in use with one of n keys: for each of m matches the position of the key, and the entry.

        Matches are in the order of positions.
        """
        half = keys.astype(np.uint32)
        order = np.argsort(half, kind="stable")  # neighbours in a run share cache lines
        sorted_n, is_key = half[order], keys[order] != 0
        positions, found = [np.empty(0, np.intp)], [np.empty(0, np.int32)]
        for run in self._runs:
            first = np.searchsorted(run.keys_R, sorted_n)
            hits = np.flatnonzero((run.keys_R.take(first, mode="clip") == sorted_n) & is_key)
            if len(hits):
                first = first[hits]
                counts = np.searchsorted(run.keys_R, sorted_n[hits], side="right") - first
                ends = np.cumsum(counts)
                within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
                positions.append(np.repeat(order[hits], counts))
                found.append(run.ids_R[np.repeat(first, counts) + within])
        position, ids = np.concatenate(positions), np.concatenate(found)
        stays = (self._used[ids] != 0) & (self._keys[ids] == keys[position])
        # An entry that was removed and added again with the same key may be in two runs.
        pairs = np.unique(position[stays] << 32 | ids[stays].astype(np.intp))
        return pairs >> 32, (pairs & (2**32 - 1)).astype(np.int32)

    def shrink(self, in_use: int) -> None:
        """Leave out entries that are not in use, of one run, where they are too many; `in_use`: how many are in use."""
        if self._runs and self._entries - in_use > self._entries * _MOST_UNUSED_KEYS + _SLACK:
            at = self._next % len(self._runs)
            self._next = at + 1
            run = self._in_use(self._runs[at])
            self._entries += len(run) - len(self._runs[at])
            self._runs[at : at + 1] = [run] if len(run) else []

    def _in_use(self, run: _KeyRun) -> _KeyRun:
        stays = (self._used[run.ids_R] != 0) & (self._keys[run.ids_R].astype(np.uint32) == run.keys_R)
        return run if stays.all() else _KeyRun(run.keys_R[stays], run.ids_R[stays])

    @staticmethod
    def _merges(before: int, last: int) -> bool:
        return before < _GROWTH * last and before + last <= _LONGEST


def rounds(keys: NDArray[np.uint64]) -> Iterator[NDArray[np.intp]]:
    """Yield the positions of n keys in rounds without two equal keys; of equal keys the first comes first.

    The matches of a round are thus no more than the entries of the index. Keys of 0, which match nothing, are left out.
    """
    order = np.argsort(keys, kind="stable")
    order = order[np.searchsorted(keys[order], 1) :]
    sorted_n = keys[order]
    begins = np.flatnonzero(np.append(True, sorted_n[1:] != sorted_n[:-1])) if len(order) else order
    rank = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
    for number in range(int(rank.max(initial=-1)) + 1):
        yield np.sort(order[rank == number])


class DueTimes:
    """Entries by time, for those that are due; each takes 4 bytes.

    Entries are added in groups, which are in a heap by their earliest time. Where events come nearly in the order of
    time, few groups have entries that are due and others; such a group is split by time, so that each entry is read a
    few times.

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
        if self._entries - waiting <= self._entries * _MOST_UNUSED_TIMES + _SLACK:
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
