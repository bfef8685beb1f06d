"""Feeds old events into the steps: how many to replay, their sample, and what the store is sent after a step."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Histogram
from typing_extensions import override

from anabranch.ingest.events.block import Array, SkipReason
from anabranch.ingest.events.partition import TopicPartition
from anabranch.learner.errors import MemoryShortageError
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.replay_ratio import Ratio, ScoreSum
from anabranch.learner.evaluate.stream_monitor import StreamMonitor
from anabranch.learner.model.examples import (
    EARLY,
    OUTPUT,
    OUTPUTS,
    Early,
    Examples,
    all_examples_of,
    examples_of,
    sizes_of,
)
from anabranch.learner.model.faulty_events import RaisingEventsError
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.stream.batch import Batch
from anabranch.learner.stream.batches import MOST_STEPS
from anabranch.learner.train.step_result import StepResult
from anabranch.learner.train.trainer import Trainer
from anabranch.replay.background_store import BackgroundStore
from anabranch.replay.reservoir.reservoir import WAITED
from anabranch.replay.row_layout import Fields
from anabranch.replay.sample_plan import AHEAD, Sample, StepRng

_IDENTITY = ("partition", "offset", "row")
_EMBEDDING = "embedding"
"""A column that the feed adds to the events of a step: their embedding, NaN where it is not known."""
ENOUGH = 100
"""Fewest older held-out events that are scored in place of stored ones."""
_SEED = 0x3C6EF372


@dataclass(frozen=True)
class Replay:
    """The old events of one step.

    Attributes:
        examples: the events as the strategy takes them, one part for each of its samples; may be empty.
        sampled: the events as the store sampled them, maybe with those of other steps; None without a sample.
        probed: scores of old events before the step, where it measures forgetting.
        rows: which of the events that were sampled are of this step; None: all.
    """

    examples: Sequence[Examples] = ()
    sampled: Sample | None = None
    probed: ScoreSum | None = None
    rows: slice | None = None

    @property
    def sample(self) -> Sample | None:
        """The events of this step as the store sampled them; None without a sample."""
        return self.sampled if self.sampled is None or self.rows is None else self.sampled.part(self.rows)


@dataclass(frozen=True)
class RoundSample:
    """The old events of the steps of a round.

    Attributes:
        examples: of all steps; None: there are none.
        sizes: of each step, how many events each of its samples has.
    """

    examples: Examples | None
    sizes: Sequence[Sequence[int]]


NOTHING = Replay()
"""No old events."""


class ReplayFeed:
    """The source of old events: there are none. Used by the loop's thread."""

    @property
    def ratio(self) -> float:
        """Old events for each new one in the next step."""
        return 0.0

    @property
    def output_shapes(self) -> dict[str, list[int] | None]:
        """The shape of each output that may be stored with an event, by column; None: it is not stored."""
        return dict.fromkeys(OUTPUTS)

    @property
    def raised(self) -> deque[tuple[NDArray[np.uint64], str]]:
        """Hashes of holdout events on which the model raised, with the error: the loop removes both."""
        return deque()

    def sample_round(self, step: int, new: Sequence[int]) -> RoundSample | None:
        """Sample for all steps of a round at once, where that is possible: `sample` then has them.

        Args:
            step: the first step.
            new: new events of each step.

        Returns:
            The old events of all steps; None where each step has to sample its own.
        """
        return RoundSample(None, [()] * len(new))

    def sample(self, step: int, new: int) -> Replay:
        """Return the old events to replay with `new` new ones."""
        return NOTHING

    @property
    def adds_rounds(self) -> bool:
        """Whether the events of a round are added at once, and not those of each step by themselves."""
        return True

    def ready(self, step: int, step_size: int) -> int:
        """Return how many steps of `step_size` new events, from `step` on, a round may have at most."""
        return MOST_STEPS

    def remove(self, replay: Replay, rows: NDArray[np.bool_]) -> tuple[Replay, NDArray[np.void]]:
        """Remove rows of a sample from the store; return the other ones, and the records of those removed."""
        raise AssertionError(replay, rows)

    def add(
        self, step: int, batch: Batch, replay: Replay, result: StepResult | None, names: Sequence[TopicPartition]
    ) -> None:
        """Add the events of a finished step or round to the store, update the priorities of those that it replayed, and
        prefetch the samples of the next steps, the first of which is `step`."""

    def prefetch(self, step: int) -> None:
        """Choose the samples of the next steps, the first of which is `step`."""

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint: those with which a feed with a store begins."""
        return {"debt": 0.0}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""


class Probe:
    """Scores held-out events, except the youngest, if there are enough of them; else events of the store.

    A model memorises the events of a small store: their scores stay high while the model forgets similar events.
    """

    def __init__(self, ratio: Ratio, holdout: HoldoutSet, trainer: Trainer, rows: int) -> None:
        """Take the ratio, which chooses the steps that probe, and the number of events that each of them scores."""
        self._ratio = ratio
        self._holdout = holdout
        self._trainer = trainer
        self._rows = rows
        self._rng = StepRng(_SEED)
        self.raised: deque[tuple[NDArray[np.uint64], str]] = deque()
        """Hashes of held-out events on which the model raised, and the error; the loop removes them from the set."""

    def sampled(self, step: int) -> int:
        """Return how many events of the store a step has to sample for the probe."""
        return self._rows if self._ratio.probes(step) and self._holdout.older < ENOUGH else 0

    def score(self, step: int, sample: Sample | None) -> ScoreSum | None:
        """Score old events if the step probes.

        Returns None in other steps, without old events, where the model raises, where the device has no memory for it,
        and for scores that are not finite.
        """
        if not self._ratio.probes(step):
            return None
        held_out: Mapping[str, Array] = {}
        if (older := self._holdout.older) >= ENOUGH:
            held_out = self._holdout.take(self._rng.for_step(step).integers(older, size=self._rows))
            examples = self._trainer.examples(held_out)
        elif sample is not None and len(sample):
            examples = examples_of(sample.first(self._rows), (self._rows,))[0]
        else:
            return None
        try:
            rows, score = self._trainer.probe(examples)
        except RaisingEventsError as exc:
            if held_out:
                self.raised.append((held_out["hash"].astype(np.uint64)[exc.indices], exc.message))
            return None
        except MemoryShortageError:
            return None
        return ScoreSum(rows, score) if math.isfinite(score) else None


def make_feed(
    store: BackgroundStore | None,
    settings: LearnerSettings,
    ranks: int,
    monitor: StreamMonitor,
    holdout: HoldoutSet,
    trainer: Trainer,
    timer: Histogram,
) -> ReplayFeed:
    """Return the feed of a store, or of none; `monitor` sets how much a step replays, and which measure forgetting."""
    if store is None:
        return ReplayFeed()
    probe = Probe(monitor.ratio, holdout, trainer, settings.batch_size)
    step_size = settings.batch_size * ranks
    return StoreFeed(store, trainer, monitor, probe, step_size, timer, fixed=settings.deterministic)


class StoreFeed(ReplayFeed):
    """The feed of a store.

    A step replays what was chosen some steps before: no event is replayed in the round that trains on it. The longer
    rounds are, the more steps ahead samples are chosen; not where steps have to repeat bit for bit.
    """

    def __init__(
        self,
        store: BackgroundStore,
        trainer: Trainer,
        monitor: StreamMonitor,
        probe: Probe,
        step_size: int,
        timer: Histogram,
        *,
        fixed: bool = False,
    ) -> None:
        """Start with no debt.

        Args:
            store: from which only this feed samples.
            trainer: whose strategy determines how many samples a step takes, and of how many events.
            monitor: determines the replay ratio, and in which steps old events are scored.
            probe: scores them.
            step_size: new events of a full step.
            timer: observes how long sampling takes.
            fixed: whether what is replayed must not depend on how long rounds are.
        """
        self._fixed = fixed
        self._ahead, self._last = AHEAD, 0
        self._store = store
        self._strategy = trainer.strategy
        self._monitor = monitor
        self._probe = probe
        self._step_size = step_size
        self._timer = timer
        self._debt = 0.0
        """The fraction of an event that rounding left over, for the next steps."""
        self._sampled: dict[int, Sample] = {}
        """The samples of steps that ran out of memory after the store had sampled."""
        self._of_round: dict[int, tuple[Replay, float]] = {}
        """What `sample_round` has sampled, by step, with the debt that the step leaves."""

    @property
    @override
    def ratio(self) -> float:
        return self._monitor.adjustments.replay_ratio

    @property
    @override
    def output_shapes(self) -> dict[str, list[int] | None]:
        fields = self._store.fields
        return {name: list(fields[name][1]) if name in fields else None for name in OUTPUTS}

    @property
    @override
    def raised(self) -> deque[tuple[NDArray[np.uint64], str]]:
        return self._probe.raised

    @override
    def sample_round(self, step: int, new: Sequence[int]) -> RoundSample | None:
        self._of_round.clear()
        if self._monitor.measures:
            return None
        debt, debts, samples = self._debt, list[float](), list[tuple[int, ...]]()
        for count in new:
            debt += count * self._monitor.adjustments.replay_ratio
            samples.append(self._strategy.samples(int(debt)))
            debts.append(debt := debt % 1.0)
        begin, counts = time.perf_counter(), [*map(sum, samples)]
        if not all(counts) or (events := self._store.sample(step, *counts)) is None:
            return None
        found = events.sizes
        self._timer.observe((time.perf_counter() - begin) / len(new))
        rows = [slice(end - n, end) for end, n in zip(accumulate(found), found, strict=True)]
        sizes_by_step = [sizes_of(n, each) for n, each in zip(found, samples, strict=True)]
        # Of a step whose events are too few for its samples no part is trained on.
        sizes = [size for own_sizes, n in zip(sizes_by_step, found, strict=True) for size in own_sizes or [n]]
        try:
            joined = all_examples_of(events)
            parts = iter(joined.split(sizes))
        except RuntimeError:  # of a device without memory: each step then copies its own events
            self._sampled = {number: events.part(each) for number, each in enumerate(rows, step)}
            raise
        for number, (own_sizes, own, debt) in enumerate(zip(sizes_by_step, rows, debts, strict=True), step):
            examples = [*islice(parts, max(1, len(own_sizes)))][: len(own_sizes)]
            self._of_round[number] = Replay(examples, events, rows=own), debt
        return RoundSample(joined, sizes_by_step) if all(sizes_by_step) else None

    @override
    def sample(self, step: int, new: int) -> Replay:
        """Return the old events to replay with `new` new ones, after scoring some where the step measures.

        May be called again for a step after the device had no memory.
        """
        if (of_round := self._of_round.pop(step, None)) is not None:
            replay, self._debt = of_round
            return replay
        sampled = self._sampled.get(step)
        measures = self._monitor.measures and self._monitor.ratio.probes(step)
        debt = self._debt + new * self._monitor.adjustments.replay_ratio
        samples = self._strategy.samples(int(debt))
        replayed, probes = sum(samples), self._probe.sampled(step) if measures else 0
        rows = max(replayed, probes)
        if sampled is None and rows:
            begin = time.perf_counter()
            if (sampled := self._store.sample(step, rows)) is not None:
                self._timer.observe(time.perf_counter() - begin)
                self._sampled[step] = sampled
        probed = self._probe.score(step, sampled) if measures else None
        sample = sampled.first(replayed) if probes and sampled is not None else sampled
        examples = examples_of(sample, samples) if sample is not None and len(sample.slots) else ()
        if sampled is not None or (not rows and self._store.planned(step)):
            self._debt = debt % 1.0
        self._sampled.pop(step, None)
        return Replay(examples, sample, probed)

    @override
    def remove(self, replay: Replay, rows: NDArray[np.bool_]) -> tuple[Replay, NDArray[np.void]]:
        sample = replay.sample
        assert sample is not None
        sizes = [len(part) for part in replay.examples]
        removed = sample.records[rows]
        self._store.remove(removed, sample.slots[rows])
        rest = sample.of(~rows)
        examples = examples_of(rest, sizes) if len(rest) else ()
        return Replay(examples, rest, replay.probed), removed

    @override
    def add(
        self, step: int, batch: Batch, replay: Replay, result: StepResult | None, names: Sequence[TopicPartition]
    ) -> None:
        """Update priorities by a step's losses, then add its events with embedding and output, where those are stored,
        and prefetch the samples of the next steps.

        Events without a label are added as well; new ones only where the step was finite, and not before their label is
        final. On a device that is not the host the copies wait for the update, which was queued before them; a store
        that does not ask costs no copy. Nothing is added when they run out of memory, so that this may be called again.
        """
        finite = result is None or result.finite
        new = dict(batch.new) if finite else {}
        for name in OUTPUTS:
            if name not in self._store.fields:
                new.pop(name, None)
        if result is not None and finite:
            self._add_outputs(step, new, replay.sample, result)
        new = self._final(new, names)
        stored_only = self._final(dict(batch.stored_only), names)
        columns = _first_read(_in_order(new, _with_unknown_outputs(stored_only, self._store.fields)))
        if columns:
            embedding = columns.get(_EMBEDDING)
            self._store.add(columns, names, None if embedding is None else embedding.astype(np.float32, copy=False))
        if not self._fixed:
            self._ahead = max(AHEAD, 2 * min(MOST_STEPS, 2 * (step - self._last)))
        self._last = step
        self._store.plan_ahead(step, self._planned_rows, self._ahead)

    def _final(self, new: dict[str, Array], names: Sequence[TopicPartition]) -> dict[str, Array]:
        """Return the new events whose label is final; remove from the store what had another one."""
        early = new.pop(EARLY, None)
        if early is None:
            return new
        taken_back = early == np.uint8(Early.TAKEN_BACK)
        if taken_back.any():
            self._store.remove({name: new[name][taken_back] for name in _IDENTITY}, partitions=names)
        known = early != np.uint8(Early.NEGATIVE)
        return {name: column[known] for name, column in new.items()} if known.any() else {}

    def _add_outputs(self, step: int, new: dict[str, Array], sample: Sample | None, result: StepResult) -> None:
        """Add columns of what the model returned for new events, and send the store what it returned for old ones."""
        # All copies come first: one that runs out of memory leaves the store as it was.
        losses: NDArray[np.float32] | None = None
        if self._store.listens and sample is not None and len(sample.slots) and result.old_R is not None:
            losses = result.old_R.float().cpu().numpy()
        if self._strategy.kind.keeps_output and result.output_B is not None:
            new[OUTPUT] = result.output_B.float().cpu().numpy()
        old: NDArray[np.float32] | None = None
        if result.embedding_N is not None:
            embedding_ND: NDArray[np.float32] = result.embedding_N.cpu().numpy()
            count = len(new["offset"])
            new[_EMBEDDING], old = embedding_ND[:count], embedding_ND[count:]
            self._store.query_neighbours(step, embedding_ND[:count])
        if losses is not None and sample is not None:
            self._store.update_priorities(sample, losses, old)

    @property
    @override
    def adds_rounds(self) -> bool:
        return not (self._fixed or self._store.listens or self._strategy.kind.keeps_output)

    @override
    def ready(self, step: int, step_size: int) -> int:
        if self._fixed:
            return self._ahead // 2  # so that the samples of a round are chosen while the one before it trains
        # The next round, which may be taken while this one is computed, has as many steps: its samples are chosen too.
        ready = min(MOST_STEPS, self._store.ready_through - step + 1, (self._store.through - step + 1) // 2)
        return ready if self._store.slots.free_at_once else min(ready, self._store.burst // step_size)

    @override
    def prefetch(self, step: int) -> None:
        self._last = step
        self._store.plan_ahead(step, self._planned_rows, self._ahead)

    def _planned_rows(self, step: int) -> int:
        """Return how many events are planned for a step: as many as a full step or its probe may need."""
        largest = int(self._step_size * self._monitor.adjustments.replay_ratio) + 1
        return max(sum(self._strategy.samples(largest)), self._probe.sampled(step))

    @override
    def state(self) -> dict[str, Any]:
        return {"debt": self._debt}

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self._debt = state["debt"]


def _first_read(columns: dict[str, Array]) -> dict[str, Array]:
    """Return the rows without those of the history that are read again, which were added the first time."""
    again = columns["reason"] == SkipReason.REPEATED if columns else np.zeros(0, np.bool_)
    if not again.any():
        return columns
    return {} if again.all() else {name: column[~again] for name, column in columns.items()}


def _with_unknown_outputs(columns: dict[str, Array], fields: Fields) -> dict[str, Array]:
    """Add the columns of outputs, where they are stored, to events that no model has seen: NaN."""
    if not columns:
        return columns
    missing = {name: fields[name] for name in OUTPUTS if name in fields}
    rows = len(columns["row"])
    return {**columns, **{name: np.full((rows, *shape), np.nan, dtype) for name, (dtype, shape) in missing.items()}}


def _in_order(first: dict[str, Array], second: dict[str, Array]) -> dict[str, Array]:
    """Join two sets of rows in the order of (partition, offset, row), in which the store adds them at no cost."""
    if not first or not second:
        return first or second
    if (WAITED in first) != (WAITED in second):
        first, second = ({WAITED: np.zeros(len(each["row"]), np.bool_), **each} for each in (first, second))
    if _EMBEDDING in first:
        second = {**second, _EMBEDDING: np.full((len(second["row"]), first[_EMBEDDING].shape[1]), np.nan, np.float32)}
    joined = {name: np.concatenate([column, second[name]]) for name, column in first.items()}
    order = np.lexsort((joined["row"], joined["offset"], joined["partition"]))
    return {name: column[order] for name, column in joined.items()}
