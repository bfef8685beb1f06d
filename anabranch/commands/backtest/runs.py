"""Runs of a backtest whose labels come with their events.

Legend: B events of a batch.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from anabranch.commands.backtest.batches import batch_of
from anabranch.commands.backtest.training import BacktestTraining
from anabranch.ingest.events.block import Array
from anabranch.learner.evaluate.outcomes import TaskMeasures
from anabranch.learner.evaluate.stream_monitor import StreamMonitor
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.settings.strategies import StrategySettings
from anabranch.learner.strategies.early_negatives import ImportanceWeights
from anabranch.learner.train.build import build_training_setup


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
    constant_recent: float | None
    """What always answering the most frequent class, or the mean, has on the same events; None where a label is neither
    one class nor one number."""
    constant_overall: float | None


@dataclass(frozen=True)
class BacktestBaseline:
    """A rule that needs no features, on the same events and windows."""

    rule: str
    recent: float
    overall: float
    comparison: str
    """How the model compares in the recent window; empty where that is not known."""


@dataclass(frozen=True)
class BacktestMeasure:
    """A measure of the task at the end, with the limits of its 95 % interval."""

    name: str
    window: str
    """As of the stream: `now`, the newest 5,000 events, or `faded`."""
    events: int
    value: float
    lower: float
    upper: float
    constant: float
    """What one answer for all these events has at best."""


class Score:
    """The scores of a run over the events so far."""

    def __init__(self, training: BacktestTraining, monitor: StreamMonitor) -> None:
        """`monitor` measures the events of the run. Raises SettingsError where the task has no measure of that name."""
        setup, named = training.setup, training.spec.gate.measures
        self._sign = 1 if monitor.bounded else -1
        self.monitor = monitor
        self._measures = TaskMeasures.of(setup.task, setup.schema, () if named == "auto" else named)
        self._events = 0
        self.points: list[BacktestPoint] = []
        """One for each batch that was scored."""

    def compared(self) -> list[BacktestBaseline]:
        """Return what the baselines have at the end."""
        found, measured = [], self.monitor.prequential
        for index, rule in enumerate(self.monitor.baselines.rules.values()):
            if windows := measured.score.other_windows(index):
                recent, overall = self._sign * windows["now"], self._sign * windows["overall"]
                words, _ = measured.against(index, rule)
                found.append(BacktestBaseline(rule, recent, overall, words))
        return found

    def measures(self) -> list[BacktestMeasure]:
        """Return the measures of the task at the end, those of each window together."""
        windows = ("now", "faded") if self._measures.kind == "two-classes" else ("now",)
        each = [(name, window, measure) for window in windows for name, measure in self._measures.each.items()]
        found = [(name, window, self.monitor.outcomes.estimate(window, measure)) for name, window, measure in each]
        return [
            BacktestMeasure(name, window, known.rows, known.value, known.low, known.high, known.constant)
            for name, window, known in found
            if known is not None
        ]

    def add(self, rows: int) -> None:
        """Add a point after `rows` more events."""
        self._events += rows
        score, loss = self.monitor.prequential.score, self.monitor.prequential.loss
        if score.now is not None and score.overall is not None:
            now, overall = self._sign * score.now, self._sign * score.overall
            others = score.other_windows(0) if self.monitor.baselines.names else {}
            constants = [self._sign * others[name] if others else None for name in ("now", "overall")]
            point = BacktestPoint(self._events, now, overall, loss.now or 0.0, loss.overall or 0.0, *constants)
            self.points.append(point)


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
        self.score = Score(training, training.monitor)

    def add(self, columns: Mapping[str, Array], held_out: Mapping[str, Array]) -> None:
        """Score the events, and train on them."""
        batch = batch_of(columns, held_out=held_out)
        rows = len(batch)
        self.training.take(batch)
        self.score.add(rows)


def training_of(
    spec: PipelineSettings, device: torch.device, name: str, stack: contextlib.ExitStack
) -> BacktestTraining:
    """Return the training of a run of all settings; `name`: of the file, for logs; `stack`: closes the store."""
    # Whatever `[stream.labels]` says, a run may train on events before their label comes.
    setup = replace(build_training_setup(spec, device), loss_wrappers=[ImportanceWeights()])
    return BacktestTraining(spec, setup, name, stack)


def without_replay(spec: PipelineSettings) -> PipelineSettings:
    """Return the same settings with the strategy that replays nothing."""
    strategy = StrategySettings.model_validate({"name": "none"})
    return spec.with_changes(learner=spec.learner.model_copy(update={"strategy": strategy}))
