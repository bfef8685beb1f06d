"""The memory tier as a cache of a slower tier: which rows it has, and which it replaces.

Takes six bytes a slot and ten a position. No call takes longer with more slots.

Legend: n rows of a call, S slots of the slower tier, C positions in the memory tier.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anabranch.core.failures import out_of_memory
from anabranch.replay.tiers.memory import MemoryTier

_NO_POSITION = -1
_EXAMINED = 4
"""Rows that are examined for each one that is to be replaced."""


class Budget:
    """A token bucket: a bound of bytes a second, with bursts of up to one second's bytes."""

    def __init__(self, bytes_a_second: int) -> None:
        self._rate = bytes_a_second
        self._left = float(bytes_a_second)
        self._at = time.monotonic()

    def take(self, n: int, size: int) -> int:
        """Return how many of n rows of `size` bytes may be moved now, and deduct them."""
        now = time.monotonic()
        self._left = min(self._rate, self._left + (now - self._at) * self._rate)
        self._at = now
        n = min(n, int(self._left // max(1, size)))
        self._left -= n * size
        return n


class ClockCache:
    """The positions of S slots in a memory tier. Used by one thread.

    With a `budget`, sampled rows replace rows that were not sampled for a while (CLOCK, Corbato 1968), as fast as the
    budget allows. Without one a row stays until its event is removed, which is as good when all events are sampled with
    the same probability.
    """

    def __init__(self, memory: MemoryTier, slots: int, budget: Budget | None = None) -> None:
        self.demoted = 0
        """Rows that were replaced, in total."""
        self.memory = memory
        self._budget = budget
        self._position = np.full(slots, _NO_POSITION, np.int32)
        self._generation = np.zeros(slots, np.uint16)
        self._slot = np.zeros(memory.slots, np.int32)
        self._sampled = np.zeros(memory.slots, np.bool_)
        self._left = np.zeros(memory.slots, np.bool_)
        self._room = np.arange(memory.slots, dtype=np.int32)[::-1].copy()
        self._free = memory.slots
        self._hand = 0

    def __len__(self) -> int:
        return self.memory.slots - self._free

    def find(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of the rows of n slots, -1 for a miss, and count the rows as sampled."""
        positions = self._position[slots].astype(np.int64)
        if self._budget is not None:
            self._sampled[positions[positions != _NO_POSITION]] = True
        return positions

    def generation(self, slots: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Return how often events were removed from n slots: while that is the same, the slot has the same event."""
        return self._generation[slots]

    def keep(self, slots: NDArray[np.int64], rows: Callable[[int], Tensor]) -> int:
        """Put rows that are not cached into free positions, or replace others; return how many of the n rows found one.

        None does where the device has no memory for the copy: a slower tier has the rows.

        Args:
            slots: `[n]`.
            rows: called with a number, returns that many of the first rows, uint8 `[<= n, R]` on any device.
        """
        positions = self.reserve(len(slots))
        n = len(positions)
        if n:
            try:
                self.memory.put(positions, rows(n))
            except RuntimeError as exc:
                if not out_of_memory(exc):
                    raise
                self._release(positions)
                return 0
            self._fill(slots[:n], positions)
        return n

    def reserve(self, n: int) -> NDArray[np.int64]:
        """Reserve up to n positions for rows that are being read, and return them. No thread reads these positions.

        `fill` must follow for each of them.
        """
        room = min(n, self._free)
        self._free -= room
        positions = self._room[self._free : self._free + room].astype(np.int64)
        if self._budget is not None and not room:
            positions = self._victims(self._budget.take(n, self.memory.slot_bytes))
            self._position[self._slot[positions]] = _NO_POSITION
            self.demoted += len(positions)
        self._slot[positions] = _NO_POSITION
        return positions

    def fill(
        self,
        slots: NDArray[np.int64],
        generation: NDArray[np.uint16],
        positions: NDArray[np.int64],
        arrived: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Add the rows of n slots that arrived in reserved positions, and return which were added, bool `[n]`.

        Rows whose event was removed since `generation`, and rows that are cached already, are not added: their
        positions are free again.
        """
        keep: NDArray[np.bool_] = (
            arrived & (self._generation[slots] == generation) & (self._position[slots] == _NO_POSITION)
        )
        self._fill(slots[keep], positions[keep])
        self._release(positions[~keep])
        return keep

    def free(self, slots: NDArray[np.int64]) -> None:
        """Free the positions of n different slots, whose events were removed."""
        positions = self._position[slots]
        self._release(positions[positions != _NO_POSITION])
        self._position[slots] = _NO_POSITION
        self._generation[slots] += 1

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Overwrite the rows of n slots, and the rows of removed events; no position may be reserved."""
        positions = self._position[slots]
        self._left[positions[positions != _NO_POSITION]] = True
        self.memory.erase(np.flatnonzero(self._left))
        self._left[:] = False

    def _fill(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        self._position[slots], self._slot[positions], self._left[positions] = positions, slots, False

    def _release(self, positions: NDArray[np.signedinteger]) -> None:
        self._room[self._free : self._free + len(positions)] = positions
        self._free += len(positions)
        self._sampled[positions], self._left[positions] = False, True

    def _victims(self, n: int) -> NDArray[np.int64]:
        """Return up to n positions of a full cache whose rows were not sampled since the hand last passed them."""
        size = self.memory.slots
        seen = (self._hand + np.arange(min(_EXAMINED * n, size))) % max(1, size)
        idle = np.flatnonzero(~self._sampled[seen] & (self._slot[seen] != _NO_POSITION))[:n]
        passed = int(idle[-1]) + 1 if n and len(idle) == n else len(seen)
        self._sampled[seen[:passed]] = False
        self._hand = (self._hand + passed) % max(1, size)
        return seen[idle]
