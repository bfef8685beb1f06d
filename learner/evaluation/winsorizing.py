"""Bounds for errors that have none, so that a few wrong labels decide nothing.

An error counts as `LIMIT` medians at most: it is winsorised (Dixon 1960, "Simplified estimation from censored normal
samples"; Huber 1964, "Robust estimation of a location parameter"). A median stays where most errors are while fewer
than half of them are wrong, and errors of a normal distribution exceed the limit less than once in 10^10.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

LIMIT = 10.0
"""Medians."""
_RECENT = 63
"""Values of which the median is taken while they come."""
FEWEST = 8
"""With fewer values nothing is known of their size."""


def limit_of(scores: NDArray[np.float64]) -> float:
    """Return the size beyond which scores do not count: `LIMIT` medians of those that are finite and not 0.

    Events without any error say nothing of the size of the others. Infinity where there are no others.
    """
    sizes = np.abs(scores)
    sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
    return LIMIT * float(np.median(sizes)) if len(sizes) else np.inf


def winsorized(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return scores of which none is beyond their limit."""
    limit = limit_of(scores)
    return np.clip(scores, -limit, limit)


class Winsorizer:
    """Bounds values as they come by the median of the newest ones. State is plain numbers. Used by one thread."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, value: float) -> float:
        """Return a value within the limit, which depends on this value and on those before it."""
        self._recent.append(value)
        sizes = [abs(each) for each in self._recent if each]
        if len(self._recent) < FEWEST or not sizes:
            return value
        limit = LIMIT * median(sizes)
        return min(max(value, -limit), limit)

    def state(self) -> list[float]:
        """Return the newest values."""
        return [*self._recent]

    def restore(self, state: Sequence[float]) -> None:
        """Restore the newest values."""
        self._recent = deque(state, maxlen=_RECENT)
