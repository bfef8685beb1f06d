"""One sentence on how a pipeline does, from what its parts say of themselves.

A sentence stays the same while nothing changes, since screen readers say each change.
"""

from datetime import timedelta
from typing import Literal

import msgspec

from learner.report import LearnerReport
from serving.report import ServingReport

SILENT = timedelta(seconds=10)
"""Reports are written about once a second; a part that has written none for so long hangs or is gone."""


class Health(msgspec.Struct, frozen=True):
    """The judgement."""

    state: Literal["well", "starting", "ill"]
    sentence: str
    ill: list[str] = []
    """One sentence for each thing that is wrong."""
    silent: bool = False
    """Whether the learner's figures are no longer those of now."""


def is_silent(report: LearnerReport, now: float) -> bool:
    """Whether a learner has not reported for so long that its figures are no longer those of now."""
    return now - report.time >= SILENT.total_seconds()


def judge(learner: LearnerReport | None, serving: ServingReport, now: float) -> Health:
    """Return how the pipeline does."""
    if learner is None:
        return Health("starting", "No learner has reported yet: start one with anabranch up.")
    ill = [f"Learner: {sentence}" for sentence in learner.ill]
    silent = is_silent(learner, now)
    if silent:
        ill.insert(0, "The learner does not report: it hangs, or has stopped.")
    if serving.version is None and not ill:
        return Health("starting", "The first version is on its way.")
    ill += [f"Serving: {sentence}" for sentence in serving.ill]
    if not ill:
        return Health("well", "All is well.")
    return Health("ill", ill[0] if len(ill) == 1 else f"{len(ill)} things are wrong.", ill, silent)
