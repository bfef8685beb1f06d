"""The training loop: reads batches, trains on them, settles their outcomes, publishes versions."""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

from anabranch.core.failures import out_of_memory
from anabranch.core.shutdown import Deadline
from anabranch.core.tracing.context import Attributes
from anabranch.core.tracing.spans import NO_SPAN, current_tracer
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.checkpoints.format import Checkpoint
from anabranch.learner.device.out_of_memory import MemoryRetry
from anabranch.learner.errors import MemoryShortageError
from anabranch.learner.extension import NextBatch, overriding
from anabranch.learner.loop.learning_step import LearningStep
from anabranch.learner.loop.loop_state import LoopComponents, LoopMetrics, LoopState
from anabranch.learner.model.examples import Examples
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.stream.batch import Batch
from anabranch.learner.stream.batches import Batches, BlockSource
from anabranch.learner.stream.ledger import Ledger
from anabranch.learner.stream.round_robin import RoundRobin
from anabranch.learner.train.trainer import overlaps

_COMMIT_SECONDS = 5.0
_FORESEEN = 4
"""Batches on which others begin work before their round: an answer over the network takes longer than a round."""

Task = Callable[[], object]
"""Work between rounds; it checks itself whether it is due."""


def step_span(batch: Batch, step: int, names: Sequence[TopicPartition]) -> AbstractContextManager[object]:
    """Return the span of the step that learns from a batch, not started yet, if it is traced.

    Args:
        batch: the events.
        step: the number of the step.
        names: the partitions, in the order of their index.
    """
    tracer = current_tracer()
    if tracer is None:
        return NO_SPAN

    def attributes() -> Attributes:
        topics = {name.topic for name in names}
        return {
            "messaging.system": "kafka",
            "messaging.operation.name": "train",
            "messaging.operation.type": "process",
            "messaging.batch.message_count": len(batch),
            **({"messaging.destination.name": topics.pop()} if len(topics) == 1 else {}),
            "anabranch.step": step,
        }

    return tracer.step("train", batch.contexts, attributes)


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
        self.ledger = Ledger(parts.publisher.published_through(), metrics.ingest.rows)
        for extension in parts.extensions:
            extension.attach(self.ledger)
        self._takes = overriding(parts.extensions, "take")
        self._trained = overriding(parts.extensions, "trained")
        self._settles = overriding(parts.extensions, "settle")
        self._before_round = overriding(parts.extensions, "before_round")
        self._put_back = overriding(parts.extensions, "put_back")
        self._step_size = settings.batch_size * ranks
        self._source = BatchSource(settings, parts, self._step_size, self.ledger)
        self._next_commit = 0.0
        self._waited = 0.0
        """How long the last round waited for its events, such as for what a teacher says about them, for each step."""
        self.state = LoopState(parts, self.ledger, self._source.batches)
        self.last_step = math.inf
        """Number of the step at which a round has to end: a rebuild needs the weights as they are after it."""
        self._partitions: Sequence[Partition] = ()
        self._names: Sequence[TopicPartition] = ()
        self.monitor = parts.monitor
        self._replay = parts.replay
        self._while_waiting: Sequence[Task] = ()
        self._traced = False
        # When a version is scored depends on clocks, and what is held out may decide what is replayed.
        others = [] if settings.deterministic else [parts.publisher.scoring.raised]
        queues = [*others, parts.replay.raised]
        memory = MemoryRetry(parts.trainer.device, threading.Event())
        self._step = LearningStep(
            parts.trainer,
            parts.monitor,
            parts.replay,
            parts.holdout,
            queues,
            self.state,
            metrics.learner,
            memory,
        )
        self.raising_events = self._step.raising_events
        self.raised = self.raising_events.raised
        self._step.copied = self._source.copied
        self._step.measures_each = settings.deterministic
        varies = parts.monitor.adjusts or overriding(parts.extensions, "foresee")
        self._takes_rounds = not (settings.deterministic and varies)
        """Whether a round may have several steps. Not where bits would depend on how many: of what scores adjust, and
        of a teacher, whose outputs depend on how many events it is asked about."""
        self._step.request_checkpoint = parts.checkpointer.request
        for scored in overriding(parts.extensions, "scored"):
            self._step.scored = scored
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
        """Train until `stop` is set; `between_steps` runs after each round of steps, and after each wait for one.

        Raises:
            GapError: offsets to be read are gone, and `stream.on_gap` is `fail`.
            MemoryShortageError: the device has had too little memory for a step for too long.
        """
        self._step.memory = MemoryRetry(self._parts.trainer.device, stop, self._while_waiting)
        self._traced = current_tracer() is not None
        self._replay.prefetch(self.state.steps)
        self.checkpoint_if_due()  # a restored checkpoint may have left too few slots for a step
        while not stop.is_set():
            self._source.batches.round = self._steps_of_round()
            batch = self._source.next(stop)
            self._register_partitions()
            if batch is None:
                self.ledger.count()
            elif not self._learns(batch, stop):
                break
            for run_if_due in between_steps:
                run_if_due()
        self.ledger.count()

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
        state = self.state
        self._parts.publisher.publish_last(state.progress(last=True), state.snapshot, deadline, state.rows_new)
        self._next_commit = 0.0
        self.commit_if_due()
        self._parts.erasure.finish(deadline)

    def _steps_of_round(self) -> int:
        """Return how many steps the next round has at most: as many as take `learner.round`, and have their samples.

        Their bits are the same for any number, so that a clock may decide also where they have to repeat.
        """
        if not self._takes_rounds:
            return 1
        seconds = self._step.seconds + self._waited or math.inf  # of the first step nothing is known
        ready = self._replay.ready(self.state.steps, self._step_size)
        most = min(ready, self.last_step - self.state.steps, self._settings.round.total_seconds() / seconds)
        return max(1, int(most))

    def _learns(self, batch: Batch, stop: threading.Event) -> bool:
        """Train on one batch; return False if it waited for memory when `stop` was set, and nothing is settled."""
        steps = self.state.steps
        try:
            with step_span(batch, steps, self._names) if self._traced else contextlib.nullcontext():
                self._learn(batch)
        except MemoryShortageError as exc:
            # A checkpoint that has to repeat bit for bit cannot follow: the sample of the step is gone. Nor can one in
            # the middle of a round, of which only all steps are settled.
            if not (exc.undone and stop.is_set()) or self._settings.deterministic or self.state.steps > steps:
                raise
            for put_back in self._put_back:
                put_back()
            return False
        return True

    def _learn(self, batch: Batch) -> None:
        """Train on one batch, of one step or of a round of several, in an order in which a crash loses nothing.

        Only the first is durable, and may be repeated: a crash anywhere loses the whole batch, and a restart trains on
        it again from the checkpoint.

        1. Let extensions take it. Write the erasures that its tombstones ask for, which alone is durable, and drop
           erased events.
        2. Let extensions prepare the round: late labels predict the events that begin to wait.
        3. Take the steps, as `LearningStep` says: for each replay, test, train; then measure and store all of them.
        4. Put held-out events into the holdout set.
        5. Settle outcomes and positions: from here on a version includes them in `trained_through`. Let extensions
           settle: late labels let events without a label wait, join labels with those that wait, and remove those that
           have ended.
        """
        names, begin = self._names, time.perf_counter()
        for take in self._takes:
            batch = take(batch, self._partitions)
        waited = time.perf_counter() - begin
        batch = self._parts.erasure.exclude(batch)
        for before_round in self._before_round:
            batch = self._step.memory(partial(before_round, batch, self._partitions))
        taken = self._step.take(batch, names)
        if taken:
            self._waited = waited / len(taken)
        if batch.held_out:
            self._parts.holdout.add(batch.held_out, names)
        if batch.relabelled:
            self._parts.holdout.relabel(batch.relabelled, names)
        for step in taken if self._trained else ():
            if (result := step.finite) is not None:
                for trained in self._trained:
                    trained(step.batch, result)
        for span in batch.spans:
            self.ledger.advance(span)  # what was skipped has left the batch
        for settle in self._settles:
            settle(batch)

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
        self._parts.lag.update(self.ledger.partitions, self.ledger.moved)
        self.ledger.moved.clear()

    @property
    def rows_of_step(self) -> int:
        """New and old events of a full step, of one rank."""
        return int(self._settings.batch_size * (1 + self._replay.ratio))

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


