"""How far the events of each partition have been added: events beyond that are new, and need not be looked up.

Legend: N events of a call.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


class Watermarks:
    """The highest `(offset, row)` that was added, by index of the partition."""

    def __init__(self, highest: Mapping[int, tuple[int, int]] | None = None) -> None:
        self.highest: dict[int, tuple[int, int]] = dict(highest or {})

    def pass_by(
        self, partition: NDArray[np.int64], offset: NDArray[np.int64], row: NDArray[np.int32]
    ) -> NDArray[np.bool_] | None:
        """Move the marks to N events, and return which lie beyond all of their partition that came before them.

        Returns:
            bool `[N]`; None: all do, as they mostly do.
        """
        if not len(partition):
            return None
        if (partition == partition[0]).all():
            return self._pass(int(partition[0]), offset, row)
        beyond, alike = np.ones(len(partition), np.bool_), True
        for index in np.unique(partition).tolist():
            mine = partition == index
            found = self._pass(index, offset[mine], row[mine])
            if found is not None:
                beyond[mine], alike = found, False
        return None if alike else beyond

    def _pass(self, index: int, offset: NDArray[np.int64], row: NDArray[np.int32]) -> NDArray[np.bool_] | None:
        """Move the mark of one partition."""
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
