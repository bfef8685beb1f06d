"""The health of a pipeline in one sentence, from the reports of learner and serving.

The sentence stays the same while nothing changes, since screen readers read out each change.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import msgspec

from anabranch.learner.status.report import FEWEST_COMPARED, LearnerReport, no_better
from anabranch.serving.reporting.report import ServingReport

SILENT = timedelta(seconds=10)
"""Reports are written about once a second; a process that writes none for this long hangs or has ended."""


class Health(msgspec.Struct, frozen=True):
    """The health of a pipeline; `attention` is healthy, and behind the stream or of little use."""

    state: Literal["well", "attention", "starting", "unhealthy"]
    sentence: str
    problems: list[str] = []
    """One sentence for each problem."""
    silent: bool = False
    """Whether the learner's figures are outdated."""


class ReportAge:
    """The age of the newest report of one process, for one reader that polls about once a second. Thread-safe.

    Measured by the reader's monotonic clock, so setting the wall clock has no effect. Only the age of the first report
    is measured by the wall clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self._last: tuple[float, float] | None = None

    def is_silent(self, report: LearnerReport | ServingReport) -> bool:
        """Return whether a process has not reported for so long that its figures are outdated."""
        last, now = self._last, self._clock()
        if last is None or last[0] != report.time:
            age = max(0.0, self._wall() - report.time) if last is None else 0.0
            self._last = last = report.time, now - age
        return now - last[1] >= SILENT.total_seconds()


_UNITS = (timedelta(days=1), "day"), (timedelta(hours=1), "hour"), (timedelta(minutes=1), "minute")
_BEHIND = timedelta(seconds=10)


def _behind(learner: LearnerReport, serving: ServingReport) -> list[str]:
    """Say how far what is served is behind the stream, in words that change once a minute at most."""
    reads_history = learner.backfill is not None and not learner.backfill.done
    freshness = 0.0 if reads_history else serving.freshness_p50_seconds or 0.0
    seconds = max(learner.lag_seconds, freshness)
    if seconds < _BEHIND.total_seconds():
        return []
    counts = ((int(seconds // unit.total_seconds()), name) for unit, name in _UNITS)
    found = (f"{count} {name}{'s' * (count > 1)}" for count, name in counts if count)
    return [f"What is served is {next(found, 'more than 10 seconds')} behind the stream."]


def _of_little_use(learner: LearnerReport) -> list[str]:
    """Say that the model is no better than one constant answer, on the events that judge it best.

    Where a measure decides besides the score, the score counts only where it is worse and not by chance.
    """
    constant, measure = learner.baselines.get("constant"), learner.measures.get(learner.measure)
    if learner.outcomes.get("trained", 0) < FEWEST_COMPARED:
        return []
    remarks = []
    if constant is not None:
        window = "old" if "old" in constant.scores else "now"
        if constant.worse:
            remarks.append(f"The model is worse than {constant.rule}.")
        elif measure is None and window in no_better(learner, constant):
            remarks.append(f"The model is no better than {constant.rule}.")
    window = "held_out" if measure is not None and "held_out" in measure.constant else "now"
    # One answer for all, the share of each class, is always calibrated, and still of no use.
    if measure is not None and learner.measure != "ece" and window in measure.constant:
        sign, rule = 1 if measure.higher else -1, "one answer for all events" if constant is None else constant.rule
        limit = measure.upper if measure.higher else measure.lower
        if sign * measure.value[window] <= sign * measure.constant[window]:
            how = "worse" if sign * limit[window] < sign * measure.constant[window] else "no better"
            remarks.append(f"By {learner.measure.replace('_', ' ')} the model is {how} than {rule}.")
    return remarks


def judge(learner: LearnerReport | None, serving: ServingReport, *, silent: bool) -> Health:
    """Return the health of the pipeline; `silent`: the learner does not report."""
    if learner is None and serving.server is None:
        return Health("starting", "No learner has reported yet: start one with anabranch up.")
    problems = [f"Learner: {sentence}" for sentence in (learner.problems if learner is not None else [])]
    if silent:
        problems.insert(0, "The learner does not report: it hangs, or has stopped.")
    if serving.version is None and not problems:
        return Health("starting", "The first version is on its way.")
    problems += [f"Serving: {sentence}" for sentence in serving.problems]
    if not problems and learner is not None and (remarks := [*_behind(learner, serving), *_of_little_use(learner)]):
        return Health("attention", " ".join(remarks))
    if not problems:
        warnings = len(serving.warnings) + (len(learner.warnings) if learner is not None else 0)
        counted = f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
        return Health("well", f"All is well{counted}.")
    return Health(
        "unhealthy", problems[0] if len(problems) == 1 else f"{len(problems)} things are wrong.", problems, silent
    )
