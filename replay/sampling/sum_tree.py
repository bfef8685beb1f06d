"""A sum tree, for samples in proportion to weights that change: 64 children a node, in numpy.

Legend: S leaves, n leaves of a call.
"""

import numpy as np
from numpy.typing import NDArray

_FAN = 64


class SumTree:
    """S weights, initially 0. Each sum is computed from its children, so that it depends only on the weights."""

    def __init__(self, leaves: int) -> None:
        self._levels: list[NDArray[np.float64]] = []
        size = leaves
        while not self._levels or size > 1:
            padded = -(-size // _FAN) * _FAN
            self._levels.append(np.zeros(padded, np.float64))
            size = padded // _FAN
        self._levels.append(np.zeros(1, np.float64))

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._levels[-1][0])

    def __getitem__(self, leaves: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.float64]:
        """Return the weights of n leaves."""
        return self._levels[0][leaves]

    def set(self, leaves: NDArray[np.int64] | NDArray[np.int32], weights: NDArray[np.float64] | float) -> None:
        """Set the weights of n leaves, finite and >= 0."""
        self._levels[0][leaves] = weights
        nodes = np.asarray(leaves)
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            nodes = np.unique(nodes // _FAN)
            above[nodes] = below.reshape(-1, _FAN)[nodes].sum(axis=1)

    def find(self, mass: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the leaves that n points in [0, total) hit, int64 `[n]`."""
        nodes = np.zeros(len(mass), np.int64)
        left = mass.copy()
        for level in reversed(self._levels[:-1]):
            children = level.reshape(-1, _FAN)[nodes]
            ends = np.cumsum(children, axis=1)
            beyond = ends > left[:, None]
            child, rows = beyond.argmax(axis=1), np.arange(len(nodes))
            # Rounding may move a point beyond the last child with a weight.
            lost = np.flatnonzero(~beyond[rows, child])
            if len(lost):
                child[lost] = _last_of(children[lost])
            left -= ends[rows, child] - children[rows, child]
            nodes = nodes * _FAN + child
        return nodes


def _last_of(children: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the last child with a weight in each of n rows; the first where there is none."""
    has = children > 0
    return np.where(has.any(axis=1), has.shape[1] - 1 - has[:, ::-1].argmax(axis=1), 0).astype(np.int64)
