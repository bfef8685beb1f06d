"""One round of steps of learning: replay, test, train, learn features, respond to a drift, store.

Whatever learns as a pipeline does takes its steps here: the loop with the events of a stream, a backtest with those of
a file.
"""

import itertools
import logging
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client import Counter

from anabranch.core.failures import out_of_memory
from anabranch.ingest.events.block import Array, SkipReason
from anabranch.ingest.events.partition import TopicPartition
from anabranch.learner.device.out_of_memory import MemoryRetry
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.outcomes import Predictions, predictions_of
from anabranch.learner.evaluate.stream_monitor import Scored, StreamMonitor
from anabranch.learner.loop.loop_state import StepState
from anabranch.learner.loop.replay_feed import NOTHING, Replay, ReplayFeed, RoundSample
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.faulty_events import Raised, RaisingEventsError
from anabranch.learner.model.features.learned import features_of
from anabranch.learner.model.features.numbers import FAR, MOST, LearnedNumber, OutlierBounds, empty_bounds
from anabranch.learner.model.task import Task
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.stream.batch import Batch, without_raised
from anabranch.learner.train.step_result import RoundEvents, StepResult
from anabranch.learner.train.trainer import Trainer

_T = TypeVar("_T")


_MANY = 10
_MOST_LOGGED = 20
_OF_CLOCK = 1 / 16
"""Part of the time by the clock that counts for the length of a round, whatever the processor did."""


@dataclass(frozen=True)
class Taken:
    """A step that was taken.

    Attributes:
        batch: its events, without those on which the model raised, and without any where the step was not finite.
        replay: the old events.
        result: None if the model raised on all new events, or there were none.
        seconds: how long it took.
    """

    batch: Batch
    replay: Replay
    result: StepResult | None
    seconds: float = 0.0

    @property
    def finite(self) -> StepResult | None:
        """The result of a step that was finite, else None."""
        return self.result if self.result is not None and self.result.finite else None


log = logging.getLogger(__name__)


class ValueWatch:
    """Logs values that are far from all others with their offset, the first ones of a process.

    These are floats that a model gets as they are, or has to predict: nothing learns from them but weights, in one step
    of a bounded gradient. Used by the loop's thread; any may read. Legend: B events, F columns.
    """

    def __init__(self, known: Collection[str]) -> None:
        """Watch all features of floats but the `known` ones, which are scaled; and labels of a regression."""
        self._known = {f"feature.{name}" for name in known}
        self._names: list[str] | None = None
        self._bounds: OutlierBounds | None = None
        self.said: list[str] = []
        """What was logged."""
        self.warning: str | None = None
        """One sentence on the last of them."""

    def observe(self, columns: Mapping[str, Array], partitions: Sequence[TopicPartition]) -> None:
        """Take the new events of a step; `partitions` are those that their column points into."""
        if self._names is None:
            self._names = [name for name, column in columns.items() if self._is_watched(name, column)]
            self._bounds = OutlierBounds(empty_bounds(len(self._names), exponents=600))
        if not self._names or not len(columns["offset"]):
            return
        assert self._bounds is not None
        value_BF = np.stack([_largest(columns[name]) for name in self._names], axis=1)
        _, _, reach_F = self._bounds.add(value_BF)
        far_BF = (self._bounds.distance(value_BF) > FAR * reach_F) & (reach_F > 0)
        for row, index in np.argwhere(far_BF).tolist() if far_BF.any() else ():
            name = partitions[int(columns["partition"][row])]
            where, at = f"{name.topic}[{name.partition}]", int(columns["offset"][row])
            what = self._names[index]
            key = f"schema.features.{what[8:]}" if what != "label" else "schema.label"
            command = f'"anabranch undo --offsets {where}@{at}..{at}"'
            self.warning = (
                f"{key} of {where}@{at} is as large as {value_BF[row, index]:g}, far from all others. "
                f"{command} takes the event out again; {key}.min and max refuse such values"
            )
            if len(self.said) < _MOST_LOGGED:
                self.said.append(self.warning)
                log.warning("%s", self.warning)

    def _is_watched(self, name: str, column: Array) -> bool:
        is_input = name.startswith("feature.") and name not in self._known
        return column.dtype.kind == "f" and (is_input or (name == "label" and column.ndim == 1))


