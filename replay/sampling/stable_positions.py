"""Places of the events held, for what is kept of each: unlike slots, they depend on the sequence of steps alone.

Which slot an event gets depends on the tiers, on checkpoints and on restarts. What decides samples must not.

Legend: S slots, n of a call.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class StablePositions:
    """At most `count` seats for events in S slots. Those that come take the lowest free ones."""

    def __init__(self, slots: int, count: int) -> None:
        self.count = count
        self._seat = np.zeros(slots, np.int32)
        self._slot = np.zeros(count, np.int32)
        self._free = np.arange(count, dtype=np.int32)[::-1]  # falling: the lowest are taken off the end

    def of(self, slots: Ints) -> Ints:
        """Return the seats of the events in n slots."""
        return self._seat.take(slots)

    def slots(self, seats: NDArray[np.int64]) -> Ints:
        """Return the slots of the events in n seats."""
        return self._slot.take(seats)

    def take(self, slots: Ints) -> Ints:
        """Give seats to n events, and return them."""
        left = len(self._free) - len(slots)
        taken, self._free = self._free[left:][::-1], self._free[:left]
        self._seat[slots], self._slot[taken] = taken, slots
        return taken

    def release(self, slots: Ints) -> Ints:
        """Take back the seats of n events, and return them."""
        left = self.of(slots)
        self._free = np.sort(np.concatenate([left, self._free[::-1]]), kind="stable")[::-1]
        return left

    def restore(self, slots: Ints, seats: Ints) -> None:
        """Let the events in n slots have these seats, in place of all."""
        self._seat[slots], self._slot[seats] = seats, slots
        taken = np.zeros(self.count, np.bool_)
        taken[seats] = True
        self._free = np.flatnonzero(~taken)[::-1].astype(np.int32)
