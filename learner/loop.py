"""The training loop: reads batches, trains on them, settles their outcomes, publishes versions."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from anabranch.core.tracing.spans import current_tracer
from ingest.events.block import Outcome, SkipReason
from ingest.events.partition import TopicPartition
from ingest.reader.cursors import Partition
from learner.config import LearnerSettings
from learner.errors import MemoryShortageError
from learner.loop_parts.batch_source import BatchSource
from learner.loop_parts.learning_step import LearningStep
from learner.loop_parts.loop_state import LoopComponents, LoopMetrics, LoopState
from learner.loop_parts.raising_events import RaisingEvents
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import Checkpoint
from learner.stream.batch import Batch
from learner.stream.ledger import Ledger
from learner.stream.outcome_counters import OutcomeCounters
from learner.stream.step_span import step_span
from learner.training.out_of_memory import MemoryRetry

_COMMIT_SECONDS = 5.0

Task = Callable[[], object]
"""Work between steps; it checks itself whether it is due."""


class TrainingLoop:
    """One rank. `run` returns when the stop event is set; `finish` then saves the progress."""

    def __init__(
        self,
        settings: LearnerSettings,
        parts: LoopComponents,
        metrics: LoopMetrics,
        *,
        ranks: int = 1,
    ) -> None:
        """Start at step 0; `ranks` train together."""
        self._settings = settings
        self._parts = parts
        self._metrics = metrics
        self._counters = OutcomeCounters(metrics.ingest.rows)
        self.ledger = Ledger(parts.publisher.published_through())
        self._teacher = parts.teacher
        self._late = parts.late
        if parts.late is not None:
            parts.late.attach(self.ledger)
        self._source = BatchSource(settings, parts, settings.batch_size * ranks, self.ledger)
        self._next_commit = 0.0
        self.state = LoopState(parts, self.ledger, self._source.batches)
        self._partitions: Sequence[Partition] = ()
        self._names: Sequence[TopicPartition] = ()
        self.monitor = parts.monitor
        self._replay = parts.replay
        self._while_waiting: Sequence[Task] = ()
        self._traced = False
        # When a version is scored depends on clocks, and what is held out may decide what is replayed.
        others = [] if settings.deterministic else [parts.publisher.scoring.raised]
        queues = [*others, parts.replay.raised]
        self.raising_events = RaisingEvents(self.state, parts.replay, parts.holdout, queues, metrics.learner.raised)
        self.raised = self.raising_events.raised
        memory = MemoryRetry(parts.trainer.device, threading.Event())
        self._step = LearningStep(
            parts.trainer, parts.monitor, parts.replay, self.raising_events, self.state, metrics.learner, memory
        )
        self._step.copied = self._source.copied
        self._step.request_checkpoint = parts.checkpointer.request
        if parts.late is not None:
            self._step.scored, self._step.labels = parts.late.scored, parts.late.labels
        self.non_finite = self._step.non_finite

    def begin(self, stop: threading.Event, while_waiting: Sequence[Task]) -> None:
        """Write a checkpoint of where each partition starts, unless there is a checkpoint; called before `run`.

        Without it a restart would start at `stream.start` again, which may be another offset by then. `while_waiting`
        runs while this waits for the disk.

        Raises:
            DependencyError: it cannot be written.
        """
        self._while_waiting = while_waiting
        self._register_partitions()
        self._parts.checkpointer.checkpoint_first({"ledger": self.ledger.state()}, stop, while_waiting)

    def run(self, stop: threading.Event, between_steps: Sequence[Task]) -> None:
        """Train until `stop` is set; `between_steps` runs after each step, and after each wait for one.

        Raises:
            GapError: offsets to be read are gone, and `stream.on_gap` is `fail`.
            MemoryShortageError: the device has had too little memory for a step for too long.
        """
        self._step.memory = MemoryRetry(self._parts.trainer.device, stop, self._while_waiting)
        self._traced = current_tracer() is not None
        self._replay.prefetch(self.state.steps)
        self.checkpoint_if_due()  # a restored checkpoint may have left too few slots for a step
        while not stop.is_set():
            batch = self._source.next(stop)
            self._register_partitions()
            if batch is None:
                self.count()
            elif not self._learns(batch, stop):
                break
            for run_if_due in between_steps:
                run_if_due()
        self.count()

    def finish(self, deadline: Deadline) -> None:
        """Write a checkpoint, publish the progress since the last version, and commit positions, before the deadline.

        Spoiled weights are not saved: the next start continues from an earlier checkpoint, and trains on the events
        since then again.
        """
        self._parts.erasure.poll()
        if self._parts.erasure.settled and not self.non_finite.spoiled and not self.raised.is_all:
            self._parts.checkpointer.checkpoint_last(self.state.capture, deadline, self.state.fingerprint)
        else:
            self._parts.checkpointer.wait(deadline)
        if self._late is not None:
            self._late.search()
        state = self.state
        self._parts.publisher.publish_last(state.progress(), state.snapshot, deadline, state.rows_new)
        self._next_commit = 0.0
        self.commit_if_due()
        self._parts.erasure.finish(deadline)

    def _learns(self, batch: Batch, stop: threading.Event) -> bool:
        """Train on one batch; return False if it waited for memory when `stop` was set, and nothing is settled."""
        try:
            with step_span(batch, self.state.steps, self._names) if self._traced else contextlib.nullcontext():
                self._learn(batch)
        except MemoryShortageError as exc:
            # A checkpoint that has to repeat bit for bit cannot follow: the sample of the step is gone.
            if not (exc.undone and stop.is_set()) or self._settings.deterministic:
                raise
            if self._late is not None:
                self._late.put_back()
            return False
        return True

    def _learn(self, batch: Batch) -> None:
        """Train on one batch, in an order in which a crash loses nothing.

        Only the first is durable, and may be repeated: a crash anywhere loses the whole batch, and a restart trains on
        it again from the checkpoint.

        1. Take the teacher's outputs, which were asked for before. Write the erasures that its tombstones ask for,
           which alone is durable, and drop erased events.
        2. Predict the events that begin to wait for their label.
        3. Take the step, as `LearningStep` says: replay, test, train, store.
        4. Put held-out events into the holdout set.
        5. Settle outcomes and positions: from here on a version includes them in `trained_through`. Let events without
           a label wait, join labels with those that wait, and remove those that have ended.
        """
        names = self._names
        if self._teacher is not None:
            self._teacher.add_outputs(batch)
        batch = self._parts.erasure.exclude(batch)
        if self._late is not None:
            batch = self._step.fitting(partial(self._late.begin, batch, self._partitions))
        result = self._step.take(batch, names)
        if batch.held_out:
            self._parts.holdout.add(batch.held_out, names)
        if batch.relabelled:
            self._parts.holdout.relabel(batch.relabelled, names)
        finite = result is None or result.finite
        outcome, reason = (Outcome.TRAINED, SkipReason.NONE) if finite else (Outcome.SKIPPED, SkipReason.NON_FINITE)
        for span in batch.spans:
            self.ledger.advance(span, outcome, reason)
        if self._late is not None:
            self._late.settle(batch, finite=finite)
        if self.ledger.full:
            self.count()

    def count(self) -> None:
        """Count the outcomes that were settled since the last time, for several steps at once."""
        self.ledger.count()
        self._counters.update(self.ledger.partitions)

    @property
    def replay_ratio(self) -> float:
        """Old events for each new one in the next step."""
        return self.monitor.adjustments.replay_ratio if self._replay.replays else 0.0

    def _register_partitions(self) -> None:
        """Open an account for each partition that was added, and update the ends of all and the lag."""
        self._parts.source.receive()
        partitions = self._parts.source.partitions
        if partitions is not self._partitions:
            self._partitions, self._names = partitions, [partition.name for partition in partitions]
            self._parts.erasure.register_partitions(partitions, lambda: self.ledger.positions)
            for index, partition in enumerate(partitions):
                if index == len(self.ledger.partitions):
                    self.ledger.add_partition(partition.name, partition.start)
                self.ledger.partitions[index].update(partition)
            self._counters.register_partitions(self.ledger.partitions)
        self._parts.lag.update(self.ledger.partitions, self.ledger.moved)
        self.ledger.moved.clear()

    @property
    def rows_of_step(self) -> int:
        """New and old events of a full step, of one rank."""
        return int(self._settings.batch_size * (1 + self.replay_ratio))

    @property
    def _is_sound(self) -> bool:
        """Whether a checkpoint of the current state may replace earlier ones."""
        return self._parts.erasure.settled and not self.non_finite.in_a_row and not self.raised.is_all

    @property
    def warning(self) -> str | None:
        """One sentence on what the learner changed to continue, although it is healthy."""
        return self._step.memory.waiting or self._parts.trainer.warning or self._step.values.warning

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint, except the store's part, before the first step; raises CheckpointError if it does not
        fit."""
        self.state.restore(checkpoint)
        if not checkpoint.begins and self.monitor.drift.pending:
            self._step.respond()

    def erase_if_due(self) -> None:
        """Apply the erasure log when it has to be polled, or as long as there is work on files."""
        if time.monotonic() >= self._parts.erasure.due:
            self._parts.erasure.poll_if_due()

    def clean_holdout(self) -> None:
        """Remove held-out events on which the model has raised."""
        if any(self.raising_events.queues):
            self.raising_events.clean_holdout()

    def publish_if_due(self) -> None:
        """Publish a version when one is due and there is progress."""
        publisher = self._parts.publisher
        if time.monotonic() >= publisher.due:
            publisher.publish_if_due(self.state.progress(), self.state.snapshot, self.state.rows_new)

    def monitor_served_if_due(self) -> None:
        """Score the served version on the holdout set about once a second."""
        publisher = self._parts.publisher
        if time.monotonic() >= publisher.watch_due:
            publisher.watch(self._parts.holdout)

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint when one is due.

        The response to a drift comes after its checkpoint has started, or while one from before it is written.

        None is written while steps are not finite: the weights may be the cause, and good checkpoints would be deleted.
        Nor while the model raises on all events: once it is corrected, a restart trains on the events since.
        """
        checkpointer = self._parts.checkpointer
        if checkpointer.is_due() and self._is_sound:
            checkpointer.checkpoint(self.state.capture, self.state.fingerprint, self._while_waiting)
        if self.monitor.drift.pending:  # in a fixed step, whatever the disk does
            self._step.respond()

    def commit_if_due(self) -> None:
        """Commit the positions of all partitions every few seconds, for tools that show the lag of a consumer group."""
        if time.monotonic() >= self._next_commit:
            offsets = {index: account.position.offset for index, account in enumerate(self.ledger.partitions)}
            self._parts.source.commit(offsets)
            self._next_commit = time.monotonic() + _COMMIT_SECONDS
