"""The learner's own step and store, on the events of a file.

Legend: B events of a batch.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from anabranch.core.stream_secret import StreamSecret
from ingest.events.block import IDENTITY_COLUMNS, Array
from ingest.events.partition import TopicPartition
from learner.adaptation.stream_monitor import StreamMonitor
from learner.build import LearnerSpec, TrainingSetup, build_training_setup
from learner.evaluation.holdout import HoldoutSet
from learner.loop_parts.learning_step import LearningStep
from learner.loop_parts.loop_state import StepState
from learner.loop_parts.raising_events import RaisingEvents
from learner.metrics import LearnerMetrics
from learner.model.rng import GeneratorStates
from learner.replay_feed import make_feed
from learner.resume import most_added
from learner.strategies.examples import output_fields
from learner.stream.batch import Batch, Span
from learner.stream.ledger import Ledger
from learner.training.out_of_memory import MemoryRetry
from learner.training.step_result import StepResult
from learner.training.trainer import Trainer
from replay.background_store import BackgroundStore
from replay.build import build_store, store_size
from replay.config import ReplaySettings
from replay.metrics import ReplayMetrics
from replay.row_layout import Fields, RowLayout
from replay.store import Store


class BacktestTraining:
    """A model that takes the steps of a learner: with its store, replay ratio, features and drift. One thread.

    There are no checkpoints, and no lag: a file does not grow.
    """

    def __init__(self, spec: LearnerSpec, device: torch.device, name: str, stack: contextlib.ExitStack) -> None:
        """Build it; with the same seed each starts from the same weights.

        Args:
            spec: all settings.
            device: of the model.
            name: of the file, for logs.
            stack: closes the store.
        """
        self.setup = setup = build_training_setup(spec, device)
        self.trainer = Trainer(**setup.arguments)
        self.batch_size = spec.learner.batch_size
        bounded = setup.schema.label.classes is not None
        registry = CollectorRegistry()
        metrics, timer = LearnerMetrics(registry), ReplayMetrics(registry).sample
        self._names = [TopicPartition(name, 0)]
        ledger = Ledger()
        ledger.add_partition(self._names[0], 0)
        state = StepState(ledger)
        store: BackgroundStore | None = None
        if setup.strategy.replays:
            store = BackgroundStore(_store(spec, setup), in_background=device.type != "mps")
            stack.callback(store.close)
        self._holdout = HoldoutSet(setup.schema, spec.gate.holdout_rows, _secret(spec).number("held-out events"))
        monitor = StreamMonitor(spec.learner, bounded=bounded)
        replay = make_feed(store, spec.learner, 1, monitor, self._holdout, self.trainer, timer)
        self._raising = RaisingEvents(state, replay, self._holdout, [replay.raised], metrics.raised)
        memory = MemoryRetry(device, threading.Event())
        self.step = LearningStep(self.trainer, monitor, replay, self._raising, state, metrics, memory)
        replay.prefetch(0)
        self._generators = GeneratorStates(device)

    def take(self, batch: Batch) -> StepResult | None:
        """Take a step, as `LearningStep.take` does: with the random numbers that it would have if it were alone."""
        self._generators.restore()
        result = self.step.take(batch, self._names)
        if batch.held_out:
            self._holdout.add(batch.held_out, self._names)
        self._raising.clean_holdout()
        self._generators = GeneratorStates(self.trainer.device)
        return result

    @property
    def problem(self) -> str | None:
        """One sentence where the model raises, or its steps are not finite."""
        return self._raising.problem or self.step.non_finite.problem


def batch_of(
    new: Mapping[str, Array],
    stored_only: Mapping[str, Array] | None = None,
    held_out: Mapping[str, Array] | None = None,
) -> Batch:
    """Return the batch of a step on the columns of B events."""
    spans = []
    if new:
        identity = {name: new[name].copy() for name in IDENTITY_COLUMNS}
        spans.append(Span(identity, np.ones(len(new["offset"]), np.bool_), {}, {}, {}, {}))
    return Batch(dict(new), dict(stored_only or {}), dict(held_out or {}), spans)


class Numbering:
    """Gives the events of a file the columns that blocks of a stream have."""

    def __init__(self) -> None:
        self._next = 0

    def add(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Return the columns of the next B events with their number, and the time of `[schema.time]` or else 0."""
        rows = len(columns["label"])
        identity = {name: np.zeros(rows, dtype) for name, dtype in IDENTITY_COLUMNS.items()}
        identity["offset"] = np.arange(self._next, self._next + rows)
        if "time" in columns:
            identity["time_ms"] = (columns["time"].astype(np.float64) * 1000).astype(np.int64)
        self._next += rows
        return {**identity, **columns}


def rows_of(columns: Mapping[str, Array], rows: NDArray[np.bool_]) -> dict[str, Array]:
    """Return the selected events, bool `[B]`; no columns where there are none."""
    return {name: column[rows] for name, column in columns.items()} if rows.any() else {}


def _secret(spec: LearnerSpec) -> StreamSecret:
    """Return the secret of the seed: a file has no senders who must not know it, and equal runs are to be equal."""
    return StreamSecret.fixed(spec.seed)


def _store(spec: LearnerSpec, setup: TrainingSetup) -> Store:
    """Return the pipeline's store, of as many events, in memory alone."""
    extra, step = output_fields(setup.kept_outputs), most_added(spec.learner, spec.stream, 1)
    return build_store(
        _in_memory(spec.replay, {**setup.schema.payload(), **extra}, step),
        setup.schema,
        setup.device,
        _secret(spec).number("replay"),
        extra=extra,
        dim=setup.embedding.captured().shape[1] if setup.embedding is not None else None,
        step=step,
    )


def _in_memory(settings: ReplaySettings, fields: Fields, step: int) -> ReplaySettings:
    """Return settings of a store with the same events and no slower tier: which tier has a row changes no step."""
    if not settings.slower:
        return settings
    row_bytes = RowLayout(fields).row_bytes
    events, slots = store_size(settings, row_bytes, step)
    only = {"disk": None, "redis": None, "capacity": events, "device_memory": "host"}
    return settings.model_copy(update={**only, "device_bytes": slots * row_bytes})


def without_teacher(spec: LearnerSpec) -> LearnerSpec:
    """Return the same settings without a teacher, which a file cannot ask."""
    return dataclasses.replace(spec, model=spec.model.model_copy(update={"teacher": None}))
