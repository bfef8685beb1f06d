"""The training loop: takes batches, learns them, settles them, publishes."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array, Outcome, SkipReason
from ingest.metrics import IngestMetrics
from ingest.reader.cursors import Partition
from ingest.reader.multi_host import MultiHostReader
from ingest.reader.reader import BlockReader
from learner.adaptation.drift import Drift
from learner.adaptation.forgetting_probe import Probe
from learner.adaptation.replay_ratio import ScoreSum, make_ratio
from learner.checkpointing.checkpointer import CapturedState, Checkpointer
from learner.checkpointing.erasure import Erasure
from learner.config import LearnerSettings
from learner.evaluation.forgetting_metric import retention_of
from learner.evaluation.holdout import HoldoutSet
from learner.evaluation.prequential import Prequential, Scored
from learner.metrics import LearnerMetrics
from learner.model.faulty_events import Raised, RaisingEventsError
from learner.publishing.publisher import Progress, Publisher, Snapshot
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import ERASED, Checkpoint
from learner.strategies.examples import OUTPUT, Examples, examples_of
from learner.stream.batches import Batch, Batches
from learner.stream.lag import LagPolicy
from learner.stream.ledger import Ledger
from learner.stream.outcome_counters import OutcomeCounters
from learner.stream.partition_rates import Rates
from learner.stream.round_robin import RoundRobin
from learner.training.step_result import StepResult
from learner.training.trainer import Trainer
from replay.background_store import BackgroundStore
from replay.metrics import ReplayMetrics
from replay.plan import Sample
from replay.row_layout import Fields

_COMMIT_SECONDS = 5.0
_MANY_NON_FINITE = 10
_EMBEDDING = "embedding"
"""A column that the step adds to its events: where the model puts them, NaN where that is not known."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopComponents:
    """What the loop composes; each is used by the loop's thread alone."""

    source: BlockReader | MultiHostReader
    trainer: Trainer
    clerk: BackgroundStore | None
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
        bounded: bool = True,
        ranks: int = 1,
    ) -> None:
        """Begin at step 0, with so many ranks; `bounded` says that the task's scores lie between 0 and 1."""
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
        self._replay_debt = 0.0
        self._next_commit = 0.0
        self.ledger = Ledger(parts.publisher.published_through())
        self._met: Sequence[Partition] = ()
        self.rates = Rates()
        self.prequential = Prequential(bounded=bounded)
        self.drift = Drift(settings.drift, bounded=bounded)
        self.ratio = make_ratio(settings, bounded=bounded)
        self._probe = Probe(self.ratio, parts.holdout, parts.trainer, settings.batch_size)
        self.steps = 0
        self.rows_new = 0
        self.rows_replay = 0
        self.non_finite_in_a_row = 0
        self.raised = Raised()
        self._told_of_score = False

    def begin(self, stop: threading.Event, at_boundary: Callable[[], None]) -> None:
        """Have a checkpoint say where each partition is begun, where there is no checkpoint: called before `run`, once
        that is known.

        Without it a restart would begin at `stream.start` again, which by then may be another place. `at_boundary` is
        called while this waits for the disk.

        Raises:
            DependencyError: it cannot be written.
        """
        self._meet_partitions()
        self._parts.checkpointer.checkpoint_first({"ledger": self.ledger.state()}, stop, at_boundary)

    def run(self, stop: threading.Event, at_boundary: Callable[[], None]) -> None:
        """Learn until `stop` is set; `at_boundary` is called between steps.

        Raises:
            GapError: offsets to be read are gone, and `stream.on_gap` is `fail`.
        """
        self._plan_ahead()
        self._checkpoint_if_due()  # the checkpoint that this goes on from may have left too few slots for a step
        while not stop.is_set():
            batch = self._batches.next(stop)
            self._meet_partitions()
            if batch is not None:
                self._settle(batch)
            else:
                self.count()
            self._parts.erasure.look_if_due()
            self._parts.publisher.publish_if_due(self._progress, self._snapshot)
            self._parts.publisher.watch_if_due(lambda: self._parts.holdout.held)
            self._hold_out_no_more()
            self._checkpoint_if_due()
            self._commit_if_due()
            at_boundary()
        self.count()

    def finish(self, deadline: Deadline) -> None:
        """Publish what was learned since the last version, checkpoint, and commit positions, before the deadline.

        Weights that are spoiled are not checkpoint: the next start goes on from before, and learns the events since
        again.
        """
        self._parts.erasure.look()
        if self._parts.erasure.settled and not self.spoiled and not self.raised.is_all:
            self._parts.checkpointer.checkpoint_last(self._moment, deadline, self._standing)
        else:
            self._parts.checkpointer.wait(deadline)
        self._parts.publisher.publish_last(self._progress(), self._snapshot, deadline)
        self._next_commit = 0.0
        self._commit_if_due()
        self._parts.erasure.finish(deadline)

    def _settle(self, batch: Batch) -> None:
        """Do all that a batch is about, in an order in which a crash costs nothing.

        Only the first is durable, and may be done again: a crash anywhere loses the batch whole, and a restart learns
        it again from the checkpoint.

        1. Write down what tombstones erase, which alone is durable, and leave out what is erased.
        2. Take the old events that were chosen some steps ago: no event is replayed in the step that learns it.
        3. Test, then train. A step that is not finite leaves the weights as they were; events on which the model raises
           are skipped, and the others learned.
        4. Offer the events to the store: after the step, and only if they were learned. Choose for a later step.
        5. Put held-out events into the holdout set.
        6. Settle outcomes and positions: from here on a version says that it has learned them.
        """
        names = [account.name for account in self.ledger.partitions]
        batch = self._parts.erasure.filter(batch, lambda: self.ledger.positions)
        outcome, reason = Outcome.TRAINED, SkipReason.NONE
        if len(batch):
            result = self._step(batch)
            if result is not None and not result.finite:
                outcome, reason = Outcome.SKIPPED, SkipReason.NON_FINITE
        if self._parts.clerk is not None:
            stored_only = _not_known(batch.stored_only, self._parts.clerk.fields)
            columns = _in_order(batch.new if outcome is Outcome.TRAINED else {}, stored_only)
            if columns:
                embedding = columns.get(_EMBEDDING)
                self._parts.clerk.add(columns, names, None if embedding is None else embedding.astype(np.float32))
            self._plan_ahead()
        self._parts.holdout.add(batch.held_out, names)
        for span in batch.spans:
            self.ledger.advance(span, outcome, reason)
        if self.ledger.full:
            self.count()

    def count(self) -> None:
        """Let ledger and counters follow what was settled, which they do for several steps at once."""
        self.ledger.count()
        self._counters.move(self.ledger.partitions)

    def _step(self, batch: Batch) -> StepResult | None:
        """Learn a batch; the events on which the model raises leave it. None: all did."""
        begin = time.perf_counter()
        old, sample, probed = self._sampled(len(batch))
        self._parts.trainer.scale_learning_rate(self.drift.lr_factor)
        result, sample = self._tried(batch, old, sample)
        self.steps += 1
        self._metrics.learner.steps.inc()
        self._metrics.learner.step.observe(time.perf_counter() - begin)
        if result is None:
            self.raised.steps_in_a_row += 1
            return None
        if not result.finite:
            self._metrics.learner.non_finite.inc()
            self.non_finite_in_a_row += 1
            log.warning(
                "step %d: loss %s or its gradient is not finite; skipped %s",
                *(self.steps, result.loss, self._ranges(batch.new)),
            )
            return result
        self.non_finite_in_a_row = self.raised.steps_in_a_row = 0
        self.rows_new += len(batch)
        self.rows_replay += result.replayed
        self._trained_new.inc(len(batch))
        self._trained_old.inc(result.replayed)
        self._measure(Scored(len(batch), result.score, result.loss_new), probed)
        self._tell_store(batch, sample, result)
        return result

    def _tried(
        self, batch: Batch, old: Sequence[Examples], sample: Sample | None
    ) -> tuple[StepResult | None, Sample | None]:
        """Step without the events on which the model raises, as if they had not come; return what is left of a
        sample."""
        trainer = self._parts.trainer
        while len(batch):
            try:
                return trainer.step(trainer.examples(batch.new), old), sample
            except RaisingEventsError as exc:
                error = exc
            samples, raised = [len(each) for each in old], np.zeros(len(batch) + sum(map(len, old)), np.bool_)
            raised[error.places] = True
            new, replayed = raised[: len(batch)], raised[len(batch) :]
            if sample is not None and replayed.any():
                sample = self._replay_no_more(sample, replayed, error.said)
                old = examples_of(sample, samples) if len(sample) else ()
            if new.any():
                self._skip(batch, new, error.said)
        return None, sample

    def _skip(self, batch: Batch, raised: NDArray[np.bool_], said: str) -> None:
        """Settle new events on which the model raised."""
        left, count = {name: batch.new[name][raised] for name in ("partition", "offset")}, int(raised.sum())
        batch.skip(raised, SkipReason.MODEL)
        self._metrics.learner.raised.labels("new").inc(count)
        self.raised.add(self.rows_new + self.raised.new + count, count, said)
        self.raised.log("which are skipped", self._names(left), said)

    def _replay_no_more(self, sample: Sample, raised: NDArray[np.bool_], said: str) -> Sample:
        """Take old events on which the model raised out of the store, and return the rest of a sample."""
        assert self._parts.clerk is not None
        records = sample.records[raised]
        self._parts.clerk.remove(sample.slots[raised], records)
        self._metrics.learner.raised.labels("replay").inc(len(records))
        self.raised.log("which are replayed no more", self._names(records), said)
        return sample.of(~raised)

    def _hold_out_no_more(self) -> None:
        """Take events on which the model raised out of the held-out set."""
        for found in (self._parts.publisher.raised, self._probe.raised):
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

    def _sampled(self, new: int) -> tuple[Sequence[Examples], Sample | None, ScoreSum | None]:
        """Sample what the step replays, and score some old events first in a step that measures how much is erased."""
        clerk, trainer, wanted = self._parts.clerk, self._parts.trainer, self._replayed(new)
        if clerk is None:
            return (), None, None
        samples = trainer.strategy.samples(wanted)
        probes = self._probe.sampled(self.steps) if clerk.planned(self.steps) else 0
        if not max(sum(samples), probes):
            return (), None, self._probe.score(self.steps, None)
        with self._metrics.replay.sample.time():
            sampled = clerk.sample(self.steps, max(sum(samples), probes))
        probed = self._probe.score(self.steps, sampled)
        sample = sampled.first(sum(samples))
        return examples_of(sample, samples) if len(sample) else (), sample, probed

    def _measure(self, new: Scored, probed: ScoreSum | None) -> None:
        """Take note of how well new events were predicted, and of old ones where they were probed."""
        self.prequential.add(new)
        if math.isfinite(new.score):
            self.ratio.learned(ScoreSum(new.rows, new.score), probed)
        elif not self._told_of_score:
            self._told_of_score = True
            log.warning(
                "step %d: the task's score of its events is %s; scores that are not finite are left out of what is "
                "measured, and not told of again",
                *(self.steps, new.score),
            )
        if self.drift.add(self.steps, new):
            self._metrics.learner.drifts.inc()
            if self.drift.checkpoints:
                self._parts.checkpointer.ask()
            else:
                self._respond()

    def _respond(self) -> None:
        """Do what is to be done about a drift."""
        self._parts.trainer.on_drift()
        self.drift.respond()

    def _tell_store(self, batch: Batch, sample: Sample | None, result: StepResult) -> None:
        """Hand on what the step found about its events to a store that asks: the losses and embeddings of old ones.

        Embeddings of new events become a column of theirs. On a device that is not the host the copies wait for the
        update, which was queued before them; a store that does not ask costs no copy.
        """
        clerk = self._parts.clerk
        if clerk is None:
            return
        new: NDArray[np.float32] | None = None
        old: NDArray[np.float32] | None = None
        if result.embedding_N is not None:
            found = result.embedding_N.cpu().numpy()
            new, old = found[: len(batch)], found[len(batch) :]
            batch.new[_EMBEDDING] = new
            clerk.query_neighbours(self.steps, new)
        if self._parts.trainer.strategy.keeps_output and result.output_B is not None:
            batch.new[OUTPUT] = result.output_B.float().cpu().numpy()
        if sample is not None and len(sample) and result.old_R is not None and clerk.listens:
            clerk.update_priorities(sample, result.old_R.float().cpu().numpy(), old)

    @property
    def replay_ratio(self) -> float:
        """Old events for each new one in the next step."""
        return self.ratio.now * self.drift.replay_factor if self._parts.clerk is not None else 0.0

    def _replayed(self, new: int) -> int:
        """Return how many events to replay for so many new ones; what rounding leaves is made up for later."""
        if self._parts.clerk is None or not self._parts.clerk.planned(self.steps):
            return 0
        self._replay_debt += new * self.replay_ratio
        whole = int(self._replay_debt)
        self._replay_debt -= whole
        return whole

    def _plan_ahead(self) -> None:
        if self._parts.clerk is not None:
            most = sum(self._parts.trainer.strategy.samples(int(self._step_size * self.replay_ratio) + 1))
            probing = max(most, self._settings.batch_size)
            wanted = lambda step: probing if self._probe.sampled(step) else most  # noqa: E731
            self._parts.clerk.plan_ahead(self.steps, wanted)

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
            self._parts.erasure.meet(partitions, lambda: self.ledger.positions)
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
    def too_many_raised(self) -> str | None:
        """One sentence when the model raises on too many of the new events. Any thread may ask."""
        return self.raised.problem(self.rows_new + self.raised.new)

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
        self.ledger.restore(state["ledger"])
        self.rates.restore(state.get("rates", {}), self.ledger.partitions)
        self.prequential.restore(state["prequential"])
        self.drift.restore(state["drift"])
        self.ratio.restore(state["ratio"])
        parts.publisher.retention = retention_of(state["retention"])
        self.steps, self.rows_new, self.rows_replay = checkpoint.step, state["rows_new"], state["rows_replay"]
        self._replay_debt = state["replay_debt"]
        self._batches.restore(state.get("batches", {}))
        parts.lag.restore(state.get("lag", {}))
        parts.publisher.gate.restore(state.get("gate", {}))
        parts.publisher.go_on_from(self._progress(), self.ledger.trained_through)
        parts.trainer.restore_generators(checkpoint.tensors["rng"], state["rng"])
        if self.drift.pending:
            self._respond()

    def _moment(self, number: int) -> CapturedState:
        """Copy all that checkpoint `number` is made from; called between steps."""
        parts = self._parts
        self.rates.measure(self.ledger.partitions)
        tensors = parts.trainer.tensors() | {"holdout": parts.holdout.tensors()}
        tensors["rng"], rng_values = parts.trainer.generators()
        state = {
            "trainer": parts.trainer.state(),
            "ledger": self.ledger.state(),
            "rates": self.rates.state(),
            "prequential": self.prequential.state(),
            "drift": self.drift.state(),
            "ratio": self.ratio.state(),
            "retention": parts.publisher.retention.state(),
            "rows_new": self.rows_new,
            "rows_replay": self.rows_replay,
            "replay_debt": self._replay_debt,
            "rng": rng_values,
            OUTPUT: _shape_kept(parts.clerk),
            "batches": self._batches.state(),
            "lag": parts.lag.state(),
            "gate": parts.publisher.gate.state(),
            ERASED: parts.erasure.looked,
        }
        return CapturedState(
            self.steps, tensors, state, parts.clerk.store.begin_snapshot(number) if parts.clerk is not None else None
        )

    def _standing(self) -> object:
        """What tells one checkpoint from the next: a change of anything else comes with a change of these."""
        parts = self._parts
        return self.steps, self.ledger.state(), self.drift.state(), parts.publisher.retention, parts.erasure.records

    def _progress(self) -> Progress:
        """What tells one version from the next: steps, and positions, which held-out and bad events move as well."""
        return self.steps, tuple(self.ledger.positions.values())

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            step=self.steps,
            weights=self._parts.trainer.snapshot(),
            trained_through=self.ledger.trained_through,
            holdout=self._parts.holdout.held,
            accuracy_now=self.prequential.mean,
            learned=self.ledger.take_learned(),
        )

    def _checkpoint_if_due(self) -> None:
        """Write a checkpoint when it is due, but not while steps are not finite: it may be the weights, and the good
        checkpoints go.

        Nor while the model raises on everything: when it was corrected, the events since are learned after all.
        """
        if self._parts.erasure.settled and not self.non_finite_in_a_row and not self.raised.is_all:
            self._parts.checkpointer.checkpoint_if_due(self._moment, self._standing)
        else:
            self._parts.checkpointer.end_if_written()
        if self.drift.pending and not self._parts.checkpointer.asked:
            self._respond()

    def _commit_if_due(self) -> None:
        if time.monotonic() >= self._next_commit:
            offsets = {index: account.position.offset for index, account in enumerate(self.ledger.partitions)}
            self._parts.source.commit(offsets)
            self._next_commit = time.monotonic() + _COMMIT_SECONDS


def _shape_kept(clerk: BackgroundStore | None) -> list[int] | None:
    """Return the shape of the output that a store keeps with each event; None when it keeps none."""
    return None if clerk is None or OUTPUT not in clerk.fields else list(clerk.fields[OUTPUT][1])


def _not_known(columns: dict[str, Array], fields: Fields) -> dict[str, Array]:
    """Say of events which the model has not been run on that its output is not known, where the store keeps that."""
    if not columns or OUTPUT not in fields:
        return columns
    dtype, shape = fields[OUTPUT]
    return {**columns, OUTPUT: np.full((len(columns["row"]), *shape), np.nan, dtype)}


def _in_order(first: dict[str, Array], second: dict[str, Array]) -> dict[str, Array]:
    """Join two sets of rows in the order of (partition, offset, row), in which the store takes them up at no cost."""
    if not first or not second:
        return first or second
    if _EMBEDDING in first:
        second = {**second, _EMBEDDING: np.full((len(second["row"]), first[_EMBEDDING].shape[1]), np.nan, np.float32)}
    joined = {name: np.concatenate([column, second[name]]) for name, column in first.items()}
    order = np.lexsort((joined["row"], joined["offset"], joined["partition"]))
    return {name: column[order] for name, column in joined.items()}
