"""Figures over time, with the events: bounded memory, fine for the last minutes and coarse for the last days."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.serving.dashboard.events import EventLog

RESOLUTIONS = ((1, 600), (10, 720), (120, 5040))
"""Seconds that a point stands for, and how many points are kept: ten minutes, two hours, a week."""

_DECIMALS = 6


class SeriesRing:
    """The newest `points` points of some series, each the mean of what was added in `step` seconds."""

    def __init__(self, step: int, points: int, series: int) -> None:
        self.step = step
        self._points = points
        self._bucket = np.full(points, -1, np.int64)  # the time of each point, in steps; -1 where there is none
        self._mean = np.full((points, series), np.nan)
        self._count = np.zeros(series)

    def add(self, time: float, values: NDArray[np.float64]) -> None:
        """Add one value of each series, NaN where there is none. A clock that is set back removes later points."""
        bucket = int(time // self.step)
        self._bucket[self._bucket > bucket] = -1
        slot = bucket % self._points
        if self._bucket[slot] != bucket:
            self._bucket[slot] = bucket
            self._mean[slot] = np.nan
            self._count[:] = 0
        known = np.isfinite(values)
        self._count += known
        before = np.nan_to_num(self._mean[slot, known])
        self._mean[slot, known] = before + (values[known] - before) / self._count[known]

    def since(self, time: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the times `[N]` and values `[N, series]` from `time` on; the last point may still grow."""
        newest = self._bucket.max()
        oldest = max(int(time // self.step), newest - self._points + 1, 0)
        order = np.argsort(self._bucket)
        order = order[self._bucket[order] >= oldest]
        return self._bucket[order] * self.step, self._mean[order]


class History:
    """Series by name, at every resolution, and the events. Any thread may call."""

    def __init__(self, names: Sequence[str], resolutions: Sequence[tuple[int, int]] = RESOLUTIONS) -> None:
        self._names = tuple(names)
        self._rings = {step: SeriesRing(step, points, len(self._names)) for step, points in resolutions}
        self._lock = Lock()
        self.events = EventLog()
        self.steps = tuple(self._rings)

    def add(self, time: float, values: Mapping[str, float | None]) -> None:
        """Add a sample, in which a series that is None or missing has a gap."""
        row = np.array([values.get(name) for name in self._names], np.float64)
        with self._lock:
            for ring in self._rings.values():
                ring.add(time, row)

    def since(self, time: float, step: int) -> dict[str, Any]:
        """Return points and events from `time` on, at one of the `steps`, as JSON values; NaN is encoded as null."""
        with self._lock:
            times, values = self._rings[step].since(time)
        columns = np.round(values, _DECIMALS).T.tolist()
        return {
            "step": step,
            "time": times.tolist(),
            "series": dict(zip(self._names, columns, strict=True)),
            "events": self.events.since(time),
        }
