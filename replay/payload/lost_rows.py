"""The rows that no tier has any more: readers and writers report them, and the store collects them."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from replay.payload.clock_cache import ClockCache

NO_SLOTS = np.empty(0, np.int64)


class LostRows:
    """A queue that any thread adds to and the store's thread empties."""

    def __init__(self, cache: ClockCache) -> None:
        self._cache = cache
        self.reports: deque[tuple[NDArray[np.int64], NDArray[np.uint16]]] = deque()
        """What was added since `take`; any thread may ask whether there is anything."""

    def add(self, slots: NDArray[np.int64], generation: NDArray[np.uint16]) -> None:
        """Add n slots, with their generations when the row was written or requested."""
        self.reports.append((slots, generation))

    def take(self) -> NDArray[np.int64]:
        """Return the slots added since the previous call, except those whose event was removed meanwhile."""
        if not self.reports:
            return NO_SLOTS
        rows = [self.reports.popleft() for _ in range(len(self.reports))]
        slots, generation = (np.concatenate(column) for column in zip(*rows, strict=True))
        return np.unique(slots[self._cache.generation(slots) == generation])
