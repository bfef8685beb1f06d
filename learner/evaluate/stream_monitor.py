"""Measures the stream with each round: scores of new events and of baselines, drift, and how the learner responds.

Test-then-train: each step's predictions are those of a model that has not seen the events (Gama et al. 2013, "On
evaluating stream learning algorithms"). Drift is detected by the error on new events, and adjusts the learning rate and
the replay ratio of the next round.
"""

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.ingest.events.schema import Schema
from anabranch.learner.evaluate.adwin import Adwin
from anabranch.learner.evaluate.baselines import AgainstBaseline, Baselines, compare
from anabranch.learner.evaluate.outcomes import Predictions, StreamOutcomes, predictions_of
from anabranch.learner.evaluate.replay_ratio import ScoreSum, make_ratio
from anabranch.learner.model.task import Task
from anabranch.learner.settings.learner import DriftSettings, LearnerSettings

log = logging.getLogger(__name__)


class RunningMean:
    """A mean over a window without a change, and since the beginning of the stream. Used by one thread."""

    def __init__(self, *, bounded: bool, others: int = 0) -> None:
        """`others`: how many totals of the same rows are next to each, such as those of baselines."""
        self.window = Adwin(bounded=bounded, others=others)
        self.rows, self.total, self.others = 0, 0.0, [0.0] * others

    def add(self, total: float, rows: int, others: Sequence[float] = ()) -> None:
        """Add the total of some rows, and those next to it."""
        self.window.add(total, rows, others)
        self.rows += rows
        if self.rows == self.window.weight:  # the first values are bounded again once their size is known
            self.total, *self.others = self.window.totals
            return
        added, *extra = self.window.added
        self.total += added
        self.others = [one + other for one, other in zip(self.others, extra, strict=True)]

    @property
    def now(self) -> float | None:
        """The mean over the window; None before the first row."""
        return self.window.mean

    @property
    def overall(self) -> float | None:
        """The mean since the beginning of the stream, restarts included; None before the first row."""
        return self.total / self.rows if self.rows else None

    @property
    def windows(self) -> dict[str, float]:
        """Both means, by `now` and `overall`; empty before the first row."""
        return {} if self.now is None or self.overall is None else {"now": self.now, "overall": self.overall}

    def other_windows(self, index: int) -> dict[str, float]:
        """Both means of one of the totals next to it; empty before the first row."""
        if not self.rows:
            return {}
        return {"now": self.window.other_means[index], "overall": self.others[index] / self.rows}

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {"window": self.window.state(), "rows": self.rows, "total": self.total, "others": self.others}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.window.restore(state["window"])
        self.rows, self.total, self.others = state["rows"], state["total"], state["others"]


@dataclass(frozen=True)
class Scored:
    """New events of a step before training on them: how many, and the sums of their scores and losses.

    `baselines` has the sums of the scores of `Baselines` on the same events; empty where there are none.
    """

    rows: int
    score: float
    loss: float
    baselines: Sequence[float] = ()
    predictions: tuple[Predictions, ...] = field(default=(), compare=False, repr=False)
    """From which measures follow, as far as they are known."""

    @property
    def sums(self) -> tuple[int, float, float, list[float]]:
        """Rows, score, loss and those of baselines, as the constructor takes them."""
        return self.rows, self.score, self.loss, [*self.baselines]

    def __add__(self, other: "Scored") -> "Scored":
        pairs = itertools.zip_longest(self.baselines, other.baselines, fillvalue=0.0)
        both, predictions = [one + another for one, another in pairs], self.predictions + other.predictions
        return Scored(self.rows + other.rows, self.score + other.score, self.loss + other.loss, both, predictions)


NOT_SCORED = Scored(0, 0.0, 0.0)
"""No events."""


def scored(
    task: Task,
    outputs_B: NDArray[np.float32],
    label_B: NDArray[np.generic],
    group_B: NDArray[np.generic] | None = None,
) -> Scored:
    """Score predictions that were made when B events came by the labels that came later.

    Args:
        task: the meaning of the outputs.
        outputs_B: of the model, float32 `[B, ...]`.
        label_B: as in the schema's column.
        group_B: hashes of groups.
    """
    output, label = torch.from_numpy(outputs_B), torch.from_numpy(label_B)
    with torch.no_grad():
        score, loss = task.score(output, label).sum(), task.loss(output, label).sum()
    return Scored(len(label_B), score.item(), loss.item(), (), predictions_of(task, [output], label_B, group_B))


