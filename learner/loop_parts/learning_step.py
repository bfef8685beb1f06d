"""One step of learning: replay, test, train, learn features, respond to a drift, store.

Whatever learns as a pipeline does takes its steps here: the loop with the events of a stream, a backtest with those of
a file.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from ingest.events.block import Array
from ingest.events.partition import TopicPartition
from learner.adaptation.stream_monitor import StreamMonitor
from learner.evaluation.prequential import Scored
from learner.loop_parts.loop_state import StepState
from learner.loop_parts.non_finite import NonFiniteSteps
from learner.loop_parts.raising_events import RaisingEvents
from learner.loop_parts.value_watch import ValueWatch
from learner.metrics import LearnerMetrics
from learner.model.faulty_events import RaisingEventsError
from learner.model.features.learned import features_of
from learner.replay_feed import NOTHING, Replay, ReplayFeed
from learner.strategies.examples import TEACHER, Examples
from learner.stream.batch import Batch
from learner.training.out_of_memory import MemoryRetry
from learner.training.step_result import StepResult
from learner.training.trainer import Trainer

_T = TypeVar("_T")


class LearningStep:
    """Takes the steps of a learner. Used by one thread."""

    def __init__(
        self,
        trainer: Trainer,
        monitor: StreamMonitor,
        replay: ReplayFeed,
        raising_events: RaisingEvents,
        state: StepState,
        metrics: LearnerMetrics,
        memory: MemoryRetry,
    ) -> None:
        """Take what a step uses; `state` and `metrics` count the steps and their events."""
        self._trainer = trainer
        self._monitor = monitor
        self._replay = replay
        self._raising_events = raising_events
        self._raised = raising_events.raised
        self._state = state
        self._metrics = metrics
        self._trained_new, self._trained_old = (metrics.rows.labels(source) for source in ("new", "replay"))
        self._lr_factor = 1.0
        self.non_finite = NonFiniteSteps(metrics.non_finite)
        learned = features_of(trainer.model)
        self.values = ValueWatch(() if learned is None else learned.numbers)
        self.memory = memory
        self.copied: Callable[[Mapping[str, Array]], Examples] = trainer.examples
        """Returns the new events of a batch on the device."""
        self.scored: Callable[[Batch, StepResult], Scored] = _scored
        """Returns the scores of the events of a batch that have their label, from before the step."""
        self.labels: Callable[[Batch], Array] = _labels
        """Returns the labels of these events."""
        self.request_checkpoint: Callable[[], object] | None = None
        """Requests the checkpoint that is written before the response to a drift; None: there are no checkpoints."""

    def take(self, batch: Batch, names: Sequence[TopicPartition]) -> StepResult | None:
        """Learn the new events of a batch, and add its events to the store.

        1. Sample the old events that were chosen some steps before: no event is replayed in the step that trains on it.
        2. Test, then train, then learn features from the new events. A step that is not finite leaves all as it was;
           events on which the model raises are skipped, and the others trained on.
        3. Measure the step, and respond to a drift.
        4. Add the events to the store: after the step, and only if they were trained on. Choose those of a later step.

        Args:
            batch: its events; those on which the model raises leave it.
            names: of the partitions that its column `partition` points into.

        Returns:
            The result; None if there was nothing to train on, or the model raised on all new events.
        """
        replay, result = NOTHING, None
        if batch.new:
            begin, rows = time.perf_counter(), len(batch.new["offset"])
            replay = self.fitting(partial(self._replay.sample, self._state.steps, rows))
            replay, result = self._train(batch, replay)
            self._observe(batch, replay, result, names, time.perf_counter() - begin)
        step = self._state.steps
        self.fitting(lambda: self._replay.add(step, batch, replay, result, names), undone=False)
        return result

    def fitting(self, work: Callable[[], _T], *, repeatable: bool = True, undone: bool = True) -> _T:
        """Return the result of `work`, which `MemoryRetry` repeats where it runs out of memory.

        The first attempt is made here: in `MemoryRetry` a step would hop between modules seven times more.
        """
        try:
            return work()
        except Exception as exc:
            if (message := self.memory.shortage(exc, repeatable=repeatable, undone=undone)) is None:
                raise
        return self.memory(work, repeatable=repeatable, undone=undone, message=message)

    def respond(self) -> None:
        """Respond to a drift."""
        self._trainer.on_drift()
        self._monitor.respond()

    def _train(self, batch: Batch, replay: Replay) -> tuple[Replay, StepResult | None]:
        """Step without the events on which the model raises, as if they had not come.

        Returns:
            The remaining old events, and the result; None if the model raised on all new events, which leave the batch.
        """
        trainer = self._trainer
        if (factor := self._monitor.adjustments.lr_factor) != self._lr_factor:
            trainer.scale_learning_rate(factor)
            self._lr_factor = factor
        while batch.new:
            try:
                new = self.fitting(partial(self.copied, batch.new))
                step = partial(trainer.step, new, replay.examples, batch.new)
                return replay, self.fitting(step, repeatable=False)
            except RaisingEventsError as exc:
                error = exc
            replay = self._raising_events.remove(batch, replay, error)
        return replay, None

    def _observe(
        self,
        batch: Batch,
        replay: Replay,
        result: StepResult | None,
        names: Sequence[TopicPartition],
        seconds: float,
    ) -> None:
        """Count a step that took `seconds`, measure it where it is finite, and respond where it shows a drift."""
        state = self._state
        state.steps += 1
        self._metrics.steps.inc()
        self._metrics.step.observe(seconds)
        if result is None:
            self._raised.steps_in_a_row += 1
            return
        self.values.observe(batch.new, names)
        if not result.finite:
            self.non_finite.add(state.steps, result.loss, batch.new, names)
            return
        self.non_finite.in_a_row = self._raised.steps_in_a_row = 0
        state.rows_new += result.rows
        state.rows_replay += result.replayed
        self._trained_new.inc(result.rows)
        self._trained_old.inc(result.replayed)
        self._monitor.simplest.add(self.labels(batch))
        adjustments = self._monitor.observe(state.steps, self.scored(batch, result), replay.probed)
        if adjustments.drifted:
            self._metrics.drifts.inc()
            if adjustments.checkpoint_first and self.request_checkpoint is not None:
                self.request_checkpoint()
            else:
                self.respond()


def _labels(batch: Batch) -> Array:
    """Return the labels of new events that have one."""
    return batch.new["label"][batch.new["labelled"].astype(np.bool_)]


def _scored(batch: Batch, result: StepResult) -> Scored:
    """Return the scores of the step's own predictions, of events with a label."""
    rows = int(np.count_nonzero(batch.new["labelled"])) if TEACHER in batch.new else result.rows
    return Scored(rows, result.score, result.loss_new)
