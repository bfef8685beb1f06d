"""Detects drift of the stream by the error on new events, and raises the learning rate and replay ratio after it."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from learner.config import DriftSettings
from learner.evaluation.adwin import Adwin
from learner.evaluation.prequential import Scored

log = logging.getLogger(__name__)


class Drift:
    """Monitors the error before training with ADWIN, and starts a new window after each change.

    Only a rising error is drift: a falling one is learning. The result depends only on the added scores. Used by one
    thread.
    """

    def __init__(self, settings: DriftSettings, *, bounded: bool = True) -> None:
        self._settings = settings
        self._bounded = bounded
        self.acts = bool(settings.actions)
        """Whether anything is done after a drift; if not, none is detected."""
        self._window = self._new_window()
        self._left = 0
        self.count = 0
        """Drifts over the life of the pipeline."""
        self.step: int | None = None
        """The step at which the newest one was detected."""
        self.pending = False
        """Whether the newest one still waits for `respond`."""
        self.factors = (1.0, 1.0)
        """Factors of learning rate and replay ratio in the next step; both 1 unless a drift was recent."""

    def add(self, step: int, scored: Scored) -> bool:
        """Add the scores of a step's new events, and return whether they show a drift.

        Called after each step, for which the factors fall: also of one without a scored event, or with a score that is
        not finite, which are ignored.
        """
        if self._left:
            self._set_left(self._left - 1)
        if not self.acts or not scored.rows or not math.isfinite(scored.score):
            return False
        error = scored.rows - scored.score if self._bounded else -scored.score
        change = self._window.add(error, scored.rows)
        if not change:
            return False
        self._window = self._new_window()
        if change < 0:
            return False
        self.count, self.step, self.pending = self.count + 1, step, True
        log.warning("drift at step %d: the error on new events rose by %.3g", step, change)
        return True

    def respond(self) -> None:
        """Apply the actions of the config from the next step on."""
        self.pending = False
        self._set_left(self._settings.steps)

    @property
    def checkpoints(self) -> bool:
        """Whether a checkpoint is written before the actions are applied."""
        return "checkpoint" in self._settings.actions

    @property
    def lr_factor(self) -> float:
        """Factor of the learning rate in the next step; 1 unless a drift was recent."""
        return self._factor(self._settings.lr_factor) if "raise-lr" in self._settings.actions else 1.0

    @property
    def replay_factor(self) -> float:
        """Factor of the replay ratio in the next step; 1 unless a drift was recent."""
        return self._factor(self._settings.replay_factor) if "raise-replay" in self._settings.actions else 1.0

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            "window": self._window.state(),
            "left": self._left,
            "count": self.count,
            "step": self.step,
            "pending": self.pending,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._window.restore(state["window"])
        self.count, self.step, self.pending = state["count"], state["step"], state["pending"]
        self._set_left(state["left"])

    def _set_left(self, steps: int) -> None:
        """Set how many steps are left in which the actions apply."""
        self._left = steps
        self.factors = (self.lr_factor, self.replay_factor) if steps else (1.0, 1.0)

    def _factor(self, max_factor: float) -> float:
        """Return a factor that decreases linearly from `max_factor` to 1 over the steps after a drift."""
        return 1.0 + (max_factor - 1.0) * self._left / self._settings.steps

    def _new_window(self) -> Adwin:
        return Adwin(self._settings.delta, bounded=self._bounded)
