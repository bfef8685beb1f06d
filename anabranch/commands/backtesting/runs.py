"""Runs of a backtest whose labels come with their events.

Legend: B events of a batch.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from anabranch.commands.backtesting.reservoir import UniformSample
from ingest.events.block import Array
from learner.build import LearnerSpec, build_training_setup
from learner.config import StrategySettings
from learner.evaluation.prequential import Prequential, Scored
from learner.strategies.examples import Examples
from learner.training.step_result import StepResult
from learner.training.trainer import Trainer


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


class BacktestRun(Protocol):
    """A model that is trained on the events of a file."""

    points: list[BacktestPoint]
    """One for each batch that was scored."""

    def add(self, columns: Mapping[str, Array]) -> None:
        """Score and train on the next B labelled events, at most `learner.batch_size`, in their order."""
        ...


class ReplayedTraining:
    """A trainer and its score, with replay of a uniform sample in memory."""

    def __init__(self, spec: LearnerSpec, device: torch.device) -> None:
        """Build the model; each with the same seed starts from the same weights."""
        self.setup = build_training_setup(spec, device)
        self.trainer = Trainer(**self.setup.arguments)
        self.regression = self.setup.schema.label.classes is None
        self._measured, self._events = Prequential(bounded=not self.regression), 0
        self._replayed = UniformSample(spec.seed) if self.setup.strategy.replays else None
        ratio = spec.learner.replay_ratio
        self._ratio = 1.0 if ratio == "auto" else ratio
        self.points: list[BacktestPoint] = []

    def step(self, new: Examples) -> StepResult:
        """Train on events, and on those that are sampled for them."""
        counts = self.setup.strategy.samples(round(self._ratio * len(new)))
        return self.trainer.step(new, self._replayed.sample(counts) if self._replayed is not None else ())

    def store(self, new: Examples, output_B: torch.Tensor | None) -> None:
        """Hold events for replay, with the model's output for them if the strategy keeps it."""
        if self._replayed is not None:
            kept = output_B if self.setup.strategy.keeps_output else None
            self._replayed.add(dataclasses.replace(new, output_B=kept))

    def measure(self, rows: int, scored: Scored | None) -> None:
        """Add the score of a batch of `rows` events, or None where the step was not finite."""
        measured, sign = self._measured, -1 if self.regression else 1
        self._events += rows
        if scored is not None:
            measured.add(scored)
        if measured.mean is not None and measured.overall is not None:
            score, losses = (sign * measured.mean, sign * measured.overall), (measured.loss, measured.overall_loss)
            self.points.append(BacktestPoint(self._events, *score, *(loss or 0.0 for loss in losses)))


class LabelledRun:
    """A run in which the label of each event comes with it: the score is that of the step's own forward pass."""

    def __init__(self, spec: LearnerSpec, device: torch.device) -> None:
        self._training = ReplayedTraining(spec, device)
        self.points = self._training.points

    def add(self, columns: Mapping[str, Array]) -> None:
        """Score the events, then train on them and hold them for replay."""
        training = self._training
        new = training.trainer.examples(columns)
        step = training.step(new)
        training.store(new, step.output_B)
        training.measure(len(new), Scored(len(new), step.score, step.loss_new) if step.finite else None)


def without_replay(spec: LearnerSpec) -> LearnerSpec:
    """Return the same settings with the strategy that replays nothing."""
    strategy = StrategySettings.model_validate({"name": "none"})
    return dataclasses.replace(spec, learner=spec.learner.model_copy(update={"strategy": strategy}))
