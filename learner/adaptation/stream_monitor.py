"""Measures the stream with each step, and adjusts the learning rate and the replay ratio of the next one."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from learner.adaptation.drift import Drift
from learner.adaptation.replay_ratio import ScoreSum, make_ratio
from learner.config import LearnerSettings
from learner.evaluation.prequential import Prequential, Scored
from learner.evaluation.simplest_rule import SimplestRule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adjustments:
    """Settings of the next step.

    Attributes:
        lr_factor: the config's learning rate is multiplied by it.
        replay_ratio: old events for each new one.
        drifted: whether the step before showed a drift.
        checkpoint_first: whether a checkpoint is written before the learner responds to that drift.
    """

    lr_factor: float
    replay_ratio: float
    drifted: bool = False
    checkpoint_first: bool = False


class StreamMonitor:
    """Prequential score, drift and replay ratio, which all follow from the scores of a step. Used by one thread."""

    def __init__(self, settings: LearnerSettings, *, bounded: bool = True) -> None:
        """Start without measurements; `bounded`: whether the task's scores are between 0 and 1."""
        self.prequential = Prequential(bounded=bounded)
        self.simplest = SimplestRule(bounded=bounded)
        self.drift = Drift(settings.drift, bounded=bounded)
        self.ratio = make_ratio(settings, bounded=bounded)
        self.measures = settings.replay_ratio == "auto"
        """Whether the replay ratio follows from measurements, which some steps make."""
        self.adjustments = self._adjustments()
        """Settings of the next step."""
        self._warned = False

    def observe(self, step: int, new: Scored, old: ScoreSum | None) -> Adjustments:
        """Return the settings of the next step.

        Args:
            step: the number of the step that has ended.
            new: scores of its new events before training; none where no label is known yet.
            old: scores of the old events that it probed, if it did.
        """
        if new.rows:
            self._measure(step, new, old)
        self.adjustments = self._adjustments(drifted=self.drift.add(step, new))
        return self.adjustments

    def _measure(self, step: int, new: Scored, old: ScoreSum | None) -> None:
        self.prequential.add(new)
        if math.isfinite(new.score):
            if self.measures:
                self.ratio.observe(ScoreSum(new.rows, new.score), old)
        elif not self._warned:
            self._warned = True
            log.warning(
                "step %d: the task's score of its events is %s; scores that are not finite are left out of what is "
                "measured, and not logged again",
                *(step, new.score),
            )

    def respond(self) -> None:
        """Respond to the last drift: from the next step on the settings are raised, as the config says."""
        self.drift.respond()
        self.adjustments = self._adjustments()

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            "prequential": self.prequential.state(),
            "drift": self.drift.state(),
            "ratio": self.ratio.state(),
            "simplest": self.simplest.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.prequential.restore(state["prequential"])
        self.drift.restore(state["drift"])
        self.ratio.restore(state["ratio"])
        self.simplest.restore(state["simplest"])
        self.adjustments = self._adjustments()

    def _adjustments(self, *, drifted: bool = False) -> Adjustments:
        lr_factor, replay_factor = self.drift.factors
        first = drifted and self.drift.checkpoints
        return Adjustments(lr_factor, self.ratio.now * replay_factor, drifted, first)
