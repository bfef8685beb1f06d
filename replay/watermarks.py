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
        rising = True
        for index in np.unique(partition).tolist():
            mine = partition == index
            at, line = offset[mine], row[mine]
            steps = np.diff(at)
            highest = np.lexsort((line, at))[-1]
            first, last = (int(at[0]), int(line[0])), (int(at[highest]), int(line[highest]))
            mark = self.highest.get(index, (-1, -1))
            rising &= bool(((steps > 0) | ((steps == 0) & (np.diff(line) > 0))).all()) and first > mark
            self.highest[index] = max(last, mark)
        return rising
