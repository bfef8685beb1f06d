"""Samplers that balance groups: classes, or clusters of embeddings.

Legend: H events held, n sampled, G groups.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.replay.reservoir.event_table import EventTable
from anabranch.replay.reservoir.quotas import level
from anabranch.replay.sampling.base import Choice, Sampler, Slots

_ROOM = 64
_SPARSE = 16
"""A group at least this many times as large as its sample is sampled by rejection, which is faster."""


class GroupLists:
    """Lists of slots, one for each group, in the order in which events were added."""

    def __init__(self) -> None:
        self._members: list[NDArray[np.int32]] = []
        self._sizes = np.zeros(0, np.int64)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Events of each group, `[G]`."""
        return self._sizes

    def add(self, groups: NDArray[np.int64], slots: NDArray[np.int32]) -> None:
        """Add n slots to their groups, >= 0."""
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
        """Remove slots, in one scan of all members."""
        if not len(slots):
            return
        gone = np.zeros(1 + max((int(m[:size].max(initial=0)) for m, size in self._lists()), default=0), np.bool_)
        gone[slots[slots < len(gone)]] = True
        for group, (members, size) in enumerate(self._lists()):
            kept = members[:size][~gone[members[:size]]]
            members[: len(kept)] = kept
            self._sizes[group] = len(kept)

    def sample(self, n: int, generator: np.random.Generator) -> NDArray[np.int32]:
        """Return n different slots: as many of each group, if they are large enough."""
        quotas = self._sizes.copy()
        if quotas.sum() > n:
            quota = level(self._sizes, n)
            quotas = np.minimum(self._sizes, quota)
            larger = np.flatnonzero(self._sizes > quota)
            quotas[generator.choice(larger, size=n - int(quotas.sum()), replace=False)] += 1
        chosen = [self._of(group, int(quotas[group]), generator) for group in np.flatnonzero(quotas).tolist()]
        return np.concatenate(chosen) if chosen else np.empty(0, np.int32)

    def _of(self, group: int, n: int, generator: np.random.Generator) -> NDArray[np.int32]:
        members, size = self._members[group], int(self._sizes[group])
        if size < _SPARSE * n:
            return members[generator.choice(size, size=n, replace=False)]
        positions: dict[int, None] = {}
        while len(positions) < n:
            positions.update(dict.fromkeys(generator.integers(size, size=n - len(positions)).tolist()))
        return members[list(positions)]

    def _lists(self) -> list[tuple[NDArray[np.int32], int]]:
        return list(zip(self._members, self._sizes.tolist(), strict=True))


class BalancedSampler(Sampler):
    """Samples each group equally often, and uniformly within a group; larger groups fill up for smaller ones."""

    def __init__(self, event_table: EventTable, group_of: Callable[[Slots], NDArray[np.int64]]) -> None:
        super().__init__(event_table)
        self._group_of = group_of
        self._groups = GroupLists()

    @override
    def sample(self, n: int, generator: np.random.Generator) -> Choice:
        slots = self._groups.sample(min(n, len(self._event_table)), generator)
        return Choice(generator.permutation(slots))

    @override
    def add(self, slots: Slots) -> None:
        self._groups.add(self._group_of(slots), slots)

    @override
    def remove(self, slots: Slots) -> None:
        self._groups.discard(slots)
