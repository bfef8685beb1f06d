"""One sentence on how a pipeline does, from what its parts say of themselves.

A sentence stays the same while nothing changes, since screen readers say each change.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import msgspec

from learner.state_dir.report import LearnerReport
from serving.reporting.report import ServingReport

SILENT = timedelta(seconds=10)
"""Reports are written about once a second; a part that has written none for so long hangs or is gone."""


class Health(msgspec.Struct, frozen=True):
    """The judgement."""

    state: Literal["well", "starting", "unhealthy"]
    sentence: str
    problems: list[str] = []
    """One sentence for each thing that is wrong."""
    silent: bool = False
    """Whether the learner's figures are no longer those of now."""


class ReportAge:
    """How long the newest report of one process has been there, for one reader that looks about once a second.

    Measured by the reader's monotonic clock: a wall clock that is set makes nobody silent, and nobody alive. Only how
    old the first report is that it reads is told by the wall clock. Any thread may ask.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._last: tuple[float, float] | None = None

    def is_silent(self, report: LearnerReport | ServingReport) -> bool:
        """Whether a process has not reported for so long that its figures are no longer those of now."""
        last, now = self._last, self._clock()
        if last is None or last[0] != report.time:
            age = max(0.0, self._wall() - report.time) if last is None else 0.0
            self._last = last = report.time, now - age
        return now - last[1] >= SILENT.total_seconds()


def judge(learner: LearnerReport | None, serving: ServingReport, *, silent: bool) -> Health:
    """Return how the pipeline does; `silent` says that the learner does not report."""
    if learner is None:
        return Health("starting", "No learner has reported yet: start one with anabranch up.")
    problems = [f"Learner: {sentence}" for sentence in learner.problems]
    if silent:
        problems.insert(0, "The learner does not report: it hangs, or has stopped.")
    if serving.version is None and not problems:
        return Health("starting", "The first version is on its way.")
    problems += [f"Serving: {sentence}" for sentence in serving.problems]
    if not problems:
        return Health("well", "All is well.")
    return Health(
        "unhealthy", problems[0] if len(problems) == 1 else f"{len(problems)} things are wrong.", problems, silent
    )
