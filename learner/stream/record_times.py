"""The record times of many events in little memory: serving computes from them how old events are when it serves them.

Legend: N times.
"""

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
"""Milliseconds since 1970, `[N]`."""

_MOST = 4096
_THINNED = 1024


class RecordTimes:
    """A multiset of record times; more than 4,096 are replaced by evenly spaced quantiles. Used by one thread.

    Each thinning moves a quantile by at most one rank in 2,048.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Times, float]] = []
        self._held = 0

    @property
    def rows(self) -> int:
        """Number of events."""
        return round(sum(len(times) * weight for times, weight in self._parts))

    def add(self, times: Times, rows: int | None = None) -> None:
        """Add events: one for each time, or `rows` events whose quantiles the times are, evenly spaced."""
        if len(times) and rows != 0:
            rows = len(times) if rows is None else rows
            if len(times) > _MOST:  # of one weight, which spares most of the work of `quantiles`
                middles = (np.arange(_THINNED) + 0.5) * (len(times) / _THINNED)
                times = np.sort(times, kind="stable")[middles.astype(np.intp)]
            self._put(times, rows / len(times))

    def join(self, other: "RecordTimes") -> None:
        """Add all events of another one."""
        for times, weight in other._parts:
            self._put(times, weight)

    def quantiles(self, max_times: int) -> Times:
        """Return at most `max_times` evenly spaced quantiles, ascending; all times if there are no more."""
        if not self._parts:
            return np.zeros(0, np.int64)
        times = np.concatenate([times for times, _ in self._parts])
        weights = np.concatenate([np.full(len(times), weight) for times, weight in self._parts])
        order = np.argsort(times, kind="stable")  # a pass over what is in order already, as most of a stream is
        ranks = np.cumsum(weights[order])
        count = min(max_times, self.rows)
        middles = (np.arange(count) + 0.5) * (ranks[-1] / count)
        quantiles: Times = times[order][np.searchsorted(ranks, middles)]
        return quantiles

    def _put(self, times: Times, weight: float) -> None:
        self._parts.append((times, weight))
        self._held += len(times)
        if self._held > _MOST:
            rows, thinned = self.rows, self.quantiles(_THINNED)
            self._parts, self._held = [(thinned, rows / len(thinned))], len(thinned)
