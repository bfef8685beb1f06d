"""The events held, by group, so that a few of each can be sampled without a look at all.

Legend: n slots of a call, G groups that were met.
"""

import numpy as np
from numpy.typing import NDArray

from replay.reservoir.quotas import level

_ROOM = 64
_SPARSE = 16
"""A group of so many times what is sampled of it is sampled from by trial, which is faster."""


class GroupLists:
    """Lists of slots, one a group. The order within a list is that in which events came."""

    def __init__(self) -> None:
        self._members: list[NDArray[np.int32]] = []
        self._sizes = np.zeros(0, np.int64)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Events of each group, `[G]`."""
        return self._sizes

    def add(self, groups: NDArray[np.int64], slots: NDArray[np.int32]) -> None:
        """Put each of n slots into its group, >= 0."""
        for group in np.unique(groups).tolist():
            if group >= len(self._members):
                self._members += [np.empty(_ROOM, np.int32) for _ in range(group + 1 - len(self._members))]
                self._sizes = np.concatenate([self._sizes, np.zeros(group + 1 - len(self._sizes), np.int64)])
            new, size = slots[groups == group], int(self._sizes[group])
            members = self._members[group]
            if size + len(new) > len(members):
                members = self._members[group] = np.concatenate([members, np.empty(size + len(new), np.int32)])
            members[size : size + len(new)] = new
            self._sizes[group] += len(new)

    def discard(self, slots: NDArray[np.int32]) -> None:
        """Take slots out, in one look at all members."""
        if not len(slots):
            return
        gone = np.zeros(1 + max((int(m[:size].max(initial=0)) for m, size in self._lists()), default=0), np.bool_)
        gone[slots[slots < len(gone)]] = True
        for group, (members, size) in enumerate(self._lists()):
            kept = members[:size][~gone[members[:size]]]
            members[: len(kept)] = kept
            self._sizes[group] = len(kept)

    def sample(self, n: int, generator: np.random.Generator) -> NDArray[np.int32]:
        """Return n different slots, as many of each group as of any other where they are large enough."""
        quotas = self._sizes.copy()
        if quotas.sum() > n:
            most = level(self._sizes, n)
            quotas = np.minimum(self._sizes, most)
            larger = np.flatnonzero(self._sizes > most)
            quotas[generator.choice(larger, size=n - int(quotas.sum()), replace=False)] += 1
        chosen = [self._of(group, int(quotas[group]), generator) for group in np.flatnonzero(quotas).tolist()]
        return np.concatenate(chosen) if chosen else np.empty(0, np.int32)

    def _of(self, group: int, n: int, generator: np.random.Generator) -> NDArray[np.int32]:
        members, size = self._members[group], int(self._sizes[group])
        if size < _SPARSE * n:
            return members[generator.choice(size, size=n, replace=False)]
        places: dict[int, None] = {}
        while len(places) < n:
            places.update(dict.fromkeys(generator.integers(size, size=n - len(places)).tolist()))
        return members[list(places)]

    def _lists(self) -> list[tuple[NDArray[np.int32], int]]:
        return list(zip(self._members, self._sizes.tolist(), strict=True))
