"""Runs of a backtest whose labels come with their events.

Legend: B events of a batch.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from anabranch.commands.backtesting.training import BacktestTraining, batch_of
from ingest.events.block import Array
from learner.build import LearnerSpec
from learner.config import StrategySettings
from learner.evaluation.prequential import Prequential, Scored


@dataclass(frozen=True)
class BacktestPoint:
    """The score up to a number of events: accuracy for classification, absolute error for regression."""

    events: int
    recent: float
    """Over the window since the last change that ADWIN detected."""
    overall: float
    """Since the first event."""
    loss: float
    """Over its own window."""
    overall_loss: float
    """Since the first event."""


class Score:
    """The scores of a run over the events so far."""

    def __init__(self, *, regression: bool) -> None:
        self._sign = -1 if regression else 1
        self._measured, self._events = Prequential(bounded=not regression), 0
        self.points: list[BacktestPoint] = []
        """One for each batch that was scored."""

    def add(self, rows: int, scored: Scored | None) -> None:
        """Add the score of a batch of `rows` events, or None where the step was not finite."""
        measured, sign = self._measured, self._sign
        self._events += rows
        if scored is not None:
            measured.add(scored)
        if measured.mean is not None and measured.overall is not None:
            score, losses = (sign * measured.mean, sign * measured.overall), (measured.loss, measured.overall_loss)
            self.points.append(BacktestPoint(self._events, *score, *(loss or 0.0 for loss in losses)))


class BacktestRun(Protocol):
    """A model that is trained on the events of a file."""

    training: BacktestTraining
    score: Score

    def add(self, columns: Mapping[str, Array], held_out: Mapping[str, Array]) -> None:
        """Score and train on the next B labelled events, at most `learner.batch_size`, in their order.

        `held_out`: those among them that are held out, without columns if there are none.
        """
        ...


class LabelledRun:
    """A run in which the label of each event comes with it: the score is that of the step's own forward pass."""

    def __init__(self, training: BacktestTraining) -> None:
        self.training = training
        self.score = Score(regression=training.setup.schema.label.classes is None)

    def add(self, columns: Mapping[str, Array], held_out: Mapping[str, Array]) -> None:
        """Score the events, and train on them."""
        batch = batch_of(columns, held_out=held_out)
        rows = len(batch)
        step = self.training.take(batch)
        finite = step is not None and step.finite
        self.score.add(rows, Scored(step.rows, step.score, step.loss_new) if step is not None and finite else None)


def without_replay(spec: LearnerSpec) -> LearnerSpec:
    """Return the same settings with the strategy that replays nothing."""
    strategy = StrategySettings.model_validate({"name": "none"})
    return dataclasses.replace(spec, learner=spec.learner.model_copy(update={"strategy": strategy}))