def _largest(column: Array) -> NDArray[np.float64]:
    """Return the number of each event that is largest by its absolute value, float64 `[B]`; NaN where all are."""
    flat = column.reshape(len(column), -1)
    # A sixth of the time that numpy takes.
    of_torch = torch.from_numpy(flat)
    most, least = of_torch.amax(dim=1).numpy(), of_torch.amin(dim=1).numpy()
    if (unknown := np.isnan(most)).any():
        most[unknown], least[unknown] = np.fmax.reduce(flat[unknown], axis=1), np.fmin.reduce(flat[unknown], axis=1)
    largest: NDArray[np.float64] = np.where(most >= -least, most, least).astype(np.float64)
    return np.clip(largest, -MOST, MOST)


class NonFiniteSteps:
    """Counts consecutive steps that were skipped, since their loss or gradient was not finite.

    Used by the loop's thread; any may read.
    """

    def __init__(self, metric: Counter) -> None:
        self._metric = metric
        self.in_a_row = 0

    def add(self, step: int, loss: float, events: Mapping[str, Array], partitions: Sequence[TopicPartition]) -> None:
        """Count and log a step with the new events of these columns."""
        self._metric.inc()
        self.in_a_row += 1
        log.warning(
            "step %d: loss %s or its gradient is not finite; skipped %s", step, loss, _ranges(events, partitions)
        )

    @property
    def spoiled(self) -> bool:
        """Whether many consecutive steps were not finite, maybe because of the weights."""
        return self.in_a_row >= _MANY

    @property
    def problem(self) -> str | None:
        """One sentence when many consecutive steps are not finite."""
        if not self.spoiled:
            return None
        return (
            f"the last {self.in_a_row} steps were skipped because loss or gradient was not finite; check whether the "
            "weights are. No checkpoint is written until a step is finite again"
        )


def _ranges(columns: Mapping[str, Array], partitions: Sequence[TopicPartition]) -> str:
    """Return ranges of events as `topic[partition]@first..last`, for logs."""
    parts = []
    for index in np.unique(columns["partition"]).tolist():
        name = partitions[index]
        offsets = columns["offset"][columns["partition"] == index]
        parts.append(f"{name.topic}[{name.partition}]@{offsets.min()}..{offsets.max()}")
    return ", ".join(parts)


Queues = Sequence[deque[tuple[NDArray[np.uint64], str]]]
"""Hashes of held-out events on which the model raised, with the error; other threads add to them."""


class RaisingEvents:
    """Removes, counts and logs events on which the model raises. Used by the loop's thread."""

    def __init__(
        self,
        state: StepState,
        replay: ReplayFeed,
        holdout: HoldoutSet,
        queues: Queues,
        metric: Counter,
    ) -> None:
        """Start with no such events; see `LearningStep`. `metric`: counts events, by where they were removed."""
        self._state = state
        self._replay = replay
        self._holdout = holdout
        self.queues = queues
        self._metric = metric
        self.raised = Raised()

    @property
    def problem(self) -> str | None:
        """One sentence when the model raises on too many new events. Any thread may ask."""
        return self.raised.problem(self._seen)

    @property
    def _seen(self) -> int:
        """New events so far: those that were trained on, and those on which the model raised."""
        return self._state.rows_new + self.raised.new

    def remove(self, batch: Batch, replay: Replay, error: RaisingEventsError) -> Replay:
        """Skip the new events that `error` names, and remove the old ones from the store; return the remaining ones."""
        count = len(batch)
        raised = np.zeros(count + sum(map(len, replay.examples)), np.bool_)
        raised[error.indices] = True
        new, old = raised[:count], raised[count:]
        if old.any():
            replay = self.remove_old(replay, old, error.message)
        if rows := int(new.sum()):
            skipped = {name: batch.new[name][new] for name in ("partition", "offset")}
            batch.skip(new, SkipReason.MODEL)
            self._metric.labels("new").inc(rows)
            self.raised.add(self._seen + rows, rows, error.message)
            self.raised.log("which are skipped", self._names(skipped), error.message)
        return replay

    def remove_old(self, replay: Replay, rows: NDArray[np.bool_], message: str) -> Replay:
        """Remove old events of a step from the store, and return the others; `message`: of the error on one of them."""
        replay, records = self._replay.remove(replay, rows)
        self._metric.labels("replay").inc(len(records))
        self.raised.log("which are replayed no more", self._names(records), message)
        return replay

    def clean_holdout(self) -> None:
        """Remove events on which the model raised from the holdout set."""
        for queue in self.queues:
            while queue:
                hashes, message = queue.popleft()
                removed = self._holdout.remove(hashes)
                if removed and (count := len(removed["offset"])):
                    self._metric.labels("held_out").inc(count)
                    self.raised.log("which are held out no more", self._names(removed), message)

    def _names(self, columns: Mapping[str, Array] | NDArray[np.void]) -> list[str]:
        """Return the names of events, as `topic[partition]@offset`."""
        names = [account.name for account in self._state.ledger.partitions]
        events = zip(columns["partition"].tolist(), columns["offset"].tolist(), strict=True)
        return [f"{names[index].topic}[{names[index].partition}]@{offset}" for index, offset in events]