class Prequential:
    """Mean score and loss of new events before training on them, and the scores of baselines on the same events."""

    def __init__(self, *, bounded: bool = True, baselines: int = 0) -> None:
        """`baselines`: how many there are."""
        self._bounded = bounded
        self.score = RunningMean(bounded=bounded, others=baselines)
        self.loss = RunningMean(bounded=False)

    def add(self, scored: Scored) -> None:
        """Add a step's new events; a score that is not finite is ignored."""
        if math.isfinite(scored.score):
            self.score.add(scored.score, scored.rows, scored.baselines)
        # A strategy may leave out events that make the task's own loss of a step infinite.
        usual = (self.loss.now or 0.0) * scored.rows
        self.loss.add(scored.loss if math.isfinite(scored.loss) else usual, scored.rows)

    @property
    def window(self) -> int:
        """Events in the score's window."""
        return int(self.score.window.weight)

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {"score": self.score.state(), "loss": self.loss.state()}

    def against(self, index: int, rule: str) -> AgainstBaseline:
        """Compare the score with that of a baseline in the window; `rule`: what the baseline does."""
        window = self.score.window
        if window.mean is None:
            return AgainstBaseline("", worse=False)
        other, error = window.other_means[index], window.other_errors[index]
        return compare(rule, window.mean, other, error, bounded=self._bounded)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the windows of a checkpoint."""
        self.score.restore(state["score"])
        self.loss.restore(state["loss"])


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
        """Factors of learning rate and replay ratio in the next round; both 1 unless a drift was recent."""

    def add(self, step: int, scored: Scored, steps: int = 1) -> bool:
        """Add the scores of the new events of a round of steps, and return whether they show a drift.

        Called after each round, for whose steps the factors fall: also of one without a scored event, or with a score
        that is not finite, which are ignored.
        """
        if self._left:
            self._set_left(max(0, self._left - steps))
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
        """Apply the actions of the config from the next round on."""
        self.pending = False
        self._set_left(self._settings.steps)

    @property
    def checkpoints(self) -> bool:
        """Whether a checkpoint is written before the actions are applied."""
        return "checkpoint" in self._settings.actions

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
        """Set how many steps are left in which the actions apply: factors decrease linearly to 1 over these."""
        self._left, settings = steps, self._settings
        highest = {"raise-lr": settings.lr_factor, "raise-replay": settings.replay_factor}
        lr, replay = (most if how in settings.actions else 1.0 for how, most in highest.items())
        self.factors = 1.0 + (lr - 1.0) * steps / settings.steps, 1.0 + (replay - 1.0) * steps / settings.steps

    def _new_window(self) -> Adwin:
        return Adwin(self._settings.delta, bounded=self._bounded)


@dataclass(frozen=True)
class Adjustments:
    """Settings of the next round of steps.

    Attributes:
        lr_factor: the config's learning rate is multiplied by it.
        replay_ratio: old events for each new one.
        drifted: whether the round before showed a drift.
        checkpoint_first: whether a checkpoint is written before the learner responds to that drift.
    """

    lr_factor: float
    replay_ratio: float
    drifted: bool = False
    checkpoint_first: bool = False


class StreamMonitor:
    """Prequential score, drift and replay ratio, which all follow from the scores of a round. Used by one thread."""

    def __init__(self, settings: LearnerSettings, schema: Schema, *, keep_outputs: bool = False) -> None:
        """Start without measurements; `keep_outputs`: see `StreamOutcomes`."""
        self.bounded = bounded = schema.label.classes is not None
        """Whether scores are between 0 and 1, else they are negated errors."""
        self.baselines = Baselines(schema)
        self.prequential = Prequential(bounded=bounded, baselines=len(self.baselines.names))
        self.outcomes = StreamOutcomes(keep=keep_outputs)
        self.drift = Drift(settings.drift, bounded=bounded)
        self.ratio = make_ratio(settings, bounded=bounded)
        self.measures = settings.replay_ratio == "auto"
        """Whether the replay ratio follows from measurements, which some steps make."""
        self.adjusts = self.measures or not {"mark"}.issuperset(settings.drift.actions)
        """Whether the settings of a round depend on the scores of those before."""
        self.adjustments = self._adjustments()
        """Settings of the next round."""
        self._warned = False

    def observe(self, step: int, new: Scored, old: ScoreSum | None, steps: int = 1) -> Adjustments:
        """Return the settings of the next round.

        Args:
            step: the number of the last step of the round that has ended.
            new: scores of its new events before training; none where no label is known yet.
            old: scores of the old events that its steps probed, if one did.
            steps: how many it had.
        """
        if new.rows:
            self._measure(step, new, old, steps)
        self.adjustments = self._adjustments(drifted=self.drift.add(step, new, steps))
        return self.adjustments

    def _measure(self, step: int, new: Scored, old: ScoreSum | None, steps: int) -> None:
        self.prequential.add(new)
        self.outcomes.add(new.predictions)
        if math.isfinite(new.score):
            if self.measures:
                self.ratio.observe(ScoreSum(new.rows, new.score), old, steps)
        elif not self._warned:
            self._warned = True
            log.warning(
                "step %d: the task's score of its events is %s; scores that are not finite are left out of what is "
                "measured, and not logged again",
                step,
                new.score,
            )

    def respond(self) -> None:
        """Respond to the last drift: from the next round on the settings are raised, as the config says."""
        self.drift.respond()
        self.adjustments = self._adjustments()

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            "prequential": self.prequential.state(),
            "drift": self.drift.state(),
            "ratio": self.ratio.state(),
            "baselines": self.baselines.state(),
            "outcomes": self.outcomes.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.prequential.restore(state["prequential"])
        self.drift.restore(state["drift"])
        self.ratio.restore(state["ratio"])
        self.baselines.restore(state["baselines"])
        self.outcomes.restore(state["outcomes"])
        self.adjustments = self._adjustments()

    def _adjustments(self, *, drifted: bool = False) -> Adjustments:
        lr_factor, replay_factor = self.drift.factors
        first = drifted and self.drift.checkpoints
        return Adjustments(lr_factor, self.ratio.now * replay_factor, drifted, first)
