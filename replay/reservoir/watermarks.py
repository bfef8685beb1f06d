"""The position up to which events of each partition were added: events beyond it are new and need no look-up.

Legend: N events of a call.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


class Watermarks:
    """The highest `(offset, row)` that was added, by index of the partition."""

    def __init__(self, highest: Mapping[int, tuple[int, int]] | None = None) -> None:
        self.highest: dict[int, tuple[int, int]] = dict(highest or {})

    def advance(
        self, partition: NDArray[np.int64], offset: NDArray[np.int64], row: NDArray[np.int32]
    ) -> NDArray[np.bool_] | None:
        """Advance the watermarks by N events, and return which are beyond all earlier events of their partition.

        Returns:
            bool `[N]`; None: all are, which is the normal case.
        """
        if not len(partition):
            return None
        if (partition == partition[0]).all():
            return self._advance_one(int(partition[0]), offset, row)
        beyond, ordered = np.ones(len(partition), np.bool_), True
        for index in np.unique(partition).tolist():
            members = partition == index
            new = self._advance_one(index, offset[members], row[members])
            if new is not None:
                beyond[members], ordered = new, False
        return None if ordered else beyond

    def _advance_one(self, index: int, offset: NDArray[np.int64], row: NDArray[np.int32]) -> NDArray[np.bool_] | None:
        """Advance the watermark of one partition."""
        steps = offset[1:] - offset[:-1]
        rising = bool((steps > 0).all()) or bool(((steps > 0) | ((steps == 0) & (np.diff(row) > 0))).all())
        mark = self.highest.get(index, (-1, -1))
        if rising and (int(offset[0]), int(row[0])) > mark:
            self.highest[index] = int(offset[-1]), int(row[-1])
            return None
        order = np.lexsort((row, offset))
        another = np.concatenate([[True], (np.diff(offset[order]) > 0) | (np.diff(row[order]) > 0)])
        rank = np.empty(len(order), np.int64)
        rank[order] = np.cumsum(another)
        before = np.concatenate([[0], np.maximum.accumulate(rank)[:-1]])
        self.highest[index] = max(mark, (int(offset[order[-1]]), int(row[order[-1]])))
        beyond: NDArray[np.bool_] = (offset > mark[0]) | ((offset == mark[0]) & (row > mark[1]))
        return beyond & (rank > before)
