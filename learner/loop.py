"""The training loop: reads batches, trains on them, settles their outcomes, publishes versions."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ingest.events.block import Array, Outcome, SkipReason
from ingest.events.partition import TopicPartition
from ingest.metrics import IngestMetrics
from ingest.reader.cursors import Partition
from learner.config import LearnerSettings
from learner.errors import MemoryShortageError
from learner.evaluation.prequential import Scored
from learner.loop_state import LoopComponents, LoopState
from learner.metrics import LearnerMetrics
from learner.model.faulty_events import RaisingEventsError
from learner.raising_events import RaisingEvents
from learner.replay_feed import NOTHING, Replay
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import Checkpoint
from learner.strategies.early_negatives import trained_first
from learner.strategies.examples import TEACHER
from learner.stream.batch import Batch
from learner.stream.batch_prefetch import BatchPrefetch
from learner.stream.batches import PATIENCE, Batches
from learner.stream.ledger import Ledger
from learner.stream.outcome_counters import OutcomeCounters
from learner.stream.round_robin import RoundRobin
from learner.stream.step_span import step_span
from learner.training.out_of_memory import MemoryRetry
from learner.training.step_result import StepResult
from learner.undo.undone_events import WithoutUndone
from replay.metrics import ReplayMetrics

_COMMIT_SECONDS = 5.0
_MANY_NON_FINITE = 10

Task = Callable[[], object]
"""Work between steps; it checks itself whether it is due."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopMetrics:
    """The metrics that the loop updates."""

    ingest: IngestMetrics
    replay: ReplayMetrics
    learner: LearnerMetrics


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
        self._step_size = settings.batch_size * ranks
        self._parts = parts
        self._metrics = metrics
        self._counters = OutcomeCounters(metrics.ingest.rows)
        self._trained_new, self._trained_old = (metrics.learner.rows.labels(source) for source in ("new", "replay"))
        self.ledger = Ledger(parts.publisher.published_through())
        self._teacher = parts.teacher
        unlabelled = parts.teacher is not None and parts.teacher.unlabelled
        source = WithoutUndone(parts.source, parts.undone) if parts.undone.records else parts.source
        self._batches = (
            RoundRobin(source, self._step_size, self._settled, unlabelled=unlabelled)
            if settings.deterministic
            else Batches(
                source,
                self._step_size,
                settings.max_delay,
                parts.lag.settle,
                most_late=None if parts.late is None else parts.late.most_rows,
                unlabelled=unlabelled,
            )
        )
        self._late = parts.late
        if parts.late is not None:
            parts.late.attach(self.ledger)
        ask = None if parts.teacher is None else parts.teacher.ask
        self._prefetch = BatchPrefetch(self._batches, parts.trainer.examples, ask)
        parts.trainer.set_before_wait(self._prefetch.take_next)
        self._next_commit = 0.0
        self.state = LoopState(parts, self.ledger, self._batches)
        self._partitions: Sequence[Partition] = ()
        self._names: Sequence[TopicPartition] = ()
        self.monitor = parts.monitor
        self._replay = parts.replay
        self._memory = MemoryRetry(parts.trainer.device, threading.Event())
        self._while_waiting: Sequence[Task] = ()
        self.non_finite_in_a_row = 0
        queues = parts.publisher.raised, parts.replay.raised
        self.raising_events = RaisingEvents(self.state, parts.replay, parts.holdout, queues, metrics.learner.raised)
        self.raised = self.raising_events.raised

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
        self._memory = MemoryRetry(self._parts.trainer.device, stop, self._while_waiting)
        self._replay.prefetch(self.state.steps)
        self.checkpoint_if_due()  # a restored checkpoint may have left too few slots for a step
        while not stop.is_set():
            batch = self._next_batch(stop)
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
        if self._parts.erasure.settled and not self.spoiled and not self.raised.is_all:
            self._parts.checkpointer.checkpoint_last(self.state.capture, deadline, self.state.fingerprint)
        else:
            self._parts.checkpointer.wait(deadline)
        if self._late is not None:
            self._late.search()
        self._parts.publisher.publish_last(self.state.progress(), self.state.snapshot, deadline)
        self._next_commit = 0.0
        self.commit_if_due()
        self._parts.erasure.finish(deadline)

    def _next_batch(self, stop: threading.Event) -> Batch | None:
        """Return events that have waited for their labels, if enough have them, or else the next ones of the stream."""
        if self._late is None:
            return self._prefetch.next(stop)
        source = self._parts.source
        self._late.advance(source.partitions, source.ends_time)
        decided = self._late.take(source.partitions)
        if decided is None and self._late.full:
            self._late.make_room()
            stop.wait(PATIENCE.total_seconds())  # for checkpoints, which let its space be used again
            return None
        return self._prefetch.next(stop) if decided is None else decided

    def _learns(self, batch: Batch, stop: threading.Event) -> bool:
        """Train on one batch; return False if it waited for memory when `stop` was set, and nothing is settled."""
        try:
            with step_span(batch, self.state.steps, self._names):
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
        2. Sample the old events that were chosen some steps before: no event is replayed in the step that trains on it.
        3. Test, then train, then learn features from the new events. A step that is not finite leaves all as it was;
           events on which the model raises are skipped, and the others trained on. Events that begin to wait for their
           label are predicted now.
        4. Add the events to the store: after the step, and only if they were trained on. Choose those of a later step.
        5. Put held-out events into the holdout set.
        6. Settle outcomes and positions: from here on a version includes them in `trained_through`. Let events without
           a label wait, join labels with those that wait, and remove those that have ended.
        """
        names, replay, result = self._names, NOTHING, None
        if self._teacher is not None:
            self._teacher.add_outputs(batch)
        batch = self._parts.erasure.exclude(batch)
        if self._late is not None:
            batch = self._memory(partial(self._late.begin, batch, self._partitions))
        if batch.new:
            begin = time.perf_counter()
            replay = self._memory(lambda: self._replay.sample(self.state.steps, len(batch)))
            replay, result = self._train(batch, replay)
            self._observe(batch, replay, result, time.perf_counter() - begin)
        step = self.state.steps
        self._memory(lambda: self._replay.add(step, batch, replay, result, names), undone=False)
        self._parts.holdout.add(batch.held_out, names)
        self._parts.holdout.relabel(batch.relabelled, names)
        finite = result is None or result.finite
        outcome, reason = (Outcome.TRAINED, SkipReason.NONE) if finite else (Outcome.SKIPPED, SkipReason.NON_FINITE)
        for span in batch.spans:
            self.ledger.advance(span, outcome, reason)
        if batch.decided is not None:
            self.ledger.end(batch.decided, outcome, reason)
        if self._late is not None:
            self._late.settle(batch, finite=finite)
        if self.ledger.full:
            self.count()

    def count(self) -> None:
        """Count the outcomes that were settled since the last time, for several steps at once."""
        self.ledger.count()
        self._counters.update(self.ledger.partitions)

    def _train(self, batch: Batch, replay: Replay) -> tuple[Replay, StepResult | None]:
        """Step without the events on which the model raises, as if they had not come.

        Returns:
            The remaining old events, and the result; None if the model raised on all new events, which leave the batch.
        """
        trainer = self._parts.trainer
        trainer.scale_learning_rate(self.monitor.adjustments.lr_factor)
        while batch.new:
            try:
                new = self._memory(lambda: self._prefetch.copied(batch.new))
                result = self._memory(partial(trainer.step, new, replay.examples), repeatable=False)
            except RaisingEventsError as exc:
                error = exc
            else:
                if result.finite:
                    trainer.learn_features(trained_first(batch.new))
                return replay, result
            replay = self.raising_events.remove(batch, replay, error)
        return replay, None

    def _observe(self, batch: Batch, replay: Replay, result: StepResult | None, seconds: float) -> None:
        """Count a step that took `seconds`, measure it where it is finite, and respond where it shows a drift."""
        self.state.steps += 1
        self._metrics.learner.steps.inc()
        self._metrics.learner.step.observe(seconds)
        if result is None:
            self.raised.steps_in_a_row += 1
            return
        if not result.finite:
            self._metrics.learner.non_finite.inc()
            self.non_finite_in_a_row += 1
            ranges = self._ranges(batch.new)
            log.warning(
                "step %d: loss %s or its gradient is not finite; skipped %s", self.state.steps, result.loss, ranges
            )
            return
        self.non_finite_in_a_row = self.raised.steps_in_a_row = 0
        rows = len(batch)
        self.state.rows_new += rows
        self.state.rows_replay += result.replayed
        self._trained_new.inc(rows)
        self._trained_old.inc(result.replayed)
        labelled = int(np.count_nonzero(batch.new["labelled"])) if TEACHER in batch.new else rows
        scored = Scored(labelled, result.score, result.loss_new)
        if self._late is not None:
            scored = self._late.scored(batch, result)
        adjustments = self.monitor.observe(self.state.steps, scored, replay.probed)
        if adjustments.drifted:
            self._metrics.learner.drifts.inc()
            if adjustments.checkpoint_first:
                self._parts.checkpointer.request()
            else:
                self._respond()

    def _respond(self) -> None:
        """Respond to a drift."""
        self._parts.trainer.on_drift()
        self.monitor.respond()

    @property
    def replay_ratio(self) -> float:
        """Old events for each new one in the next step."""
        return self.monitor.adjustments.replay_ratio if self._replay.replays else 0.0

    def _settled(self, index: int) -> int:
        """Return the first offset of a partition without outcome."""
        accounts = self.ledger.partitions
        return accounts[index].position.offset if index < len(accounts) else 0

    def _ranges(self, columns: Mapping[str, Array]) -> str:
        """Return ranges of events as `topic[partition]@first..last`, for logs."""
        parts = []
        for index in np.unique(columns["partition"]).tolist():
            name = self._names[index]
            offsets = columns["offset"][columns["partition"] == index]
            parts.append(f"{name.topic}[{name.partition}]@{offsets.min()}..{offsets.max()}")
        return ", ".join(parts)

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
                self.ledger.partitions[index].update_end(partition.end, partition.topic_id)
            self._counters.register_partitions(self.ledger.partitions)
        self._parts.lag.update(self.ledger.partitions, self.ledger.take_moved())

    @property
    def micro_batch_size(self) -> int | None:
        """Events that go through the model at once at most; None: all of a step."""
        return self._parts.trainer.micro_batch_size

    @property
    def rows_of_step(self) -> int:
        """New and old events of a full step, of one rank."""
        return int(self._settings.batch_size * (1 + self.replay_ratio))

    @property
    def spoiled(self) -> bool:
        """Whether many consecutive steps were not finite, maybe because of the weights. Any thread may call this."""
        return self.non_finite_in_a_row >= _MANY_NON_FINITE

    @property
    def _is_sound(self) -> bool:
        """Whether a checkpoint of the current state may replace earlier ones."""
        return self._parts.erasure.settled and not self.non_finite_in_a_row and not self.raised.is_all

    @property
    def problem(self) -> str | None:
        """One sentence when many consecutive steps are not finite. Any thread may ask."""
        if not self.spoiled:
            return None
        return (
            f"the last {self.non_finite_in_a_row} steps were skipped because loss or gradient was not finite: "
            "are the weights? No checkpoint is made until a step is finite, so that a restart goes on from before"
        )

    @property
    def warning(self) -> str | None:
        """One sentence on what the learner changed to continue, although it is healthy."""
        return self._memory.waiting or self._parts.trainer.warning

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint, except the store's part, before the first step; raises CheckpointError if it does not
        fit."""
        self.state.restore(checkpoint)
        if not checkpoint.begins and self.monitor.drift.pending:
            self._respond()

    def publish_if_due(self) -> None:
        """Publish a version when one is due and there is progress."""
        publisher = self._parts.publisher
        if time.monotonic() >= publisher.due:
            publisher.publish_if_due(self.state.progress(), self.state.snapshot)

    def monitor_served_if_due(self) -> None:
        """Score the served version on the holdout set about once a second."""
        publisher = self._parts.publisher
        if time.monotonic() >= publisher.watch_due:
            publisher.watch(self._parts.holdout)

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint when one is due.

        None is written while steps are not finite: the weights may be the cause, and good checkpoints would be deleted.
        Nor while the model raises on all events: once it is corrected, a restart trains on the events since.
        """
        checkpointer = self._parts.checkpointer
        if checkpointer.is_due() and self._is_sound:
            checkpointer.checkpoint(self.state.capture, self.state.fingerprint, self._while_waiting)
        if self.monitor.drift.pending and not checkpointer.requested:
            self._respond()

    def commit_if_due(self) -> None:
        """Commit the positions of all partitions every few seconds, for tools that show the lag of a consumer group."""
        if time.monotonic() >= self._next_commit:
            offsets = {index: account.position.offset for index, account in enumerate(self.ledger.partitions)}
            self._parts.source.commit(offsets)
            self._next_commit = time.monotonic() + _COMMIT_SECONDS
