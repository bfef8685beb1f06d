"""Positions of held events in the arrays of a sampler. Unlike slots, they depend only on the sequence of steps.

The slot of an event depends on tiers, checkpoints and restarts, and samples must not depend on these.

Legend: S slots, n events of a call.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class StablePositions:
    """At most `count` positions for events in S slots. New events take the lowest free ones."""

    def __init__(self, slots: int, count: int) -> None:
        self.count = count
        self._position = np.zeros(slots, np.int32)
        self._slot = np.zeros(count, np.int32)
        self._free = np.arange(count, dtype=np.int32)[::-1]  # descending: the lowest are taken from the end

    def of(self, slots: Ints) -> Ints:
        """Return the positions of the events in n slots."""
        return self._position.take(slots)

    def slots(self, positions: NDArray[np.int64]) -> Ints:
        """Return the slots of the events in n positions."""
        return self._slot.take(positions)

    def take(self, slots: Ints) -> Ints:
        """Assign positions to n events, and return them."""
        left = len(self._free) - len(slots)
        taken, self._free = self._free[left:][::-1], self._free[:left]
        self._position[slots], self._slot[taken] = taken, slots
        return taken

    def release(self, slots: Ints) -> Ints:
        """Free the positions of n events, and return them."""
        left = self.of(slots)
        self._free = np.sort(np.concatenate([left, self._free[::-1]]), kind="stable")[::-1]
        return left

    def restore(self, slots: Ints, positions: Ints) -> None:
        """Replace all positions by these, of the events in n slots."""
        self._position[slots], self._slot[positions] = positions, slots
        taken = np.zeros(self.count, np.bool_)
        taken[positions] = True
        self._free = np.flatnonzero(~taken)[::-1].astype(np.int32)
