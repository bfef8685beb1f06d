"""The memory tier as a cache of the slots of a slower one: which rows it has, and which make way for others.

Six bytes a slot, and ten for each row that the cache holds; no call takes longer with more slots.

Legend: n rows of a call, S slots, C rows of the cache.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from replay.tiers.memory import MemoryTier

_NOWHERE = -1
_LOOKED_AT = 4
"""Rows that are looked at for each one that is to make way."""


class Budget:
    """A bound of bytes a second, of which up to a second's may be spent at once."""

    def __init__(self, bytes_a_second: int) -> None:
        self._rate = bytes_a_second
        self._left = float(bytes_a_second)
        self._at = time.monotonic()

    def take(self, n: int, size: int) -> int:
        """Return how many of n things of `size` bytes may be moved now, and reckon with them."""
        now = time.monotonic()
        self._left = min(self._rate, self._left + (now - self._at) * self._rate)
        self._at = now
        n = min(n, int(self._left // max(1, size)))
        self._left -= n * size
        return n


class ClockCache:
    """Which of S slots are in the C rows of a memory tier. Used by one thread.

    Where `budget` is given, rows that nobody has sampled for a while make way for those that are sampled (CLOCK,
    Corbato 1968), as fast as it allows; else what is in the cache stays until its event leaves, which is as good where
    all events are sampled alike.
    """

    def __init__(self, memory: MemoryTier, slots: int, budget: Budget | None = None) -> None:
        self.demoted = 0
        """Rows that have made way, in all."""
        self._memory = memory
        self._budget = budget
        self._place = np.full(slots, _NOWHERE, np.int32)
        self._generation = np.zeros(slots, np.uint16)
        self._slot = np.zeros(memory.slots, np.int32)
        self._sampled = np.zeros(memory.slots, np.bool_)
        self._left = np.zeros(memory.slots, np.bool_)
        self._room = np.arange(memory.slots, dtype=np.int32)[::-1].copy()
        self._free = memory.slots
        self._hand = 0

    def __len__(self) -> int:
        return self._memory.slots - self._free

    def find(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of n slots' rows in the memory tier, -1 for those that are not there; they are sampled."""
        places = self._place[slots].astype(np.int64)
        if self._budget is not None:
            self._sampled[places[places != _NOWHERE]] = True
        return places

    def generation(self, slots: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Return how often events have left n slots, which tells whether a slot is still the same event's."""
        return self._generation[slots]

    def keep(self, slots: NDArray[np.int64], rows: Callable[[int], Tensor]) -> int:
        """Put the rows of n slots that are not there into the memory tier, as many as there is room; return how many.

        Args:
            slots: `[n]`.
            rows: returns those of the first so many, uint8 `[<= n, R]` on any device.
        """
        places = self.reserve(len(slots))
        n = len(places)
        if n:
            self._memory.put(places, rows(n))
            self._fill(slots[:n], places)
        return n

    def reserve(self, n: int) -> NDArray[np.int64]:
        """Return up to n places for rows that are on their way: what they hold has made way, and nobody reads them.

        `fill` has to follow for each of them.
        """
        room = min(n, self._free)
        self._free -= room
        places = self._room[self._free : self._free + room].astype(np.int64)
        if self._budget is not None and not room:
            places = self._victims(self._budget.take(n, self._memory.slot_bytes))
            self._place[self._slot[places]] = _NOWHERE
            self.demoted += len(places)
        self._slot[places] = _NOWHERE
        return places

    def fill(
        self,
        slots: NDArray[np.int64],
        generation: NDArray[np.uint16],
        places: NDArray[np.int64],
        came: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Let the rows of n slots be found that came into places that were reserved, and return which, bool `[n]`.

        Not those whose event has left since `generation` or that are there already, whose places are free again.
        """
        keep: NDArray[np.bool_] = came & (self._generation[slots] == generation) & (self._place[slots] == _NOWHERE)
        self._fill(slots[keep], places[keep])
        self._give_back(places[~keep])
        return keep

    def free(self, slots: NDArray[np.int64]) -> None:
        """Let go of the rows of n different slots, whose events have left."""
        places = self._place[slots]
        self._give_back(places[places != _NOWHERE])
        self._place[slots] = _NOWHERE
        self._generation[slots] += 1

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Overwrite the rows of n slots, and all that events have left in places that are free; nothing is reserved."""
        places = self._place[slots]
        self._left[places[places != _NOWHERE]] = True
        self._memory.erase(np.flatnonzero(self._left))
        self._left[:] = False

    def _fill(self, slots: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        self._place[slots], self._slot[places], self._left[places] = places, slots, False

    def _give_back(self, places: NDArray[np.signedinteger]) -> None:
        self._room[self._free : self._free + len(places)] = places
        self._free += len(places)
        self._sampled[places], self._left[places] = False, True

    def _victims(self, n: int) -> NDArray[np.int64]:
        """Return n places at most whose rows were not sampled since the hand passed them last; only of a full cache."""
        size = self._memory.slots
        seen = (self._hand + np.arange(min(_LOOKED_AT * n, size))) % max(1, size)
        idle = np.flatnonzero(~self._sampled[seen] & (self._slot[seen] != _NOWHERE))[:n]
        passed = int(idle[-1]) + 1 if n and len(idle) == n else len(seen)
        self._sampled[seen[:passed]] = False
        self._hand = (self._hand + passed) % max(1, size)
        return seen[idle]
