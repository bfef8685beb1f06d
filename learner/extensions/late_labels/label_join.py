"""Joins events with labels that come late, by key and record time.

    add_events -> wait -+- label within `wait` ---------> LABELLED, or CORRECTED with `early`
                        +- stream time passes `wait` ---> TIMED_OUT -> settle -> removed, or with `take_back`
                        +- no space: the oldest --------> TIMED_OUT              kept -> label -> CORRECTED
    take -> (the loop trains) -> settle, or put_back

An event and a label match when their keys are equal and their record times differ by at most `wait`. Of the labels that
match an event, the first that arrives wins; the others are duplicates. Labels are kept until no event can come that
matches, so it does not matter which topic is read first. With `take_back` a timed-out event is kept until stream time
passes its record time plus twice `wait`, and a label up to that time makes it CORRECTED; where space runs low, such
events go first.

An event matches the labels of its key from `wait` before its record time to `wait` after it, or twice that after it
once it was returned as timed out. The first of these labels that arrives decides it.

Legend: n events or labels of a call.
"""

import logging
import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.learner.extensions.late_labels.decisions import Decisions, JoinCounts, Ready, Resolution
from anabranch.learner.extensions.late_labels.indexes import Ids, joined_ids, rounds
from anabranch.learner.extensions.late_labels.kept_labels import KeptLabels
from anabranch.learner.extensions.late_labels.waiting_events import IDENTITY, Before, Wait, WaitingEvents

_RESERVE = 8
"""One in so many slots is left to events that come, and to those that were decided: more may not wait."""
_AT_ONCE = 16
"""One in so many slots is made free at once where the file is full."""
_MOST_SEARCHED = 2**17
"""While more events are decided and not settled, labels are kept: these events may match them."""
_NEVER = 2**62
_BEFORE_ALL = -(2**62)
_LABEL_COLUMNS = ("key_hash", "label", "time_ms", "partition", "offset")
_WARN_SECONDS = 60.0
_RETRY_SECONDS = 1.0

log = logging.getLogger(__name__)


class Losses:
    """What was lost for lack of space: reported and logged, and a problem until a minute after the last loss."""

    def __init__(self) -> None:
        self._losses: dict[str, tuple[str, float]] = {}
        """A sentence, and when, by the total that counts the loss."""

    @property
    def problem(self) -> str | None:
        """One sentence on what was lost within the last minute."""
        recent = [sentence for sentence, at in [*self._losses.values()] if time.monotonic() < at + _WARN_SECONDS]
        return next(iter(recent), None)

    def add(self, name: str, sentence: str) -> None:
        """Report and log what the total `name` counts."""
        now = time.monotonic()
        if name not in self._losses or now >= self._losses[name][1] + _WARN_SECONDS:
            log.warning("%s", sentence)
        self._losses[name] = sentence, now

    def end(self, name: str) -> None:
        """End the problem: there is space again."""
        self._losses.pop(name, None)


