"""How far events of each partition have been offered: what lies beyond is new, and need not be looked up.

Legend: N events of a call.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


class Watermarks:
    """The highest `(offset, row)` that was offered, by index of the partition."""

    def __init__(self, highest: Mapping[int, tuple[int, int]] | None = None) -> None:
        self.highest: dict[int, tuple[int, int]] = dict(highest or {})

    def pass_by(self, partition: NDArray[np.int64], offset: NDArray[np.int64], row: NDArray[np.int32]) -> bool:
        """Move the marks to N events, and return whether all rise within their partition and beyond its mark."""
        if not len(partition):
            return True
        if (partition == partition[0]).all():
            return self._pass(int(partition[0]), offset, row)
        rising = [
            self._pass(index, offset[mine], row[mine])
            for index in np.unique(partition).tolist()
            for mine in [partition == index]
        ]
        return all(rising)

    def _pass(self, index: int, offset: NDArray[np.int64], row: NDArray[np.int32]) -> bool:
        """Move the mark of one partition."""
        steps = offset[1:] - offset[:-1]
        rising = bool((steps > 0).all()) or bool(((steps > 0) | ((steps == 0) & (np.diff(row) > 0))).all())
        highest = -1 if rising else np.lexsort((row, offset))[-1]
        first, last = (int(offset[0]), int(row[0])), (int(offset[highest]), int(row[highest]))
        mark = self.highest.get(index, (-1, -1))
        self.highest[index] = max(last, mark)
        return rising and first > mark
