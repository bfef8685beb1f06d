"""The learner's report as points of curves, which wait for a tracker in a bounded queue."""

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from typing_extensions import override

from anabranch.learner.errors import TrackerRefusedError
from anabranch.learner.extensions.track.process import Point, Tracker
from anabranch.learner.status.report import LearnerReport, read_report

_MOST_WAITING = 1000
_MOST_SENT = 100
"""Points of one call."""

log = logging.getLogger(__name__)


class Tracked:
    """What a tracker gets: found by `watch`, which never waits for it, and sent by `send`. Used by one thread."""

    problem: str | None = None
    """One sentence while it does not work as it should."""

    def watch(self) -> None:
        """Add what is new to what waits."""
        raise NotImplementedError

    def send(self, is_stopping: Callable[[], bool]) -> None:
        """Send what waits, until `is_stopping`; raises TrackerError where the tracker is away."""
        raise NotImplementedError

    def finish(self, longest: timedelta) -> None:
        """Complete what is under way, since the learner ends; raises TrackerError, after `longest` too."""


class Curves(Tracked):
    """The points of this start of the learner, read off its own report."""

    def __init__(
        self,
        tracker: Tracker,
        state_dir: Path,
        generation: int,
        every: timedelta,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the state directory of the report, and the generation of this start: other reports are not its own."""
        self._tracker = tracker
        self._state_dir = state_dir
        self._generation = generation
        self._every = every.total_seconds()
        self._clock = clock
        self._due = 0.0
        self._last: int | None = None
        self._points: deque[Point] = deque(maxlen=_MOST_WAITING)

    @override
    def watch(self) -> None:
        """Add a point if one is due, and there was a step since the last; the oldest leaves a full queue."""
        if self._clock() < self._due:
            return
        self._due = self._clock() + self._every
        report = read_report(self._state_dir)
        if report is None or report.generation != self._generation or report.steps in (0, self._last):
            return
        self._last = report.steps
        self._points.append(Point(report.steps, report.time, dict(numbers_of(report))))

    @override
    def send(self, is_stopping: Callable[[], bool]) -> None:
        while self._points and not is_stopping():
            points = self._next()
            try:
                self._tracker.log(points)
            except TrackerRefusedError as exc:
                log.warning("%s; these %d points are left out", exc, len(points))
            for _ in points:
                self._points.popleft()

    @override
    def finish(self, longest: timedelta) -> None:
        self._due = 0.0
        self.watch()
        self._tracker.finish(self._next(), longest)

    def _next(self) -> list[Point]:
        return list(itertools.islice(self._points, _MOST_SENT))


def numbers_of(report: LearnerReport) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a report by the name of their curve, such as `loss/now`."""
    by_window = {
        "loss": report.loss,
        "accuracy": report.accuracy,
        "error": report.error,
        "class_accuracy": report.classes,
        "rate": report.rates,
        **{f"baseline/{name}": each.scores for name, each in report.baselines.items()},
        **{f"measure/{name}": each.value for name, each in report.measures.items()},
        **{f"measure_constant/{name}": each.constant for name, each in report.measures.items()},
        "setting": {} if report.search is None else report.search.values,
        "learner": {
            "events": report.outcomes.get("trained", 0),
            "lag_seconds": report.lag_seconds,
            "replay_ratio": report.replay_ratio,
            "window_rows": report.window_rows,
            "forgetting": math.nan if report.forgetting is None else report.forgetting,
            "drifts": report.drifts,
        },
    }
    for group, values in by_window.items():
        yield from ((f"{group}/{name}", float(value)) for name, value in values.items() if math.isfinite(value))