class LabelJoin:
    """Joins events and labels. Used by the loop's thread; `open_join` makes one. A key of 0 is no key.

    Attributes:
        events: those that wait, and those that were decided and not settled.
        labels: those that are kept: an event that comes later may match.
        counts: totals since the pipeline began.
        losses: what was lost for lack of space.
        watermark_ms: stream time of the label topics, as this process last received it.
    """

    def __init__(
        self, settings: LabelStreamSettings, schema: Schema, record_shape: tuple[int, ...], events: WaitingEvents
    ) -> None:
        self._wait = max(1, round(settings.wait.total_seconds() * 1000))
        self._early, self._take_back = settings.early != "none", settings.take_back
        self.column = schema.join_column
        """The column by which labels find their events."""
        self._record_shape = record_shape
        self.events, self.payload = events, events.file
        self.counts, self.losses = JoinCounts(), Losses()
        own_keys = schema.join_column != "key_hash"
        self.labels = KeptLabels(schema.label, events.file.slots, self.counts, own_keys=own_keys)
        self.decisions = Decisions(schema.label)
        self.watermark_ms = _BEFORE_ALL
        self._taken = 0
        self._damaged = np.zeros(0, np.bool_)
        """Which of the taken events are damaged."""
        self._read_failed_at = -_RETRY_SECONDS

    @property
    def ready(self) -> int:
        """Events whose fate is decided and that were not taken yet."""
        return len(self.decisions) - self._taken

    def make_room(self, count: int) -> None:
        """Let the oldest events time out early if there is no room for `count`, and checkpoints will not make it.

        The file may be full of extents that are in use in part. At least one in `_AT_ONCE` of its slots is made free:
        they can be written again after some checkpoints only.
        """
        if self.events.room < count and not self.payload.frees_soon:
            self._time_out_early(max(count, self.payload.slots // _AT_ONCE), 0)

    def waits(self, columns: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Return which of n events would wait if they were added now, bool `[n]`; the others have their label already.

        `columns` has `time_ms`, and `key_hash` or `label_key`.
        """
        keys, time_ms = columns.get("label_key", columns["key_hash"]), columns["time_ms"].astype(np.int64)
        return ~self.labels.has_for(keys.astype(np.uint64), time_ms - self._wait, time_ms + self._wait)

    def add_events(
        self,
        columns: Mapping[str, Array],
        predictions: NDArray[np.float32] | None,
        early: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.bool_]:
        """Add n events that have no label.

        Args:
            columns: the schema's payload and `IDENTITY_COLUMNS`, each `[n, ...]`; `label_key`, uint64 `[n]`, if the key
                of labels is not `key_hash`.
            predictions: what was predicted of each event, float32 `[n, *record]`; None where there is nothing.
            early: which of those that wait were trained on as negatives, bool `[n]`; None: all with the option.

        Returns:
            Which events wait, bool `[n]`. The others have their label already.
        """
        count = len(columns["offset"]) if columns else 0
        waits = np.ones(count, np.bool_)
        if not count:
            return waits
        self._make_room(count)
        if predictions is None:
            predictions = np.full((count, *self._record_shape), np.nan, np.float32)
        ids = self.events.add(columns, predictions)
        waits[self._find_labels(ids)] = False
        if early is None:
            early = np.full(count, self._early)
        if (waits & early).any():
            self.events.set("before", ids[waits & early], Before.EARLY)
        self.events.due.add(ids[waits])
        return waits

    def add_labels(self, columns: Mapping[str, Array]) -> None:
        """Add n labels in the order of arrival.

        `columns` has `key_hash`, `label`, `labelled`, `time_ms`, `partition` and `offset`; rows without a label are
        left out. A label of the key 0 is counted as unmatched.
        """
        if not columns:
            return
        labelled = columns["labelled"].astype(np.bool_)
        usable = labelled & (columns["key_hash"] != 0)
        self.counts.unmatched_labels += int(np.count_nonzero(labelled & ~usable))
        if usable.any():
            before = self.counts.dropped_labels
            self._add_labels({name: column[usable] for name, column in columns.items()})
            if self.counts.dropped_labels > before:
                self.losses.add(
                    "dropped_labels",
                    f"stream.labels: {self.labels.limit} labels are kept for events that come later, and there is no "
                    f"space for more: {self.counts.dropped_labels} were dropped, and their events will end without a "
                    "label; raise stream.labels.bytes, or lower stream.labels.wait",
                )

    def advance(self, watermark_ms: int | None, events_ms: int | None = None) -> None:
        """Time out the events that are due, drop labels that no event can match any more, and tidy.

        Stream time may go back, where a clock was wrong: then nothing is due until it is as late again.

        Args:
            watermark_ms: stream time of the label topics: no label with an earlier record time is expected; None: it is
                not known yet.
            events_ms: stream time of the event topics, likewise; the default is `watermark_ms`.
        """
        if watermark_ms is not None:
            self.watermark_ms = int(watermark_ms)
            self._time_out(self.events.in_order(self.events.due.pop_before(self.watermark_ms - self._wait)))
            self.events.remove(self.events.kept.pop_before(self.watermark_ms - 2 * self._wait))
            if len(self.decisions) <= _MOST_SEARCHED:
                self.labels.expire(self._needed_ms(watermark_ms, watermark_ms if events_ms is None else events_ms))
        self.events.tidy()

    def take(self, max_rows: int) -> Ready | None:
        """Return up to `max_rows` events whose fate is decided, the oldest decision first; None if there are none.

        They stay in the join until `settle`; before that, or `put_back`, nothing more may be taken. While the file
        cannot be read this returns None, and `problem` says why.
        """
        assert not self._taken
        decided = self.decisions.first(max_rows)
        if not decided or time.monotonic() < self._read_failed_at + _RETRY_SECONDS:
            return None
        ids = decided["id"].astype(np.int32)
        try:
            columns, predictions, self._damaged = self.events.read(ids)
        except OSError:  # the file logs and reports it
            self._read_failed_at = time.monotonic()
            return None
        self._taken = len(ids)
        resolution = decided["resolution"].astype(np.uint8)
        before = self.events["before"][ids]
        return Ready(
            columns={**columns, "label": decided["value"], "labelled": resolution != Resolution.TIMED_OUT},
            resolution=resolution,
            predictions=predictions,
            waited_ms=decided["waited_ms"].astype(np.int64),
            early=before == Before.EARLY,
            stored=before == Before.STORED,
            taken_back=self.events.state[ids] == Wait.TAKEN_BACK,
            damaged=self._damaged,
        )

    def settle(
        self,
        negative: NDArray[np.bool_] | None = None,
        *,
        stored: NDArray[np.bool_] | None = None,
        again: NDArray[np.bool_] | None = None,
    ) -> None:
        """Remove the taken events: they were trained on, stored, held out or skipped.

        The arguments say which of those that `take` returned, bool `[N]`.

        Args:
            negative: were trained on, stored or held out as negatives; None: all that timed out. With `take_back` only
                these are kept.
            stored: those of them that were stored and not trained on; None: none.
            again: stay, and are returned once more with the same label: their step was not taken; None: none.
        """
        decided = self.decisions.first(self._taken)
        ids = decided["id"].astype(np.int32) if decided else np.empty(0, np.int32)
        damaged = self._damaged[: len(ids)]
        self.counts.damaged += int(np.count_nonzero(damaged))
        kept = (self.events.state[ids] == Wait.TIMED_OUT) & ~damaged & self._take_back
        if negative is not None:
            kept &= negative
        repeated = np.zeros(len(ids), np.bool_) if again is None else again
        if repeated.any():
            self.decisions.repeat(repeated)
        self.decisions.pop(self._taken)
        self._taken = 0
        self.events.remove(ids[~(kept | repeated)])
        if kept.any():
            if stored is not None and (only_stored := kept & stored).any():
                self.events.set("before", ids[only_stored], Before.STORED)
            self.events.keep(ids[kept])
            self._find_labels(ids[kept])

    def put_back(self) -> None:
        """Let `take` return the taken events again: the step was not taken."""
        self._taken = 0

    def oldest_open(self) -> dict[int, int]:
        """Return, by index of the partition, the lowest offset of what is not learned from yet.

        That is an event that has not ended, or a label that is kept for an event that comes, or whose event is decided
        and not settled.
        """
        ids, kept, decided = self.events.not_ended(), self.labels.unused(), self.decisions.labels()
        partition = np.concatenate([self.events["partition"][ids], kept[0], decided[0]])
        offset = np.concatenate([self.events["offset"][ids], kept[1], decided[1]])
        lowest = np.full(int(partition.max(initial=-1)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(lowest, partition, offset)
        return {int(index): int(lowest[index]) for index in np.unique(partition)}

    def erase(self, covers: Callable[[Mapping[str, Array]], NDArray[np.bool_]]) -> int:
        """Remove erased events and labels, overwrite their payload, and return how many events were removed.

        Rows of events that are gone already are overwritten by `JoinPart.overwrite`.

        Args:
            covers: returns which of n events are erased, bool `[n]`, by `partition`, `offset` and `key_hash`. It is
                also called for labels, with the position of their message.

        Raises:
            OSError: the file cannot be written; nothing is removed then, and this may be called again.
        """
        assert not self._taken
        ids = self.events.ids()
        erased = ids[covers(self.events.columns(IDENTITY, ids))]
        self.events.erase(erased)
        self.decisions.remove(erased)
        self.labels.erase(covers)
        return len(erased)

    def _needed_ms(self, watermark_ms: int, events_ms: int) -> int:
        """Return the time before which no event can match a label: none that comes, waits, or may be taken back.

        A label that waited for its event while that timed out takes it back only once it was settled as a negative.
        """
        needed = events_ms - self._wait
        if self._take_back:
            timed_out = self.events["time_ms"][self.decisions.ids(Resolution.TIMED_OUT)]
            needed = min(needed, watermark_ms, int(timed_out.min(initial=_NEVER)) - self._wait)
        return needed

    def _make_room(self, count: int) -> None:
        """Let the oldest events time out early where `count` more would take the space that is left to decided ones."""
        counts = self.events.counts
        most = self.payload.slots - self.payload.slots // _RESERVE
        over = int(counts[Wait.WAITING] + counts[Wait.KEPT]) + count - most
        if over > 0:
            self._time_out_early(over, count)
        elif self.events.waiting + count < self.payload.slots // 4:
            self.losses.end("early_timeouts")

    def _time_out_early(self, over: int, count: int) -> None:
        """Remove about `over` events, since there is no space for `count` more.

        Kept ones go first, the oldest first; if there are fewer, the oldest that wait time out.
        """
        counts, before, removed = self.events.counts, self.counts.early_timeouts, self.counts.early_removals
        kept = self.events.kept.pop_oldest(over)
        oldest = self.events.due.pop_oldest(over - len(kept)) if len(kept) < over else kept[:0]
        could = self.events["time_ms"][kept] >= self.watermark_ms - 2 * self._wait
        self.counts.early_removals += int(np.count_nonzero(could))
        self.events.remove(kept)
        self._time_out(self.events.in_order(oldest))
        self.counts.early_timeouts += len(oldest)
        if self.counts.early_timeouts > before:
            self.losses.add(
                "early_timeouts",
                f"stream.labels.bytes: {counts[Wait.WAITING] + count} events wait for labels, and there is no space "
                f"for more: {self.counts.early_timeouts} have timed out before stream.labels.wait was over; raise "
                "stream.labels.bytes, or lower stream.labels.wait",
            )
        if self.counts.early_removals > removed:
            self.losses.add(
                "early_removals",
                "stream.labels.bytes: there is no space for the events that timed out: "
                f"{self.counts.early_removals} of them cannot be taken back any more, although a label may still come; "
                "raise stream.labels.bytes, or lower stream.labels.wait",
            )

    def _add_labels(self, columns: Mapping[str, Array]) -> None:
        """Add n labels in the order of arrival, and decide the events that they match."""
        labels = self.labels.add({name: columns[name] for name in _LABEL_COLUMNS})
        used, ids = self._match(labels)
        events = self.events
        by_event = (events["offset"][ids], events["partition"][ids], events["time_ms"][ids])
        order = np.lexsort((*by_event, self.labels["order"][used]))
        self._decide(ids[order], used[order])
        self.counts.duplicate_labels += self.labels.mark_duplicates(labels, 2 * self._wait)

    def _find_labels(self, ids: Ids) -> NDArray[np.intp]:
        """Decide those of n events that wait, or were kept, whose label is there already; return their positions."""
        if not len(self.labels):
            return np.empty(0, np.intp)
        keys, time_ms = self.events["key"][ids], self.events["time_ms"][ids]
        after = np.where(self.events.state[ids] == Wait.KEPT, 2 * self._wait, self._wait)
        positions, labels = [np.empty(0, np.intp)], []
        for turn in rounds(keys):
            begin, end = time_ms[turn] - self._wait, time_ms[turn] + after[turn]
            found, label, duplicates = self.labels.first_for(keys[turn], begin, end)
            positions.append(turn[found])
            labels.append(label)
            self.counts.duplicate_labels += duplicates
        position, label = np.concatenate(positions), joined_ids(labels)
        order = np.argsort(position)
        self._claim(ids[position[order]], label[order])
        self._decide(ids[position[order]], label[order])
        return position

    def _time_out(self, ids: Ids) -> None:
        if not len(ids):  # as at most calls
            return
        waited = np.clip(self.watermark_ms - self.events["time_ms"][ids], 0, self._wait)
        self.labels.timed_out.add(self.events["key"][ids])
        self.events.change(ids, Wait.TIMED_OUT)
        self.decisions.push(ids, np.full(len(ids), Resolution.TIMED_OUT, np.uint8), waited)
        self.counts.timed_out += len(ids)

    def _match(self, labels: Ids) -> tuple[Ids, Ids]:
        """Return those of n labels that match an event, and these events, each event once."""
        events, keys = self.events, self.labels["key_hash"][labels]
        distinct, of_label = np.unique(keys, return_inverse=True)
        position, ids = self.events.index.find(distinct)
        matched: list[tuple[Ids, Ids]] = []
        for turn in rounds(keys):
            undecided = (events.state[ids] == Wait.WAITING) | (events.state[ids] == Wait.KEPT)
            position, ids = position[undecided], ids[undecided]
            if not len(ids):
                break
            label = np.full(len(distinct), -1, np.int32)
            label[of_label[turn]] = labels[turn]
            has_label = label[position] >= 0
            matched.append(self._match_pairs(label[position[has_label]], ids[has_label]))
        return joined_ids([label for label, _ in matched]), joined_ids([ids for _, ids in matched])

    def _match_pairs(self, labels: Ids, ids: Ids) -> tuple[Ids, Ids]:
        """Return those of n pairs of a label and an undecided event with its key that match; no event is in two."""
        state, lag = self.events.state[ids], self.labels["time_ms"][labels] - self.events["time_ms"][ids]
        in_time = (lag >= -self._wait) & (lag <= self._wait)
        ever = (lag >= -self._wait) & (lag <= 2 * self._wait)
        hits = (in_time & (state == Wait.WAITING)) | (ever & (state == Wait.KEPT))
        self._claim(ids[hits], labels[hits])
        return labels[hits], ids[hits]

    def _claim(self, ids: Ids, labels: Ids) -> None:
        """Set the states of n events and of their labels, so that no other label matches these events."""
        kept = self.events.state[ids] == Wait.KEPT
        self.events.change(ids[kept], Wait.TAKEN_BACK)
        self.events.change(ids[~kept], Wait.LABELLED)
        self.labels.use(labels)

    def _decide(self, ids: Ids, labels: Ids) -> None:
        again = self.events.state[ids] == Wait.TAKEN_BACK
        early = self.events["before"][ids] == Before.EARLY
        resolution = np.where(again | early, Resolution.CORRECTED, Resolution.LABELLED)
        waited = self.labels["time_ms"][labels] - self.events["time_ms"][ids]
        self.decisions.push(ids, resolution.astype(np.uint8), waited, self.labels.values(labels))
        self.counts.matched += int(np.count_nonzero(~again))
        self.counts.taken_back += int(np.count_nonzero(again))