class LearningStep:
    """Takes the steps of a learner. Used by one thread."""

    def __init__(
        self,
        trainer: Trainer,
        monitor: StreamMonitor,
        replay: ReplayFeed,
        holdout: HoldoutSet,
        queues: Queues,
        state: StepState,
        metrics: LearnerMetrics,
        memory: MemoryRetry,
    ) -> None:
        """Take what a step uses.

        Args:
            trainer: trains the model.
            monitor: measures the steps, and determines their replay ratio.
            replay: the source of old events, from whose store those on which the model raises are removed.
            holdout: from which held-out events on which it raises are removed.
            queues: names them.
            state: the partitions, and how many steps and events there were.
            metrics: count them too.
            memory: repeats what ran out of memory.
        """
        self._trainer = trainer
        self._monitor = monitor
        self._replay = replay
        self.raising_events = RaisingEvents(state, replay, holdout, queues, metrics.raised)
        self._raised = self.raising_events.raised
        self._state = state
        self._metrics = metrics
        self._trained_new, self._trained_old = (metrics.rows.labels(source) for source in ("new", "replay"))
        self._lr_factor = 1.0
        self.non_finite = NonFiniteSteps(metrics.non_finite)
        learned = features_of(trainer.model)
        self.values = ValueWatch(() if learned is None else learned.of(LearnedNumber))
        self.memory = memory
        self.copied: Callable[[Mapping[str, Array]], Examples] = trainer.examples
        """Returns the new events of a batch on the device."""
        self.scored: Callable[[Batch], Scored | None] = _not_scored
        """Returns the scores of the events of a batch that have their label, from before the round, with those of
        baselines, which learn the labels; None: they are those of the steps' own predictions."""
        self.request_checkpoint: Callable[[], object] | None = None
        """Requests the checkpoint that is written before the response to a drift; None: there are no checkpoints."""
        self.measures_each = False
        """Whether each step is measured by itself, and not all of a round at once, so that a response to a drift comes
        after the same step however long rounds are."""
        self.seconds = 0.0
        """How long a step of the last round took. On a CPU that is time of the processor: what others take from a busy
        one is no reason to do in each step what is done once a round. But a step may wait, for requests or for other
        ranks: a part of the time by the clock counts at least."""
        self._clock = time.thread_time if trainer.device.type == "cpu" else time.perf_counter

    def take(self, batch: Batch, names: Sequence[TopicPartition]) -> Sequence[Taken]:
        """Learn the new events of a batch, in one step or several, and add its events to the store.

        For each step:

        1. Sample the old events that were chosen some steps before: no event is replayed in the round in which it is
           trained on.
        2. Test, then train, then learn features from the new events. A step that is not finite leaves all as it was;
           events on which the model raises are skipped, and the others trained on.

        Then for all of them:

        3. Measure the steps, and respond to a drift.
        4. Add the events to the store: only those that were trained on. Choose those of later steps.

        Args:
            batch: its events; those on which the model raises leave it, and of several steps those of a step that was
                not finite.
            names: of the partitions that its column `partition` points into.
        """
        if not batch.new:
            self.memory(partial(self._replay.add, self._state.steps, batch, NOTHING, None, names), undone=False)
            return ()
        first, everything, steps = self._state.steps, batch.new, batch.steps()
        begin, since, (new, old) = self._clock(), time.perf_counter(), self._inputs(batch, steps)
        taken = self._take_at_once(steps, new, old, names)
        copies = itertools.repeat(None) if new is None else iter(new.split([*map(len, steps)]))
        for each in steps[len(taken) :]:
            taken.append(self._take_step(each, next(copies), names))
            if self.measures_each:
                self._measure(each, taken[-1:])
        self.seconds = max(self._clock() - begin, _OF_CLOCK * (time.perf_counter() - since)) / len(steps)
        self._count(taken)
        if any(each.result is not None for each in taken):
            self.values.observe(batch.new if len(taken) == 1 else without_raised(everything, steps), names)
        for step in taken:
            if step.result is not None and not step.result.finite:
                step.batch.skip(np.ones(len(step.batch), np.bool_), SkipReason.NON_FINITE)
        batch.skip_of_steps(steps)
        if not self.measures_each:
            self._measure(batch, taken)
        added = taken
        if len(taken) > 1 and self._replay.adds_rounds and all(_has_no_embedding(each.result) for each in taken):
            added, first = [Taken(batch, NOTHING, None)], self._state.steps - 1
        for number, step in enumerate(added, first + 1):
            self.memory(partial(self._replay.add, number, step.batch, step.replay, step.result, names), undone=False)
        return taken

    def _inputs(self, batch: Batch, steps: Sequence[Batch]) -> tuple[Examples | None, RoundSample | None]:
        """Copy the new events of all steps of a round to the device at once, and sample for all.

        None where each step has to do so: where it is alone, and where the device has no memory for all.
        """
        if len(steps) > 1:
            try:
                old = self._replay.sample_round(self._state.steps, [*map(len, steps)])
                return self.copied(batch.new), old
            except RuntimeError as exc:
                if not out_of_memory(exc):
                    raise
        return None, None

    def _take_at_once(
        self, steps: Sequence[Batch], new: Examples | None, old: RoundSample | None, names: Sequence[TopicPartition]
    ) -> list[Taken]:
        """Take the steps of a round with one wait for the device; return none where they are to be taken one by one."""
        if new is None or old is None or self.measures_each:
            return []
        begin, state = time.perf_counter(), self._state
        self._set_lr_factor()
        sizes = [(len(each), *samples) for each, samples in zip(steps, old.sizes, strict=True)]
        take = partial(self._trainer.steps, RoundEvents(new, old.examples, sizes))
        if (results := self.memory(take, repeatable=False)) is None:
            return []
        seconds = (time.perf_counter() - begin) / len(steps)
        return [
            self._taken(each, self._replay.sample(state.steps, len(each)), result, seconds, names)
            for each, result in zip(steps, results, strict=True)
        ]

    def _take_step(self, batch: Batch, copy: Examples | None, names: Sequence[TopicPartition]) -> Taken:
        begin = time.perf_counter()
        replay = self.memory(partial(self._replay.sample, self._state.steps, len(batch)))
        replay, result = self._train(batch, replay, copy)
        return self._taken(batch, replay, result, time.perf_counter() - begin, names)

    def _taken(
        self,
        batch: Batch,
        replay: Replay,
        result: StepResult | None,
        seconds: float,
        names: Sequence[TopicPartition],
    ) -> Taken:
        """Count a step that was taken; those of a round in their order."""
        state = self._state
        state.steps += 1
        if result is None:
            self._raised.steps_in_a_row += 1
        elif not result.finite:
            self.non_finite.add(state.steps, result.loss, batch.new, names)
        else:
            self.non_finite.in_a_row = self._raised.steps_in_a_row = 0
            state.rows_new += result.rows
            state.rows_replay += result.replayed
        return Taken(batch, replay, result, seconds)

    def respond(self) -> None:
        """Respond to a drift."""
        self._trainer.on_drift()
        self._monitor.respond()

    def _train(self, batch: Batch, replay: Replay, copy: Examples | None) -> tuple[Replay, StepResult | None]:
        """Step without the events on which the model raises, as if they had not come.

        `copy`: the events of the batch on the device; None: they are to be copied.

        Ranks that split the model only know that some event of the step is one. They try the new ones alone: where that
        is no error, the old ones are the cause, and leave the store.

        Returns:
            The remaining old events, and the result; None if the model raised on all new events, which leave the batch.
        """
        trainer = self._trainer
        self._set_lr_factor()
        suspects: tuple[Replay, str] | None = None
        while batch.new:
            try:
                new, copy = copy or self.memory(partial(self.copied, batch.new)), None
                step = partial(trainer.step, new, replay.examples, batch.new)
                result = self.memory(step, repeatable=False)
            except RaisingEventsError as exc:
                error = exc
            else:
                if suspects is not None:
                    removed, message = suspects
                    everything = np.ones(sum(map(len, removed.examples)), np.bool_)
                    self.raising_events.remove_old(removed, everything, message)
                return replay, result
            if error.of_batch and replay.examples:
                suspects, replay = (replay, error.message), Replay(probed=replay.probed)
            else:
                replay = self.raising_events.remove(batch, replay, error)
        return replay, None

    def _set_lr_factor(self) -> None:
        if (factor := self._monitor.adjustments.lr_factor) != self._lr_factor:
            self._trainer.update.schedule.scale = factor
            self._lr_factor = factor

    def _count(self, taken: Sequence[Taken]) -> None:
        """Count the steps of a round."""
        metrics, finite = self._metrics, [each.finite for each in taken]
        metrics.steps.inc(len(taken))
        for each in taken:
            metrics.step.observe(each.seconds)
        self._trained_new.inc(sum(result.rows for result in finite if result is not None))
        self._trained_old.inc(sum(result.replayed for result in finite if result is not None))

    def _measure(self, batch: Batch, taken: Sequence[Taken]) -> None:
        """Measure steps with the new events of a batch, those that were finite, and respond where they show a drift."""
        finite = [each for each in taken if each.finite is not None]
        if not finite:
            return
        scored, results = self.scored(batch), [each.finite for each in finite if each.finite is not None]
        if scored is None and len(finite) > 1 and not all(math.isfinite(result.score) for result in results):
            for each in finite:  # a step whose score is not finite is left out alone
                self._measure(each.batch, [each])
            return
        scored = scored or self._by_own_predictions(batch, finite)
        probed = [each.replay.probed for each in finite if each.replay.probed is not None]
        old = reduce(operator.add, probed) if probed else None
        adjustments = self._monitor.observe(self._state.steps, scored, old, len(finite))
        if adjustments.drifted:
            self._metrics.drifts.inc()
            if adjustments.checkpoint_first and self.request_checkpoint is not None:
                self.request_checkpoint()
            else:
                self.respond()

    def _by_own_predictions(self, batch: Batch, finite: Sequence[Taken]) -> Scored:
        """Return the scores of the steps' own predictions, and of baselines, of events with a label."""
        labelled = batch.new["labelled"].astype(np.bool_, copy=False)
        label, group = batch.new["label"], batch.new["group_hash"]
        if not (all_labelled := bool(labelled.all())):
            label, group = label[labelled], group[labelled]
        results = [each.result for each in finite if each.result is not None]
        score, loss = sum(each.score for each in results), sum(each.loss_new for each in results)
        outputs = [each.output_B for each in results if each.output_B is not None]
        # Not where a step has outputs of one rank alone, or also of events without a label.
        if all_labelled and len(outputs) == len(finite) and sum(map(len, outputs)) == len(label):
            predictions = predictions_of(self._trainer.task, outputs, label, group)
        else:
            predictions = tuple(_predictions(self._trainer.task, finite))
        return Scored(len(label), score, loss, self._monitor.baselines.add(label, group), predictions)


def _has_no_embedding(result: StepResult | None) -> bool:
    return result is None or result.embedding_N is None


def _not_scored(_batch: Batch) -> None:
    """Leave the scores of all events to the predictions of their steps."""


def _predictions(task: Task, taken: Sequence[Taken]) -> Iterator[Predictions]:
    """Yield the predictions of new events that have a label, of each step; of several ranks, those of this one."""
    for each in taken:
        output_B = None if each.result is None else each.result.output_B
        if output_B is None:
            continue
        new = {name: each.batch.new[name][: len(output_B)] for name in ("label", "labelled", "group_hash")}
        labelled_B = new.pop("labelled").astype(np.bool_)
        if not labelled_B.all():
            new = {name: column[labelled_B] for name, column in new.items()}
            output_B = output_B[torch.from_numpy(labelled_B).to(output_B.device)]
        yield from predictions_of(task, [output_B], new["label"], new["group_hash"])
