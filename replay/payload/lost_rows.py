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
        self._rows: deque[tuple[NDArray[np.int64], NDArray[np.uint16]]] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, slots: NDArray[np.int64], generation: NDArray[np.uint16]) -> None:
        """Add n slots, with their generations when the row was written or requested."""
        self._rows.append((slots, generation))

    def take(self) -> NDArray[np.int64]:
        """Return the slots added since the previous call, except those whose event was removed meanwhile."""
        if not self._rows:
            return NO_SLOTS
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        slots, generation = (np.concatenate(column) for column in zip(*rows, strict=True))
        return np.unique(slots[self._cache.generation(slots) == generation])
