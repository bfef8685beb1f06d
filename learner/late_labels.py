"""Labels that come after their events: the link between the steps of the loop and the join.

An event without a label is predicted when it comes and waits in the join. Once its fate is decided, it is an event of a
step like any other, with its own identity. Legend: N events of a call.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.config import HoldOut
from ingest.events.block import Array, Outcome, SkipReason
from ingest.events.hold_out import held_out
from ingest.events.identity import partition_base
from ingest.label_stream_settings import LabelStreamSettings
from ingest.reader.cursors import Partition
from learner.evaluation.event_time import EventTimePredictor
from learner.evaluation.prequential import NOT_SCORED, Scored
from learner.labels.decided_batch import decided_batch, fate_of
from learner.labels.label_join import LabelJoin
from learner.labels.ready import Resolution
from learner.state_dir.report import LabelReport
from learner.strategies.early_negatives import EARLY, Early
from learner.stream.aligned_reading import AlignedReading
from learner.stream.batch import Batch, Decided
from learner.stream.batches import MOST_LATE
from learner.stream.label_times import NEVER, LabelClock, LabelLags, StreamTimes
from learner.stream.lag import LagPolicy
from learner.stream.ledger import Ledger
from learner.training.step_result import StepResult

_ADVANCE_SECONDS = 0.05
_SHARE = 50
"""The search for the oldest events that wait takes at most 1 / `_SHARE` of the time, ..."""
_AT_ONCE_SECONDS = 0.001
"""... where it takes longer than this."""
_OUTPUT, _WAITING_INDEX = "event_time_output", "waiting_index"
"""Columns of a step that trains on early negatives: the output for the other events, and the index among `waiting`."""
_TIMED_OUT, _HELD_OUT, _STORED_ONLY = (
    np.uint8(outcome) for outcome in (Outcome.TIMED_OUT, Outcome.HELD_OUT, Outcome.STORED_ONLY)
)
"""Outcomes of events that timed out, and were used as negatives then. Comparisons with the enumerations are slow."""
_PARTS = 32
"""A batch has at most 1 / `_PARTS` of the events that the join has space for."""

log = logging.getLogger(__name__)


class LateLabels:
    """The join at the side of the loop. Used by the loop's thread.

    Only `settle` changes the join, after the step: until then a step can be given up as if it had not been.
    """

    def __init__(
        self,
        join: LabelJoin,
        settings: LabelStreamSettings,
        hold_out: HoldOut,
        predictor: EventTimePredictor,
        lag: LagPolicy,
        *,
        join_column: str,
        step_size: int,
        max_delay: timedelta,
        clock: LabelClock | None = None,
    ) -> None:
        """Take the join and what its events need.

        Args:
            join: with the events of the restored checkpoint.
            settings: `[stream.labels]`.
            hold_out: which events are held out.
            predictor: predicts events that come, with the model that is trained.
            lag: what happens to events while the learner is behind.
            join_column: the column by which labels find their events.
            step_size: events of a full step.
            max_delay: how long decided events wait for a full step.
            clock: for tests.
        """
        self.join = join
        self._settings = settings
        self._early = settings.early != "none"
        self._hold_out = hold_out
        self._predictor = predictor
        self._lag = lag
        self._join_column = join_column
        self._step_size = step_size
        self._max_delay = max_delay.total_seconds()
        self._clock = clock or LabelClock()
        self._times = StreamTimes(settings.topics, self._clock)
        self._aligned = AlignedReading(round(settings.wait.total_seconds() * 1000), self._clock.monotonic)
        self.ahead: frozenset[int] = frozenset()
        """The indexes of the partitions that are not to be read now: others are behind them."""
        self._ready_since: float | None = None
        self._advance_at = 0.0
        self._ledger = Ledger()
        self._bases: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._predictions: NDArray[np.float32] | None = None
        self._lags = LabelLags()
        self._most_rows = min(step_size if self._early else MOST_LATE, max(1, join.slots // _PARTS))
        self._oldest: dict[int, int] = {}
        """By index of the partition, an offset before which no event waits and no label is open: the first of these, as
        last searched."""
        self._search_at, self._searched = 0.0, 0
        self._repeated: set[tuple[int, ...]] = set()
        """Partition, offset and row of the events whose correction is in another step, since one was not finite."""
        self._unobserved = NOT_SCORED
        """The scores of decided events since the last step: nothing was left to train on."""

    def attach(self, ledger: Ledger) -> None:
        """Take the ledger of the loop, which this completes by the events that wait."""
        self._ledger = ledger
        ledger.first_open = self.first_open

    def take(self, partitions: Sequence[Partition]) -> Batch | None:
        """Return the next events whose fate is decided, as the batch of a step; None while there are too few.

        Fewer than a full step are returned when the first of them has waited for `max_delay`, and when there is no room
        for events of the stream.
        """
        ready, now = self.join.ready, self._clock.monotonic()
        if not ready:
            self._ready_since = None
            return None
        self._ready_since = since = now if self._ready_since is None else self._ready_since
        if ready < self._step_size and now < since + self._max_delay and not self.full:
            return None
        self._ready_since = None
        taken = self.join.take(self._step_size)
        if taken is None:
            return None
        labelled = taken.resolution != Resolution.TIMED_OUT
        self._lags.add(taken.waited_ms[labelled])
        held_out = self._held_out(taken.columns, partitions)
        return decided_batch(taken, fate_of(taken, self._settings, held_out, stores_only=self._lag.stores_only))

    @property
    def full(self) -> bool:
        """Whether the events of another batch may have no room in the join; then the stream is not read."""
        return self.join.room < 2 * self.most_rows

    @property
    def most_rows(self) -> int:
        """Waiting events and labels of a batch: with `early`, a step trains on all of them."""
        return self._most_rows

    def make_room(self) -> None:
        """Let the oldest events time out early, where that alone makes room; called while `full`."""
        if not self.join.ready:
            self.join.make_room(2 * self.most_rows)

    def put_back(self) -> None:
        """Return what `take` has taken to the join: the step is not taken."""
        self.join.put_back()

    def begin(self, batch: Batch, partitions: Sequence[Partition]) -> Batch:
        """Predict the events of a batch that begin to wait, before the step trains.

        With `early`, those are returned as events to train on too, as negatives, save those that will be held out and
        those whose label is there already; none while events are stored only.
        """
        self._predictions = self._predictor.predict(batch.waiting) if batch.waiting else None
        if not batch.waiting or not self._early or self._lag.stores_only:
            return batch
        chosen = self.join.waits(self._keyed(batch.waiting)) & ~self._held_out(batch.waiting, partitions)
        indices = np.flatnonzero(chosen)[: max(0, self._step_size - len(batch))]
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
        return replace(batch, new=early)

    def settle(self, batch: Batch, *, finite: bool) -> None:
        """Count how the decided events of a batch ended, remove them from the join, and add events and labels that have
        come; called once the ledger has moved.

        `finite`: whether the step was taken. If not, corrections of negatives are in another step once more: without
        them the negatives would stay.
        """
        for span in batch.spans:
            self._times.add(span.columns)
        if batch.decided is not None:
            self._end(batch.decided, finite=finite)
            if not batch.new:  # no step has observed their scores
                self._unobserved += self._scores_of(batch.decided)
        if batch.waiting:
            early = np.zeros(len(batch.waiting["offset"]), np.bool_)
            if finite and _WAITING_INDEX in batch.new:
                indices = batch.new[_WAITING_INDEX].astype(np.int64)
                early[indices[indices >= 0]] = True
            self.join.add_events(self._keyed(batch.waiting), self._predictions, early)
            self._add_oldest(batch.waiting)
        if batch.labels:
            keys = {"key_hash": batch.labels[self._join_column]}
            self.join.add_labels({**self._with_times(batch.labels), **keys})
            self._add_oldest(batch.labels)

    def advance(self, partitions: Sequence[Partition], ends_time: float | None) -> None:
        """Decide about events whose time is up, a few times a second; called between steps."""
        now = self._clock.monotonic()
        if now < self._advance_at:
            return
        self._advance_at = now + _ADVANCE_SECONDS
        labels_ms, events_ms = self._times.now(partitions, self._ledger, ends_time)
        self.ahead = self._aligned.ahead(self.join.taken, partitions, self._ledger, self._times.of)
        if labels_ms is None:
            self.join.tidy()
        else:
            self.join.advance(labels_ms, NEVER if events_ms is None else events_ms)

    def scored(self, batch: Batch, result: StepResult) -> Scored:
        """Return the scores of the events of a batch that have their label, by the predictions from before training.

        Of events that have waited, those are the predictions that were made when they came.
        """
        if batch.decided is not None:
            unobserved, self._unobserved = self._unobserved, NOT_SCORED
            return unobserved + self._scores_of(batch.decided)
        if EARLY not in batch.new:
            return Scored(len(batch), result.score, result.loss_new)
        plain = batch.new[EARLY] == Early.PLAIN
        if not plain.any():
            return NOT_SCORED
        return self._predictor.score(batch.new[_OUTPUT][plain].astype(np.float32), batch.new["label"][plain])

    def labels(self, batch: Batch) -> Array:
        """Return the labels of the events that `scored` has scored."""
        if batch.decided is not None:
            return batch.decided.label[self._scored_rows(batch.decided)]
        label = batch.new["label"]
        return label[batch.new[EARLY] == Early.PLAIN] if EARLY in batch.new else label

    def first_open(self) -> dict[int, int]:
        """Return, by index of the partition, the first offset of an event that has not ended, or of a label that is not
        learned from: its event has not ended, or may still come."""
        self.search_if_due()
        return dict(self._oldest)

    def search_if_due(self) -> int:
        """Search for the oldest events that wait, unless that is slow and was done a moment ago.

        Returns how many events had ended at the last search: a version of that state goes through all of them.
        """
        if self._clock.monotonic() >= self._search_at:
            self.search()
        return self._searched

    def search(self) -> None:
        """Search for the oldest events that wait, and for the oldest labels that are not learned from."""
        begin = self._clock.cpu()
        self._oldest = {**self.join.oldest_waiting(), **self.join.oldest_open_labels()}
        self._searched = self._ledger.ended
        seconds = self._clock.cpu() - begin
        self._search_at = self._clock.monotonic() + (_SHARE * seconds if seconds > _AT_ONCE_SECONDS else 0.0)

    def erase(self, covers: Callable[[Mapping[str, Array]], NDArray[np.bool_]]) -> int:
        """Remove erased events and labels from the join; return how many events, which end as skipped.

        Raises OSError where the file cannot be written; nothing is removed then.
        """
        self.join.erase(covers)
        return self._end_erased()

    def report(self) -> LabelReport:
        """Return the state of waiting events and labels."""
        join, (p50, p99) = self.join, self._lags.quantiles()
        return LabelReport(
            waiting=join.waiting,
            ready=join.ready,
            kept=join.kept_labels,
            bytes=join.bytes,
            bound=int(self._settings.bytes),
            ended=self._ledger.waited,
            labels={
                "matched": join.counts.matched,
                "timed_out": join.counts.timed_out,
                "no_room": join.counts.early_timeouts,
                "taken_back": join.counts.taken_back,
                "duplicate": join.counts.duplicate_labels,
                "unmatched": join.counts.unmatched_labels,
                "late": join.counts.late_labels,
                "dropped": join.counts.dropped_labels,
                "crowded": join.counts.crowded_labels,
                "damaged": join.counts.damaged,
            },
            lag_p50_seconds=p50,
            lag_p99_seconds=p99,
        )

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint; the join has a separate part."""
        return {
            "lags": self._lags.state(),
            "unobserved": asdict(self._unobserved),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; the join is restored already. Without labels before, it is empty."""
        if state:
            self._lags.add(np.array(state["lags"], np.int64))
            self._unobserved = Scored(**state["unobserved"])
            self._end_erased()

    def _end(self, decided: Decided, *, finite: bool) -> None:
        outcome, reason = (Outcome.TRAINED, SkipReason.NONE) if finite else (Outcome.SKIPPED, SkipReason.NON_FINITE)
        corrects = decided.corrects & decided.span.trained
        again = np.zeros(len(corrects), np.bool_)
        for row in np.flatnonzero(corrects).tolist():
            name = tuple(int(decided.span.columns[part][row]) for part in ("partition", "offset", "row"))
            again[row] = not finite and name not in self._repeated
            (self._repeated.add if again[row] else self._repeated.discard)(name)
        decided.ended[again] = False
        self._ledger.end(decided, outcome, reason)
        ends, stored = decided.ends(outcome), decided.span.columns["outcome"] == _STORED_ONLY
        self.join.settle((ends == _TIMED_OUT) | (ends == _HELD_OUT) | stored, stored=stored, again=again)

    def _add_oldest(self, columns: Mapping[str, Array]) -> None:
        """Add the first event, or label, of each partition in which none is open; those of the others are not older."""
        numbers, first = np.unique(columns["partition"], return_index=True)
        for index, offset in zip(numbers.tolist(), columns["offset"][first].tolist(), strict=True):
            self._oldest.setdefault(index, offset)

    def _scores_of(self, decided: Decided) -> Scored:
        rows = self._scored_rows(decided)
        return self._predictor.score(decided.predictions[rows], decided.label[rows])

    def _scored_rows(self, decided: Decided) -> NDArray[np.bool_]:
        return np.asarray(decided.scored & (decided.span.columns["reason"] == SkipReason.NONE))

    def _end_erased(self) -> int:
        """Let the events end as erased that the join has no longer, and return how many there were."""
        self._ledger.count()
        waiting = self.join.waiting_by_partition()
        erased = [each.waiting - waiting.get(index, 0) for index, each in enumerate(self._ledger.partitions)]
        if min(erased, default=0) < 0:  # a restart would find the same: counts are not worth a crash at each
            log.error("fewer events have waited for labels than do now, by partition: %s", erased)
            erased = [max(0, each) for each in erased]
        return self._ledger.end_erased(np.repeat(np.arange(len(erased), dtype=np.int32), erased))

    def _held_out(self, columns: Mapping[str, Array], partitions: Sequence[Partition]) -> NDArray[np.bool_]:
        if not self._hold_out.fraction:
            return np.zeros(len(columns["offset"]), np.bool_)
        if len(partitions) > len(self._bases):
            self._bases = np.array([partition_base(partition.name) for partition in partitions], np.uint64)
        return held_out(self._hold_out, columns, self._bases[columns["partition"]])

    def _keyed(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        keyed = self._with_times(columns)
        return keyed if self._join_column == "key_hash" else {**keyed, "label_key": columns[self._join_column]}

    def _with_times(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Return the columns with now as the record time of records that have none."""
        absent = np.less_equal(columns["time_ms"], 0)
        if not absent.any():
            return dict(columns)
        return {**columns, "time_ms": np.where(absent, np.int64(self._clock.wall() * 1000), columns["time_ms"])}
