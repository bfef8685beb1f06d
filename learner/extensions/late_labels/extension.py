"""Labels that come after their events: the link between the steps of the loop and the join.

An event without a label is predicted when it comes and waits in the join. Once its fate is decided, it is an event of a
step like any other, with its own identity. Legend: N events of a call.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from typing_extensions import override

from anabranch.ingest.events.block import Array, Outcome, SkipReason
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.ingest.settings.stream import HoldOut
from anabranch.learner.checkpoints.part_formats import Covers
from anabranch.learner.evaluate.event_time import EventTimePredictor
from anabranch.learner.evaluate.stream_monitor import Scored
from anabranch.learner.extension import Extension, NextBatch
from anabranch.learner.extensions.late_labels.arrivals import ArrivalPredictions, HeldOutRows
from anabranch.learner.extensions.late_labels.decided_batch import decided_batch
from anabranch.learner.extensions.late_labels.decisions import Resolution
from anabranch.learner.extensions.late_labels.join_part import JoinPart
from anabranch.learner.extensions.late_labels.stream_times import (
    NEVER,
    AlignedReading,
    LabelClock,
    LabelLags,
    StreamTimes,
)
from anabranch.learner.status.report import LabelReport
from anabranch.learner.stream.batch import Batch, Decided
from anabranch.learner.stream.batches import MOST_STEPS, PATIENCE
from anabranch.learner.stream.lag import LagPolicy
from anabranch.learner.stream.ledger import Ledger

_ADVANCE_SECONDS = 0.05
_SHARE = 50
"""The search for the oldest events that wait takes at most 1 / `_SHARE` of the time, ..."""
_AT_ONCE_SECONDS = 0.001
"""... where it takes longer than this."""
_TIMED_OUT, _HELD_OUT, _STORED_ONLY = (
    np.uint8(outcome) for outcome in (Outcome.TIMED_OUT, Outcome.HELD_OUT, Outcome.STORED_ONLY)
)
"""Outcomes of events that timed out, and were used as negatives then. Comparisons with the enumerations are slow."""
_NON_FINITE = np.uint8(SkipReason.NON_FINITE)

log = logging.getLogger(__name__)


class LateLabels(Extension):
    """The join, attached to the loop. The loop's thread calls its methods, save `problem` and `warning`.

    Only `settle` changes the join, after the round: until then it can be given up as if it had not been.
    """

    name = "late"

    def __init__(
        self,
        part: JoinPart,
        settings: LabelStreamSettings,
        hold_out: HoldOut,
        predictor: EventTimePredictor,
        lag: LagPolicy,
        step_size: int,
        max_delay: timedelta,
        clock: LabelClock | None = None,
    ) -> None:
        """Take the join and what its events need.

        Args:
            part: of checkpoints, with the join, which has the events of the restored checkpoint.
            settings: `[stream.labels]`.
            hold_out: which events are held out.
            predictor: predicts events that come, with the model that is trained.
            lag: what happens to events while the learner is behind.
            step_size: events of a full step.
            max_delay: how long decided events wait for a full step.
            clock: for tests.
        """
        self.part = part
        self.join = part.join
        self._settings = settings
        self._held_out = HeldOutRows(hold_out)
        self._lag = lag
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
        self._lags = LabelLags()
        early_size = step_size if settings.early != "none" else 0
        self.arrivals = ArrivalPredictions(self.join, self._held_out, predictor, lag, early_size, self._clock)
        """The extension that comes next to this one."""
        self._most_late = self.arrivals.most_late(MOST_STEPS)
        self._oldest: dict[int, int] = {}
        """By index of the partition, an offset before which no event waits and no label is open: the first of these, as
        last searched."""
        self._search_at, self._searched = 0.0, 0
        self._repeated: set[tuple[int, ...]] = set()
        """Partition, offset and row of the events whose correction is in another step, since one was not finite."""
        self._erasure_problem: str | None = None

    @override
    def attach(self, ledger: Ledger) -> None:
        self._ledger = ledger
        ledger.first_open = self._first_open

    @override
    def next(self, source: BlockReader, stop: threading.Event, of_stream: NextBatch, steps: int) -> Batch | None:
        self._advance(source.partitions, source.ends_time)
        source.hold(self.ahead)
        decided = self._decided(source.partitions, steps)
        if decided is not None:
            return decided
        if self._full:
            if not self.join.ready:  # where that alone makes room
                self.join.make_room(2 * self._most_late)
            stop.wait(PATIENCE.total_seconds())  # for checkpoints, which let its space be used again
            return None
        return of_stream(stop)

    def _decided(self, partitions: Sequence[Partition], steps: int) -> Batch | None:
        """Return the next events whose fate is decided, of `steps` full steps at most; None while there are too few.

        Fewer than a full step are returned when the first of them has waited for `max_delay`, and when there is no room
        for events of the stream.
        """
        ready, now = self.join.ready, self._clock.monotonic()
        if not ready:
            self._ready_since = None
            return None
        self._ready_since = since = now if self._ready_since is None else self._ready_since
        if ready < self._step_size and now < since + self._max_delay and not self._full:
            return None
        self._ready_since = None
        size = self._step_size
        taken = self.join.take(size * max(1, min(steps, ready // size)))
        if taken is None:
            return None
        labelled = (taken.resolution != Resolution.TIMED_OUT) & ~taken.damaged
        self._lags.add(taken.waited_ms[labelled])
        held_out = self._held_out.of(taken.columns, partitions)
        return decided_batch(taken, self._settings, held_out, size, stores_only=self._lag.stores_only)

    @property
    def _full(self) -> bool:
        """Whether the events of another batch may have no room in the join; then the stream is not read."""
        return self.join.events.room < 2 * self._most_late

    @override
    def put_back(self) -> None:
        self.join.put_back()

    @override
    def settle(self, batch: Batch) -> None:
        """Count how the decided events of a batch ended, remove them from the join, and add events and labels that have
        come; called once the ledger has moved.
        """
        for span in batch.spans:
            self._times.add(span.columns)
        if batch.decided is not None:
            self._end(batch.decided)
            if not batch.new:  # no round has observed their scores
                self.arrivals.unobserved += self.arrivals.scores_of(batch.decided)
        if batch.waiting:
            self.arrivals.let_wait(batch)
            self._add_oldest(batch.waiting)
        if batch.labels:
            keys = {"key_hash": batch.labels[self.join.column]}
            self.join.add_labels({**self.arrivals.with_times(batch.labels), **keys})
            self._add_oldest(batch.labels)

    def _advance(self, partitions: Sequence[Partition], ends_time: float | None) -> None:
        """Decide about events whose time is up, a few times a second; called between steps."""
        now = self._clock.monotonic()
        if now < self._advance_at:
            return
        self._advance_at = now + _ADVANCE_SECONDS
        join, (labels_ms, events_ms) = self.join, self._times.now(partitions, self._ledger, ends_time)
        taken = max(len(join.events) / join.payload.slots, len(join.labels) / join.labels.limit)
        self.ahead = self._aligned.ahead(taken, partitions, self._ledger, self._times.of)
        join.advance(labels_ms, NEVER if events_ms is None else events_ms)

    def _first_open(self) -> dict[int, int]:
        """Return, by index of the partition, the first offset of an event that has not ended, or of a label that is not
        learned from: its event has not ended, or may still come."""
        self.progress()
        return dict(self._oldest)

    @override
    def progress(self, *, last: bool = False) -> int:
        """Search for the oldest events that wait and labels that are not learned from, unless that is slow and was done
        a moment ago; return how many events had ended then: a version of that state goes through all of them."""
        if last or self._clock.monotonic() >= self._search_at:
            begin = self._clock.cpu()
            self._oldest, self._searched = self.join.oldest_open(), self._ledger.ended
            seconds = self._clock.cpu() - begin
            self._search_at = self._clock.monotonic() + (_SHARE * seconds if seconds > _AT_ONCE_SECONDS else 0.0)
        return self._searched

    @override
    def erase(self, covers: Covers) -> int:
        """Remove erased events and labels from the join; return how many events, which end as skipped."""
        try:
            self.join.erase(covers)
        except OSError as exc:
            self._erasure_problem = f"events that wait for labels cannot be erased yet: {exc.strerror or exc}"
            raise
        self._erasure_problem = None
        return self._end_erased()

    @property
    @override
    def problem(self) -> str | None:
        return self._erasure_problem or self.join.payload.tier.problem or self.join.losses.problem

    @property
    @override
    def warning(self) -> str | None:
        return self.join.counts.warning

    @override
    def report(self) -> Mapping[str, LabelReport]:
        join, counts, (p50, p99) = self.join, self.join.counts, self._lags.quantiles()
        report = LabelReport(
            waiting=join.events.waiting,
            ready=join.ready,
            kept=len(join.labels),
            bytes=len(join.events) * join.payload.tier.row_bytes,
            bound=int(self._settings.bytes),
            ended=self._ledger.totals.waited,
            labels={
                "matched": counts.matched,
                "timed_out": counts.timed_out,
                "no_room": counts.early_timeouts,
                "taken_back": counts.taken_back,
                "duplicate": counts.duplicate_labels,
                "unmatched": counts.unmatched_labels,
                "late": counts.late_labels,
                "dropped": counts.dropped_labels,
                "crowded": counts.crowded_labels,
                "damaged": counts.damaged,
            },
            lag_p50_seconds=p50,
            lag_p99_seconds=p99,
        )
        return {"labels": report}

    @override
    def state(self) -> dict[str, Any]:
        return {"lags": self._lags.state(), "unobserved": [*self.arrivals.unobserved.sums]}

    @override
    def close(self) -> None:
        self.join.payload.tier.close()

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        if state:  # without labels before, it is empty
            self._lags.add(np.array(state["lags"], np.int64))
            self.arrivals.unobserved = Scored(*state["unobserved"])
            self._end_erased()

    def _end(self, decided: Decided) -> None:
        # Corrections whose step was not finite are in another step once more: without them the negatives would stay.
        not_finite = np.asarray(decided.span.columns["reason"] == _NON_FINITE)
        again = np.zeros(len(not_finite), np.bool_)
        for row in np.flatnonzero(decided.corrects & (decided.span.trained | not_finite)).tolist():
            name = tuple(int(decided.span.columns[part][row]) for part in ("partition", "offset", "row"))
            again[row] = not_finite[row] and name not in self._repeated
            (self._repeated.add if again[row] else self._repeated.discard)(name)
        decided.ended[again] = False
        self._ledger.end(decided)
        ends, stored = decided.ends, decided.span.columns["outcome"] == _STORED_ONLY
        self.join.settle((ends == _TIMED_OUT) | (ends == _HELD_OUT) | stored, stored=stored, again=again)

    def _add_oldest(self, columns: Mapping[str, Array]) -> None:
        """Add the first event, or label, of each partition in which none is open; those of the others are not older."""
        numbers, first = np.unique(columns["partition"], return_index=True)
        for index, offset in zip(numbers.tolist(), columns["offset"][first].tolist(), strict=True):
            self._oldest.setdefault(index, offset)

    def _end_erased(self) -> int:
        """Let the events end as erased that the join has no longer, and return how many there were."""
        self._ledger.count()
        events, partitions = self.join.events, self._ledger.partitions
        waiting = np.bincount(events["partition"][events.not_ended()], minlength=len(partitions)).tolist()
        erased = [each.waiting - waiting[index] for index, each in enumerate(partitions)]
        if min(erased, default=0) < 0:  # a restart would find the same: counts are not worth a crash at each
            log.error("fewer events have waited for labels than do now, by partition: %s", erased)
            erased = [max(0, each) for each in erased]
        return self._ledger.end_erased(np.repeat(np.arange(len(erased), dtype=np.int32), erased))
