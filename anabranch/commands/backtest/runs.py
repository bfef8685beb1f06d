"""Runs of a backtest whose labels come with their events.

Legend: B events of a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from anabranch.commands.backtest.batches import batch_of
from anabranch.commands.backtest.training import BacktestTraining
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Schema
from anabranch.learner.evaluate.baselines import Baselines
from anabranch.learner.evaluate.stream_monitor import Prequential, Scored
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.settings.strategies import StrategySettings


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


@dataclass(frozen=True)
class BacktestBaseline:
    """A rule that needs no features, on the same events and windows."""

    rule: str
    recent: float
    overall: float
    comparison: str
    """How the model compares in the recent window; empty where that is not known."""


class Score:
    """The scores of a run over the events so far."""

    def __init__(self, schema: Schema) -> None:
        regression = schema.label.classes is None
        self._sign = -1 if regression else 1
        self.baselines = Baselines(schema)
        self._measured = Prequential(bounded=not regression, baselines=len(self.baselines.names))
        self._events = 0
        self.points: list[BacktestPoint] = []
        """One for each batch that was scored."""

    def compared(self) -> list[BacktestBaseline]:
        """Return what the baselines have at the end."""
        found, score = [], self._measured.score
        for index, rule in enumerate(self.baselines.rules.values()):
            if windows := score.other_windows(index):
                recent, overall = self._sign * windows["now"], self._sign * windows["overall"]
                words, _ = self._measured.against(index, rule)
                found.append(BacktestBaseline(rule, recent, overall, words))
        return found

    def add(self, rows: int, scored: Scored | None) -> None:
        """Add the score of a batch of `rows` events, or None where the step was not finite."""
        self._events += rows
        if scored is not None:
            self._measured.add(scored)
        score, loss = self._measured.score, self._measured.loss
        if score.now is not None and score.overall is not None:
            now, overall = self._sign * score.now, self._sign * score.overall
            self.points.append(BacktestPoint(self._events, now, overall, loss.now or 0.0, loss.overall or 0.0))


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
        self.score = Score(training.setup.schema)

    def add(self, columns: Mapping[str, Array], held_out: Mapping[str, Array]) -> None:
        """Score the events, and train on them."""
        batch = batch_of(columns, held_out=held_out)
        rows = len(batch)
        step = self.training.take(batch)
        scored = None
        if step is not None and step.finite:
            baselines = self.score.baselines.add(batch.new["label"], batch.new["group_hash"])
            scored = Scored(step.rows, step.score, step.loss_new, baselines)
        self.score.add(rows, scored)


def without_replay(spec: PipelineSettings) -> PipelineSettings:
    """Return the same settings with the strategy that replays nothing."""
    strategy = StrategySettings.model_validate({"name": "none"})
    return spec.with_changes(learner=spec.learner.model_copy(update={"strategy": strategy}))
