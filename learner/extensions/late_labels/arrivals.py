"""The predictions of events that begin to wait: made when these come, and scored once their labels are there.

Legend: N events of a call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.hold_out import held_out as is_held_out
from anabranch.ingest.events.identity import partition_base
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.settings.stream import HoldOut
from anabranch.learner.evaluate.event_time import EventTimePredictor
from anabranch.learner.evaluate.stream_monitor import NOT_SCORED, Scored
from anabranch.learner.extension import Extension
from anabranch.learner.extensions.late_labels.decided_batch import scored_rows
from anabranch.learner.extensions.late_labels.label_join import LabelJoin
from anabranch.learner.extensions.late_labels.stream_times import LabelClock
from anabranch.learner.model.examples import EARLY, Early
from anabranch.learner.stream.batch import Batch, Decided, step_ends
from anabranch.learner.stream.batches import MOST_LATE
from anabranch.learner.stream.lag import LagPolicy

_OUTPUT, _WAITING_INDEX = "event_time_output", "waiting_index"
"""Columns of a step that trains on early negatives: the output for the other events, and the index among `waiting`."""
_PARTS = 32
"""A batch has at most 1 / `_PARTS` of the events that the join has space for."""


class HeldOutRows:
    """Which events that have waited are held out. Used by one thread."""

    def __init__(self, hold_out: HoldOut) -> None:
        self._hold_out = hold_out
        self._bases: NDArray[np.uint64] = np.empty(0, np.uint64)

    def of(self, columns: Mapping[str, Array], partitions: Sequence[Partition]) -> NDArray[np.bool_]:
        """Return which of N events go to the holdout set if they have a label, bool `[N]`."""
        if not self._hold_out.fraction:
            return np.zeros(len(columns["offset"]), np.bool_)
        if len(partitions) > len(self._bases):
            self._bases = np.array([partition_base(partition.name) for partition in partitions], np.uint64)
        return is_held_out(self._hold_out, columns, self._bases[columns["partition"]])


class ArrivalPredictions(Extension):
    """Predicts events that begin to wait, before a round trains; with `early` it trains on them as negatives."""

    def __init__(
        self,
        join: LabelJoin,
        held_out: HeldOutRows,
        predictor: EventTimePredictor,
        lag: LagPolicy,
        step_size: int,
        clock: LabelClock,
    ) -> None:
        """Take what `LateLabels` has; `step_size`: events of a step, or 0 without early negatives."""
        self._join = join
        self._held_out = held_out
        self._predictor = predictor
        self._lag = lag
        self._step_size = step_size
        self._clock = clock
        self._records: NDArray[np.float32] | None = None
        """Of the events of the last batch that begin to wait: what was predicted of them."""
        self.unobserved = NOT_SCORED
        """The scores of decided events since the last round that trained: nothing was left to train on."""

    @override
    def most_late(self, steps: int) -> int:
        most = steps * self._step_size if self._step_size else MOST_LATE
        return min(most, max(1, self._join.payload.slots // _PARTS))

    @override
    def before_round(self, batch: Batch, partitions: Sequence[Partition]) -> Batch:
        # Not among the negatives: events that will be held out, and those whose label is there already.
        self._records = self._predictor.record(batch.waiting) if batch.waiting else None
        size = self._step_size
        if not batch.waiting or not size or self._lag.stores_only:
            return batch
        late = sum(len(columns["offset"]) for columns in (batch.waiting, batch.labels) if columns)
        most = size * max(1, late // size, len(batch.ends))
        chosen = self._join.waits(self.keyed(batch.waiting)) & ~self._held_out.of(batch.waiting, partitions)
        indices = np.flatnonzero(chosen)[: max(0, most - len(batch))]
        if not len(indices):
            return batch
        early = {name: column[indices] for name, column in batch.waiting.items()}
        early["label"], early["labelled"] = np.zeros_like(early["label"]), np.ones(len(indices), np.bool_)
        early |= {EARLY: np.full(len(indices), Early.NEGATIVE, np.uint8), _WAITING_INDEX: indices}
        if batch.new:
            plain = {EARLY: np.zeros(len(batch), np.uint8), _WAITING_INDEX: np.full(len(batch), -1)}
            outputs = {_OUTPUT: self._predictor.predict(batch.new)}
            early |= {_OUTPUT: np.zeros((len(indices), *outputs[_OUTPUT].shape[1:]), np.float32)}
            early = {name: np.concatenate([{**batch.new, **plain, **outputs}[name], early[name]]) for name in early}
        return replace(batch, new=early, ends=step_ends(len(early["offset"]), size))

    @override
    def scored(self, batch: Batch) -> Scored | None:
        """Of events that have waited, the scores are of the predictions that were made when they came."""
        if batch.decided is not None:
            unobserved, self.unobserved = self.unobserved, NOT_SCORED
            return unobserved + self.scores_of(batch.decided)
        if EARLY not in batch.new:
            return None
        plain = batch.new[EARLY] == Early.PLAIN
        if not plain.any():
            return NOT_SCORED
        output, label, group = (batch.new[name][plain] for name in (_OUTPUT, "label", "group_hash"))
        return self._predictor.score(output.astype(np.float32), label, group)

    def scores_of(self, decided: Decided) -> Scored:
        """Return the scores of events that have waited, whose labels baselines learn now."""
        rows = scored_rows(decided)
        group = decided.span.columns["group_hash"][rows]
        return self._predictor.score_record(decided.predictions[rows], decided.label[rows], group)

    def let_wait(self, batch: Batch) -> None:
        """Add the events of a batch that begin to wait to the join."""
        early = np.zeros(len(batch.waiting["offset"]), np.bool_)
        if _WAITING_INDEX in batch.new:
            indices = batch.new[_WAITING_INDEX].astype(np.int64)
            early[indices[indices >= 0]] = True
        self._join.add_events(self.keyed(batch.waiting), self._records, early)

    def keyed(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Return the columns of N events with the keys by which labels find them, and with record times."""
        timed = self.with_times(columns)
        return timed if self._join.column == "key_hash" else {**timed, "label_key": columns[self._join.column]}

    def with_times(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Return the columns with now as the record time of records that have none."""
        absent = np.less_equal(columns["time_ms"], 0)
        if not absent.any():
            return dict(columns)
        return {**columns, "time_ms": np.where(absent, np.int64(self._clock.wall() * 1000), columns["time_ms"])}