class BatchSource:
    """Returns the batches of the rounds. Used by the loop's thread.

    Where the host can work while the device computes, the next batch is taken early, and copied to the device. Where an
    extension begins work on new events, several are taken early, and copied at their step. A batch is only taken early
    if blocks that were polled before have a full step of it, and not from a round robin, whose turn is in checkpoints.
    It is not settled before its step. Events that are erased or removed meanwhile are left out: the rest is copied
    again. A learner that stops drops it.

    Attributes:
        batches: builds those of the stream; its state is part of checkpoints.
        next: returns the next batch, or None when there is none for now; takes the event that ends the wait.
        copied: returns the new events of a batch on the device.
    """

    def __init__(self, settings: LearnerSettings, parts: LoopComponents, step_size: int, ledger: Ledger) -> None:
        """Take the number of new events of a step over all ranks, and the positions of the partitions."""
        self._ledger = ledger
        source: BlockSource = parts.source
        for wrap in overriding(parts.extensions, "source"):
            source = wrap(source)
        self.batches = (
            RoundRobin(source, step_size, self._settled, unlabelled=parts.unlabelled)
            if settings.deterministic
            else Batches(
                source,
                step_size,
                settings.max_delay,
                parts.lag,
                most_late=next(iter(overriding(parts.extensions, "most_late")), None),
                unlabelled=parts.unlabelled,
            )
        )
        self._foresee = overriding(parts.extensions, "foresee")
        self._copy = parts.trainer.examples
        self._ahead: deque[Batch] = deque()
        self._copied: tuple[Mapping[str, Array], Examples] | None = None
        overlapping = overlaps(parts.trainer.device)
        if overlapping:
            parts.trainer.runner.before_wait = self.take_next
        of_stream: NextBatch = self.batches.next
        self.copied: Callable[[Mapping[str, Array]], Examples] = self._copy
        if overlapping or self._foresee:
            of_stream, self.copied = self._next, self._copied_early
        self.next = of_stream
        if hooks := overriding(parts.extensions, "next"):
            self.next = lambda stop: hooks[0](parts.source, stop, of_stream, self.batches.round)

    def take_next(self) -> None:
        """Take batches and start work on them; called while the device computes a step, maybe several times."""
        while len(self._ahead) < (_FORESEEN if self._foresee else 1):
            if not isinstance(self.batches, Batches) or (batch := self.batches.next_arrived()) is None:
                return
            self._ahead.append(batch)
            if not batch.new:
                continue
            for begin in self._foresee:
                begin(batch.new)
            if not self._foresee:
                try:
                    self._copied = batch.new, self._copy(batch.new)
                except RuntimeError as exc:
                    if not out_of_memory(exc):
                        raise

    def _next(self, stop: threading.Event) -> Batch | None:
        """Return the next batch, which may have been taken early."""
        if self._ahead:
            batch: Batch | None = self._ahead.popleft()
        elif (batch := self.batches.next(stop)) is not None and batch.new:
            for begin in self._foresee:
                begin(batch.new)
        if self._foresee:
            self.take_next()
        return batch

    def _copied_early(self, columns: Mapping[str, Array]) -> Examples:
        """Return the new events of a batch on the device, where they may be already."""
        if self._copied is not None and self._copied[0] is columns:
            copy, self._copied = self._copied[1], None
            return copy
        if not self._ahead:
            self._copied = None  # of a batch of which events were erased meanwhile
        return self._copy(columns)

    def _settled(self, index: int) -> int:
        """Return the first offset of a partition without outcome."""
        accounts = self._ledger.partitions
        return accounts[index].position.offset if index < len(accounts) else 0
