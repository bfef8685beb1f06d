"""Numbers of entries, which index arrays: numbers that were released are taken again before higher ones."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
"""Numbers, int32 `[n]`."""


class Numbers:
    """Numbers below `most`; `used` is above the highest that was ever taken."""

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
