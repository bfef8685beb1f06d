"""Notices that the stream has changed, by the error on new events, and says what is to be done about it."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from learner.config import DriftSettings
from learner.evaluation.adwin import Adwin
from learner.evaluation.prequential import Scored

log = logging.getLogger(__name__)


class Drift:
    """Watches the error before training with ADWIN, and begins anew with each change that it finds.

    Only an error that rises is drift: one that falls is learning. Used by one thread; a function of what it is told.
    """

    def __init__(self, settings: DriftSettings, *, bounded: bool = True) -> None:
        self._settings = settings
        self._bounded = bounded
        self._window = self._fresh()
        self._left = 0
        self.count = 0
        """Drifts over the life of the pipeline."""
        self.step: int | None = None
        """The step that showed the newest one."""
        self.pending = False
        """Whether nothing has been done about that one yet."""

    def add(self, step: int, scored: Scored) -> bool:
        """Take up a step's new events, and return whether they show a drift; a score not finite says nothing."""
        if not self._settings.actions:
            return False
        self._left = max(0, self._left - 1)
        if not math.isfinite(scored.score):
            return False
        error = scored.rows - scored.score if self._bounded else -scored.score
        change = self._window.add(error, scored.rows)
        if not change:
            return False
        self._window = self._fresh()
        if change < 0:
            return False
        self.count, self.step, self.pending = self.count + 1, step, True
        log.warning("drift at step %d: the error on new events rose by %.3g", step, change)
        return True

    def respond(self) -> None:
        """Raise what is to be raised, from the next step on."""
        self.pending, self._left = False, self._settings.steps

    @property
    def checkpoints(self) -> bool:
        """Whether a drift is to begin a checkpoint before anything else changes."""
        return "checkpoint" in self._settings.actions

    @property
    def factors(self) -> tuple[float, float]:
        """Factors of the learning rate and of the replay ratio in the next step; 1 except for a while after a drift."""
        return (self.lr_factor, self.replay_factor) if self._left else (1.0, 1.0)

    @property
    def lr_factor(self) -> float:
        """What the learning rate is multiplied by in the next step; 1 but for a while after a drift."""
        return self._factor(self._settings.lr_factor) if "raise-lr" in self._settings.actions else 1.0

    @property
    def replay_factor(self) -> float:
        """What the replay ratio is multiplied by in the next step; 1 but for a while after a drift."""
        return self._factor(self._settings.replay_factor) if "raise-replay" in self._settings.actions else 1.0

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {
            "window": self._window.state(),
            "left": self._left,
            "count": self.count,
            "step": self.step,
            "pending": self.pending,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint."""
        self._window.restore(state["window"])
        self._left, self.count, self.step = state["left"], state["count"], state["step"]
        self.pending = state["pending"]

    def _factor(self, most: float) -> float:
        """Fall in a line from `most` to 1 over the steps after a drift."""
        return 1.0 + (most - 1.0) * self._left / self._settings.steps

    def _fresh(self) -> Adwin:
        return Adwin(self._settings.delta, bounded=self._bounded)
