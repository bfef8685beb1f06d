"""The training loop: takes batches, learns them, settles them, publishes."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array, Outcome, SkipReason
from ingest.metrics import IngestMetrics
from ingest.reader.cursors import Partition
from ingest.reader.multi_host import MultiHostReader
from ingest.reader.reader import BlockReader
from learner.adaptation.stream_monitor import StreamMonitor
from learner.checkpointing.checkpointer import CapturedState, Checkpointer
from learner.checkpointing.erasure import Erasure
from learner.checkpointing.stateful import Stateful, StatefulPart, restore_states, states_of
from learner.config import LearnerSettings
from learner.evaluation.forgetting_metric import retention_of
from learner.evaluation.holdout import HoldoutSet
from learner.evaluation.prequential import Scored
from learner.metrics import LearnerMetrics
from learner.model.faulty_events import Raised, RaisingEventsError
from learner.publishing.publisher import Progress, Publisher, Snapshot
from learner.replay_feed import NOTHING, Replay, ReplayFeed
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import ERASED, Checkpoint
from learner.strategies.examples import OUTPUT
from learner.stream.batches import Batch, Batches
from learner.stream.lag import LagPolicy
from learner.stream.ledger import Ledger
from learner.stream.outcome_counters import OutcomeCounters
from learner.stream.partition_rates import Rates
from learner.stream.round_robin import RoundRobin
from learner.training.step_result import StepResult
from learner.training.trainer import Trainer
from replay.metrics import ReplayMetrics

_COMMIT_SECONDS = 5.0
_MANY_NON_FINITE = 10

Task = Callable[[], object]
"""Work between steps, which decides itself whether it is due."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopComponents:
    """What the loop composes; each is used by the loop's thread alone."""

    source: BlockReader | MultiHostReader
    trainer: Trainer
    monitor: StreamMonitor
    replay: ReplayFeed
    holdout: HoldoutSet
    publisher: Publisher
    checkpointer: Checkpointer
    erasure: Erasure
    lag: LagPolicy


@dataclass(frozen=True)
class LoopMetrics:
    """The collectors that the loop moves."""

    ingest: IngestMetrics
    replay: ReplayMetrics
    learner: LearnerMetrics


