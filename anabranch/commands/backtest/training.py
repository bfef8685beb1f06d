"""The learner's own step and store, on batches of a caller.

Legend: B events of a batch.
"""

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from torch import Tensor

from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.events.partition import TopicPartition
from anabranch.learner.device.out_of_memory import MemoryRetry
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.stream_monitor import StreamMonitor
from anabranch.learner.loop.learning_step import LearningStep
from anabranch.learner.loop.loop_state import StepState
from anabranch.learner.loop.replay_feed import make_feed
from anabranch.learner.loop.stored_events import build_pipeline_store
from anabranch.learner.model.rng import GeneratorStates
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.stream.batch import Batch
from anabranch.learner.stream.ledger import Ledger
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.step_result import StepResult
from anabranch.learner.train.trainer import Trainer
from anabranch.replay.background_store import BackgroundStore
from anabranch.replay.metrics import ReplayMetrics
from anabranch.replay.snapshot import StoreSnapshot


class BacktestTraining:
    """A model that takes the steps of a learner: with its store, replay ratio, features and drift. One thread.

    There are no checkpoints, and no lag: a file does not grow.
    """

    def __init__(
        self,
        spec: PipelineSettings,
        setup: TrainingSetup,
        name: str,
        stack: contextlib.ExitStack,
        contents: StoreSnapshot | None = None,
    ) -> None:
        """Build it; with the same seed each starts from the same weights.

        Args:
            spec: all settings.
            setup: what it trains with.
            name: of the file, for logs.
            stack: closes the store.
            contents: of the store; None: it starts empty. Otherwise `restore` is called before the first step.
        """
        self.setup, device = setup, setup.device
        self.trainer = Trainer(setup)
        self.spec, self.batch_size = spec, spec.learner.batch_size
        registry = CollectorRegistry()
        metrics, timer = LearnerMetrics(registry), ReplayMetrics(registry).sample
        self._names = [TopicPartition(name, 0)]
        self.state = state = StepState(Ledger())
        state.ledger.add_partition(self._names[0], 0)
        self.store: BackgroundStore | None = None
        """The stored events; None where the strategy replays none."""
        if setup.strategy.kind.replays:
            kept = build_pipeline_store(spec, setup, 1, _secret(spec), contents=contents, in_memory=True)
            self.store = BackgroundStore(kept, in_background=device.type != "mps")
            stack.callback(self.store.close)
        self._holdout = HoldoutSet(setup.schema, spec.gate.holdout_rows, _secret(spec).number("held-out events"))
        self.monitor = monitor = StreamMonitor(spec.learner, setup.schema, keep_outputs=spec.task.learns)
        self.replay = replay = make_feed(self.store, spec.learner, 1, monitor, self._holdout, self.trainer, timer)
        memory = MemoryRetry(device, threading.Event())
        self.step = LearningStep(self.trainer, monitor, replay, self._holdout, [replay.raised], state, metrics, memory)
        if contents is None:
            replay.prefetch(0)
        self._generators = GeneratorStates(device)

    def take(self, batch: Batch) -> StepResult | None:
        """Take a step, as `LearningStep.take` does: with the random numbers that it would have if it were alone."""
        self._generators.restore()
        taken = self.step.take(batch, self._names)
        if batch.held_out:
            self._holdout.add(batch.held_out, self._names)
        self.step.raising_events.clean_holdout()
        self._generators = GeneratorStates(self.trainer.device)
        return taken[0].result if taken else None

    def capture(self) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
        """Return a copy of all state but the store's, between two steps: tensors by part, and plain values."""
        self._generators.restore()
        tensors = self.trainer.tensors()
        tensors["rng"], rng = self.trainer.generators()
        rows = self.state.rows_new, self.state.rows_replay
        parts = {"monitor": self.monitor.state(), "replay_feed": self.replay.state(), **self.replay.output_shapes}
        return tensors, {"trainer": self.trainer.state(), "rng": rng, "rows": rows, **parts}

    def restore(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Restore what `capture` returned after a step, before the first one.

        Raises:
            CheckpointError: it does not fit the model, the optimizer or the strategy.
        """
        self.trainer.restore(tensors, state["trainer"])
        self.monitor.restore(state["monitor"])
        self.replay.restore(state["replay_feed"])
        self.state.steps, (self.state.rows_new, self.state.rows_replay) = step, state["rows"]
        self.trainer.restore_generators(tensors["rng"], state["rng"])
        self._generators = GeneratorStates(self.trainer.device)
        self.replay.prefetch(self.state.steps)

    @property
    def problem(self) -> str | None:
        """One sentence where the model raises, or its steps are not finite."""
        return self.step.raising_events.problem or self.step.non_finite.problem


def _secret(spec: PipelineSettings) -> StreamSecret:
    """Return the secret of the seed: a file has no senders who must not know it, and equal runs are to be equal."""
    return StreamSecret.fixed(spec.seed)
