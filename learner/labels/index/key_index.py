"""Finds entries by the hash of their key, any number for each key.

An entry is a row of arrays that the index's owner has: its key, and whether it is in use. The index has sorted runs of
entries with half of the bits of their keys; a new run is merged with the previous one while that is less than `_GROWTH`
times as long (the logarithmic method: Bentley and Saxe 1980). Unlike a hash table it needs no loop over the entries of
one key, and stays fast where many entries have the same key. Entries that are no longer in use are left out at the next
merge.

Legend: n keys of a call, m matches, R entries of a run.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.labels.index.numbers import Ids

_GROWTH = 4
_LONGEST = 2**22
"""Longer runs are not merged: a merge of so many takes less than a second."""
_MOST_UNUSED = 1 / 16
"""The part of all entries that may be out of use."""
_SLACK = 4096


@dataclass(frozen=True)
class _KeyRun:
    keys_R: NDArray[np.uint32]
    """The lower half of each key, ascending."""
    ids_R: Ids

    def __len__(self) -> int:
        return len(self.ids_R)


class KeyIndex:
    """Entries by key; a key of 0 is no key.

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
        if self._runs and self._entries - in_use > self._entries * _MOST_UNUSED + _SLACK:
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