class TrainingLoop:
    """One rank. `run` returns when the stop event is set; `finish` then publishes and commits what was learned."""

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
        self._batches = (
            RoundRobin(parts.source, self._step_size, self._settled)
            if settings.deterministic
            else Batches(parts.source, self._step_size, settings.max_delay, parts.lag.settle)
        )
        self._next_commit = 0.0
        self.ledger = Ledger(parts.publisher.published_through())
        self._met: Sequence[Partition] = ()
        self.rates = Rates()
        self.monitor = parts.monitor
        self._replay = parts.replay
        self.steps = 0
        self.rows_new = 0
        self.rows_replay = 0
        self.non_finite_in_a_row = 0
        self.raised = Raised()
        self._raised_in_holdout = parts.publisher.raised, parts.replay.raised
        self._stateful = self._stateful_parts()

    def begin(self, stop: threading.Event, while_waiting: Sequence[Task]) -> None:
        """Write a checkpoint that says where each partition starts, unless there is a checkpoint; called before `run`.

        Without it a restart would start at `stream.start` again, which may be another offset by then. `while_waiting`
        runs while this waits for the disk.

        Raises:
            DependencyError: it cannot be written.
        """
        self._meet_partitions()
        self._parts.checkpointer.checkpoint_first({"ledger": self.ledger.state()}, stop, while_waiting)

    def run(self, stop: threading.Event, between_steps: Sequence[Task]) -> None:
        """Train until `stop` is set; `between_steps` runs after each step, and after each wait for one.

        Raises:
            GapError: offsets to be read are gone, and `stream.on_gap` is `fail`.
        """
        self._replay.prefetch(self.steps, self.replay_ratio)
        self.checkpoint_if_due()  # the checkpoint that this goes on from may have left too few slots for a step
        while not stop.is_set():
            batch = self._batches.next(stop)
            self._meet_partitions()
            if batch is not None:
                self._learn(batch)
            else:
                self.count()
            for run_if_due in between_steps:
                run_if_due()
        self.count()

    def finish(self, deadline: Deadline) -> None:
        """Publish what was learned since the last version, checkpoint, and commit positions, before the deadline.

        Spoiled weights are not saved: the next start goes on from before, and learns the events since
        again.
        """
        self._parts.erasure.poll()
        if self._parts.erasure.settled and not self.spoiled and not self.raised.is_all:
            self._parts.checkpointer.checkpoint_last(self._capture, deadline, self._fingerprint)
        else:
            self._parts.checkpointer.wait(deadline)
        self._parts.publisher.publish_last(self._progress(), self._snapshot, deadline)
        self._next_commit = 0.0
        self.commit_if_due()
        self._parts.erasure.finish(deadline)

    def _learn(self, batch: Batch) -> None:
        """Do all that one batch requires, in an order in which a crash loses nothing.

        Only the first is durable, and may be repeated: a crash anywhere loses the whole batch, and a restart learns
        it again from the checkpoint.

        1. Write the erasures that its tombstones ask for, which alone is durable, and drop erased events.
        2. Sample the old events that were chosen some steps before: no event is replayed in the step that trains on it.
        3. Test, then train. A step that is not finite leaves the weights as they were; events on which the model raises
           are skipped, and the others trained on.
        4. Add the events to the store: after the step, and only if they were trained on. Choose those of a later step.
        5. Put held-out events into the holdout set.
        6. Settle outcomes and positions: from here on a version says that it is trained on them.
        """
        names = [account.name for account in self.ledger.partitions]
        batch = self._parts.erasure.exclude(batch)
        replay, result = self._step(batch) if batch.new else (NOTHING, None)
        self._replay.add(self.steps, batch, replay, result, names)
        self._replay.prefetch(self.steps, self.replay_ratio)
        self._parts.holdout.add(batch.held_out, names)
        self._settle(batch, finite=result is None or result.finite)

    def _settle(self, batch: Batch, *, finite: bool) -> None:
        """Give each event of a batch its outcome, and move positions past it."""
        outcome, reason = (Outcome.TRAINED, SkipReason.NONE) if finite else (Outcome.SKIPPED, SkipReason.NON_FINITE)
        for span in batch.spans:
            self.ledger.advance(span, outcome, reason)
        if self.ledger.full:
            self.count()

    def count(self) -> None:
        """Let ledger and counters follow what was settled, which they do for several steps at once."""
        self.ledger.count()
        self._counters.move(self.ledger.partitions)

    def _step(self, batch: Batch) -> tuple[Replay, StepResult | None]:
        """Sample, test, train and measure; return the old events, and the result: None if the model raised on all new
        ones, which leave the batch."""
        begin = time.perf_counter()
        replay = self._replay.sample(self.steps, len(batch), self.replay_ratio)
        replay, result = self._train(batch, replay)
        self.steps += 1
        self._metrics.learner.steps.inc()
        self._metrics.learner.step.observe(time.perf_counter() - begin)
        if result is None:
            self.raised.steps_in_a_row += 1
        elif not result.finite:
            self._metrics.learner.non_finite.inc()
            self.non_finite_in_a_row += 1
            log.warning(
                "step %d: loss %s or its gradient is not finite; skipped %s",
                *(self.steps, result.loss, self._ranges(batch.new)),
            )
        else:
            self.non_finite_in_a_row = self.raised.steps_in_a_row = 0
            self._measure(len(batch), result, replay)
        return replay, result

    def _train(self, batch: Batch, replay: Replay) -> tuple[Replay, StepResult | None]:
        """Step without the events on which the model raises, as if they had not come; return the old events that are
        left."""
        trainer = self._parts.trainer
        trainer.scale_learning_rate(self.monitor.adjustments.lr_factor)
        while batch.new:
            try:
                return replay, trainer.step(trainer.examples(batch.new), replay.examples)
            except RaisingEventsError as exc:
                error = exc
            count = len(batch)
            raised = np.zeros(count + sum(map(len, replay.examples)), np.bool_)
            raised[error.places] = True
            if raised[count:].any():
                replay, records = self._replay.remove(replay, raised[count:])
                self._metrics.learner.raised.labels("replay").inc(len(records))
                self.raised.log("which are replayed no more", self._names(records), error.said)
            if raised[:count].any():
                self._skip(batch, raised[:count], error.said)
        return replay, None

    def _skip(self, batch: Batch, raised: NDArray[np.bool_], said: str) -> None:
        """Settle new events on which the model raised."""
        left, count = {name: batch.new[name][raised] for name in ("partition", "offset")}, int(raised.sum())
        batch.skip(raised, SkipReason.MODEL)
        self._metrics.learner.raised.labels("new").inc(count)
        self.raised.add(self.rows_new + self.raised.new + count, count, said)
        self.raised.log("which are skipped", self._names(left), said)

    def drop_raising_holdout(self) -> None:
        """Take events on which the model raised out of the held-out set."""
        for found in self._raised_in_holdout:
            while found:
                hashes, said = found.popleft()
                left = self._parts.holdout.remove(hashes)
                if left and (count := len(left["offset"])):
                    self._metrics.learner.raised.labels("held_out").inc(count)
                    self.raised.log("which are held out no more", self._names(left), said)

    def _names(self, columns: Mapping[str, Array] | NDArray[np.void]) -> list[str]:
        """Name events as `topic[partition]@offset`."""
        places = zip(columns["partition"].tolist(), columns["offset"].tolist(), strict=True)
        accounts = self.ledger.partitions
        return [f"{accounts[at].name.topic}[{accounts[at].name.partition}]@{offset}" for at, offset in places]

    def _measure(self, rows: int, result: StepResult, replay: Replay) -> None:
        """Count and measure a finite step of `rows` new events, and ask for a response where it shows a drift."""
        self.rows_new += rows
        self.rows_replay += result.replayed
        self._trained_new.inc(rows)
        self._trained_old.inc(result.replayed)
        adjustments = self.monitor.observe(self.steps, Scored(rows, result.score, result.loss_new), replay.probed)
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
        """Name events as `topic[partition]@first..last`, for a person to look them up."""
        parts = []
        for index in np.unique(columns["partition"]).tolist():
            name = self._parts.source.partitions[index].name
            offsets = columns["offset"][columns["partition"] == index]
            parts.append(f"{name.topic}[{name.partition}]@{offsets.min()}..{offsets.max()}")
        return ", ".join(parts)

    def _meet_partitions(self) -> None:
        """Open an account for each partition that was added, and note how far the broker is."""
        self._parts.source.receive()
        partitions = self._parts.source.partitions
        if partitions is not self._met:
            self._met = partitions
            self._parts.erasure.register_partitions(partitions, lambda: self.ledger.positions)
            for index, partition in enumerate(partitions):
                if index == len(self.ledger.partitions):
                    self.ledger.take_up(partition.name, partition.start)
                self.ledger.partitions[index].meet(partition.end, partition.topic_id)
            self._counters.meet(self.ledger.partitions)
        self._parts.lag.look(self.ledger.partitions, self.ledger.take_moved())

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
        """Whether so many steps in a row were not finite that the weights are to be doubted. Any thread may ask."""
        return self.non_finite_in_a_row >= _MANY_NON_FINITE

    @property
    def problem(self) -> str | None:
        """One sentence when steps are not finite, or the model raises on too many new events. Any thread may ask."""
        if not self.spoiled:
            return self.raised.problem(self.rows_new + self.raised.new)
        return (
            f"the last {self.non_finite_in_a_row} steps were skipped because loss or gradient was not finite: "
            "are the weights? No checkpoint is made until a step is finite, so that a restart goes on from before"
        )

    @property
    def warning(self) -> str | None:
        """One sentence on what the learner did to go on, though it is healthy."""
        return self._parts.trainer.warning

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take up a checkpoint, before the first step, but for the store's part; raises CheckpointError when it does
        not fit."""
        parts, state = self._parts, checkpoint.state
        if checkpoint.begins:
            self.ledger.restore(state["ledger"])
            return
        parts.trainer.restore(checkpoint.tensors, state["trainer"])
        parts.holdout.restore(checkpoint.tensors["holdout"])
        self.steps = checkpoint.step
        restore_states(self._stateful, state)
        parts.publisher.go_on_from(self._progress(), self.ledger.trained_through)
        parts.trainer.restore_generators(checkpoint.tensors["rng"], state["rng"])
        if self.monitor.drift.pending:
            self._respond()

    def _stateful_parts(self) -> Mapping[str, Stateful]:
        """Return the parts whose state a checkpoint keeps, beside tensors: the ledger first, which others refer to."""
        publisher = self._parts.publisher
        return {
            "ledger": self.ledger,
            "rates": StatefulPart(
                self._measured_rates, lambda rates: self.rates.restore(rates, self.ledger.partitions)
            ),
            "monitor": self.monitor,
            "retention": StatefulPart(lambda: publisher.retention.state(), self._restore_retention),
            "rows": StatefulPart(lambda: (self.rows_new, self.rows_replay), self._restore_rows),
            "replay_feed": self._replay,
            "batches": self._batches,
            "lag": self._parts.lag,
            "gate": publisher.gate,
        }

    def _measured_rates(self) -> dict[str, Any]:
        self.rates.measure(self.ledger.partitions)
        return self.rates.state()

    def _restore_retention(self, state: Mapping[str, Any]) -> None:
        self._parts.publisher.retention = retention_of(state)

    def _restore_rows(self, rows: Sequence[int]) -> None:
        self.rows_new, self.rows_replay = rows

    def _capture(self, number: int) -> CapturedState:
        """Return a copy of the state for checkpoint `number`; called between steps."""
        parts = self._parts
        tensors = parts.trainer.tensors() | {"holdout": parts.holdout.tensors()}
        tensors["rng"], rng = parts.trainer.generators()
        facts = {OUTPUT: self._replay.output_shape, ERASED: parts.erasure.excluded_through}
        state = {"trainer": parts.trainer.state(), "rng": rng, **states_of(self._stateful), **facts}
        return CapturedState(self.steps, tensors, state, self._replay.begin_snapshot(number))

    def _fingerprint(self) -> object:
        """Return a value that changes with the state of a checkpoint: all other state changes only with these."""
        parts = self._parts
        return (
            self.steps,
            self.ledger.state(),
            self.monitor.drift.state(),
            parts.publisher.retention,
            parts.erasure.records,
        )

    def _progress(self) -> Progress:
        """What tells one version from the next: steps, and positions, which held-out and bad events move as well."""
        return self.steps, tuple(self.ledger.positions.values())

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            step=self.steps,
            weights=self._parts.trainer.snapshot(),
            trained_through=self.ledger.trained_through,
            holdout=self._parts.holdout.held,
            accuracy_now=self.monitor.prequential.mean,
            learned=self.ledger.take_learned(),
        )

    def publish_if_due(self) -> None:
        """Publish a version when one is due and there is progress."""
        self._parts.publisher.publish_if_due(self._progress, self._snapshot)

    def watch_if_due(self) -> None:
        """Score the served version on the holdout set about once a second."""
        self._parts.publisher.watch_if_due(lambda: self._parts.holdout.held)

    def rebalance_readers(self) -> None:
        """Assign partitions to the hosts that read them by their rates, where several hosts read."""
        self._parts.source.rebalance(self.rates.now)

    def checkpoint_if_due(self) -> None:
        """Write a checkpoint when it is due, but not while steps are not finite: it may be the weights, and the good
        checkpoints go.

        Nor while the model raises on everything: when it was corrected, the events since are learned after all.
        """
        if self._parts.erasure.settled and not self.non_finite_in_a_row and not self.raised.is_all:
            self._parts.checkpointer.checkpoint_if_due(self._capture, self._fingerprint)
        else:
            self._parts.checkpointer.end_snapshot_if_written()
        if self.monitor.drift.pending and not self._parts.checkpointer.requested:
            self._respond()

    def commit_if_due(self) -> None:
        """Commit the positions of all partitions every few seconds, for tools that show the lag of a group."""
        if time.monotonic() >= self._next_commit:
            offsets = {index: account.position.offset for index, account in enumerate(self.ledger.partitions)}
            self._parts.source.commit(offsets)
            self._next_commit = time.monotonic() + _COMMIT_SECONDS
