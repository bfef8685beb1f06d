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

Legend: n events or labels of a call.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array
from ingest.events.schema import Schema
from learner.labels.decisions import Decisions
from learner.labels.index.numbers import Ids
from learner.labels.join_checkpoint import JoinSnapshots
from learner.labels.join_counts import JoinCounts
from learner.labels.kept_labels import MOST_OF_KEY, KeptLabels
from learner.labels.matching import Matching
from learner.labels.ready import Ready, Resolution
from learner.labels.waiting_events import WaitingEvents
from learner.labels.waiting_table import Before, Wait
from replay.snapshot import TierRef

_RESERVE = 8
"""One in so many slots is left to events that come, and to those that were decided: more may not wait."""
_AT_ONCE = 16
"""One in so many slots is made free at once where the file is full."""
_MOST_SEARCHED = 2**17
"""While more events are decided and not settled, labels are kept: these events may match them."""
_NEVER = 2**62
_WARN_SECONDS = 60.0
_RETRY_SECONDS = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JoinOptions:
    """The settings of a join.

    Attributes:
        wait: an event and a label match if their record times differ by at most this.
        bytes: of the file with the payload of waiting events.
        early: whether the caller trains on events that wait as negatives on arrival, unless it says which.
        take_back: whether a timed-out event is kept for another `wait`, in which its label makes it CORRECTED.
        complete: whether checkpoints have the payload too, for a host without the file.
    """

    wait: timedelta
    bytes: int
    early: bool = False
    take_back: bool = False
    complete: bool = False

    @property
    def wait_ms(self) -> int:
        """`wait` in milliseconds, at least 1."""
        return max(1, round(self.wait.total_seconds() * 1000))


class LabelJoin:
    """Joins events and labels. Used by the loop's thread; `open_join` makes one. A key of 0 is no key."""

    def __init__(
        self, options: JoinOptions, schema: Schema, output_shape: tuple[int, ...], events: WaitingEvents
    ) -> None:
        self._wait, self._early, self._take_back = options.wait_ms, options.early, options.take_back
        self._output_shape = output_shape
        self._events, self._table = events, events.table
        self.payload = events.file
        """The file with the payload. Any thread may call its `sync`."""
        self.counts = JoinCounts()
        """Totals since the pipeline began."""
        own_keys = schema.join_column != "key_hash"
        self._labels = KeptLabels(schema.label, events.file.slots, self.counts, own_keys=own_keys)
        self._decisions = Decisions(schema.label)
        self._matching = Matching(self._wait, events, self._labels, self._decisions, self.counts)
        parts = events, self._labels, self._decisions, self.counts
        self.snapshots = JoinSnapshots(*parts, schema.join_key, complete=options.complete)
        """Copies the state for checkpoints, between two steps."""
        self._taken = 0
        self._valid = np.ones(0, np.bool_)
        """Which of the taken events are undamaged."""
        self._read_failed_at = -_RETRY_SECONDS
        self._losses: dict[str, tuple[str, float]] = {}
        """What was lost for lack of space: a sentence, and when, by the total that counts it."""

    @property
    def waiting(self) -> int:
        """Events that have not ended: they wait for a label, or their fate is decided and not settled."""
        return int(self._table.counts[Wait.WAITING : Wait.TIMED_OUT + 1].sum())

    @property
    def ready(self) -> int:
        """Events whose fate is decided and that were not taken yet."""
        return len(self._decisions) - self._taken

    @property
    def kept_labels(self) -> int:
        """Labels that are kept: an event that comes later may match."""
        return len(self._labels)

    @property
    def room(self) -> int:
        """Events that can be added now; while this is less than a batch may have, add none and take ready events."""
        return self._events.room

    @property
    def slots(self) -> int:
        """Events that the file has space for."""
        return self.payload.slots

    @property
    def taken(self) -> float:
        """The share of the space for events, or of that for kept labels, that is taken, whichever is more."""
        return max(len(self._table) / self.slots, len(self._labels) / self._labels.limit)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether space runs low, and a checkpoint lets space be used again."""
        return self._events.needs_checkpoint

    @property
    def file(self) -> TierRef:
        """The reference to the file with the payload."""
        return self.payload.file

    @property
    def problem(self) -> str | None:
        """One sentence on what does not work, for health."""
        recent = [sentence for sentence, at in [*self._losses.values()] if time.monotonic() < at + _WARN_SECONDS]
        return self.payload.problem or next(iter(recent), None)

    @property
    def warning(self) -> str | None:
        """One sentence on labels that may be lost although there is space, for health."""
        if not self.counts.crowded_labels:
            return None
        return (
            f"{self.counts.crowded_labels} labels were dropped, since there were {MOST_OF_KEY} of their key: an event "
            "of that key that comes later may end without its label; let keys name one event"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the waiting events take, without labels that are kept."""
        return self._events.nbytes

    def make_room(self, count: int) -> None:
        """Let the oldest events time out early if there is no room for `count`, and checkpoints will not make it.

        The file may be full of extents that are in use in part. At least one in `_AT_ONCE` of its slots is made free:
        they can be written again after some checkpoints only.
        """
        if self.room < count and not self._events.frees_soon:
            self._time_out_early(max(count, self.slots // _AT_ONCE), 0)

    def waits(self, columns: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Return which of n events would wait if they were added now, bool `[n]`; the others have their label already.

        `columns` has `time_ms`, and `key_hash` or `label_key`.
        """
        keys, time_ms = columns.get("label_key", columns["key_hash"]), columns["time_ms"].astype(np.int64)
        return ~self._labels.has_for(keys.astype(np.uint64), time_ms - self._wait, time_ms + self._wait)

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
            predictions: the model's output for each event, float32 `[n, *output]`; None where it has made none.
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
            predictions = np.full((count, *self._output_shape), np.nan, np.float32)
        ids = self._events.add(columns, predictions)
        waits[self._matching.find_labels(ids)] = False
        if early is None:
            early = np.full(count, self._early)
        if (waits & early).any():
            self._table.set_before(ids[waits & early], Before.EARLY)
        self._events.wait(ids[waits])
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
            self._matching.add_labels({name: column[usable] for name, column in columns.items()})
            if self.counts.dropped_labels > before:
                self._report_loss(
                    "dropped_labels",
                    f"stream.labels: {self._labels.limit} labels are kept for events that come later, and there is no "
                    f"space for more: {self.counts.dropped_labels} were dropped, and their events will end without a "
                    "label; raise stream.labels.bytes, or lower stream.labels.wait",
                )

    def advance(self, watermark_ms: int, events_ms: int | None = None) -> None:
        """Time out the events that are due, and drop labels that no event can match any more.

        Args:
            watermark_ms: stream time of the label topics: no label with an earlier record time is expected.
            events_ms: stream time of the event topics, likewise; the default is `watermark_ms`.
        """
        self._matching.advance(watermark_ms)
        if len(self._decisions) <= _MOST_SEARCHED:
            self._labels.expire(self._needed_ms(watermark_ms, watermark_ms if events_ms is None else events_ms))
        self.tidy()

    def tidy(self) -> None:
        """Do a bounded part of what keeps memory and file small; `advance` does it too."""
        self._events.tidy()

    def take(self, max_rows: int) -> Ready | None:
        """Return up to `max_rows` events whose fate is decided, the oldest decision first; None if there are none.

        They stay in the join until `settle`; before that, or `put_back`, nothing more may be taken. While the file
        cannot be read this returns None, and `problem` says why.
        """
        assert not self._taken
        decided = self._decisions.first(max_rows)
        if not decided or time.monotonic() < self._read_failed_at + _RETRY_SECONDS:
            return None
        ids = decided["id"].astype(np.int32)
        try:
            columns, predictions, valid = self._events.read(ids)
        except OSError:  # the file logs and reports it
            self._read_failed_at = time.monotonic()
            return None
        self._taken = len(ids)
        return self._ready(ids, decided, columns, predictions, valid)

    def settle(
        self,
        negative: NDArray[np.bool_] | None = None,
        *,
        stored: NDArray[np.bool_] | None = None,
        again: NDArray[np.bool_] | None = None,
    ) -> None:
        """Remove the taken events: they were trained on, stored, held out or skipped.

        The arguments say which of those that `take` returned, bool `[N]`, which may be followed by damaged ones.

        Args:
            negative: were trained on, stored or held out as negatives; None: all that timed out. With `take_back` only
                these are kept.
            stored: those of them that were stored and not trained on; None: none.
            again: stay, and are returned once more with the same label: their step was not taken; None: none.
        """
        decided = self._decisions.first(self._taken)
        ids = decided["id"].astype(np.int32) if decided else np.empty(0, np.int32)
        valid = self._valid[: len(ids)]
        self.counts.damaged += int(np.count_nonzero(~valid))

        def of_taken(rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
            spread = np.zeros(len(ids), np.bool_)
            spread[valid] = rows[: np.count_nonzero(valid)]
            return spread

        kept = (self._table.state[ids] == Wait.TIMED_OUT) & valid & self._take_back
        if negative is not None:
            kept &= of_taken(negative)
        repeated = np.zeros(len(ids), np.bool_) if again is None else of_taken(again)
        if repeated.any():
            self._decisions.repeat(repeated)
        self._decisions.pop(self._taken)
        self._taken = 0
        self._events.remove(ids[~(kept | repeated)])
        if kept.any():
            if stored is not None and (only_stored := kept & of_taken(stored)).any():
                self._table.set_before(ids[only_stored], Before.STORED)
            self._events.keep(ids[kept])
            self._matching.find_labels(ids[kept])

    def put_back(self) -> None:
        """Let `take` return the taken events again: the step was not taken."""
        self._taken = 0

    def waiting_by_partition(self) -> dict[int, int]:
        """Return, by index of the partition, how many events have not ended."""
        return self._table.waiting_by_partition()

    @property
    def bytes(self) -> int:
        """Disk space of the payload of all events."""
        return len(self._table) * self.payload.row_bytes

    def oldest_waiting(self) -> dict[int, int]:
        """Return, by index of the partition, the lowest offset of an event that has not ended."""
        return self._table.oldest_waiting()

    def oldest_open_labels(self) -> dict[int, int]:
        """Return, by index of the partition, the lowest offset of a label that is not learned from yet.

        It is kept for an event that comes, or its event is decided and not settled.
        """
        kept, decided = self._labels.unused(), self._decisions.labels()
        partition, offset = np.concatenate([kept[0], decided[0]]), np.concatenate([kept[1], decided[1]])
        lowest = np.full(int(partition.max(initial=-1)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(lowest, partition, offset)
        return {int(index): int(lowest[index]) for index in np.unique(partition)}

    def erase(self, covers: Callable[[Mapping[str, Array]], NDArray[np.bool_]]) -> int:
        """Remove erased events and labels, overwrite their payload, and return how many events were removed.

        Rows of events that are gone already are overwritten by `begin_overwrite` and `payload.overwrite`.

        Args:
            covers: returns which of n events are erased, bool `[n]`, by `partition`, `offset` and `key_hash`. It is
                also called for labels, with the position of their message.

        Raises:
            OSError: the file cannot be written; nothing is removed then, and this may be called again.
        """
        assert not self._taken
        ids = self._table.ids()
        erased = ids[covers(self._table.identity_columns(ids))]
        self._events.erase(erased)
        self._decisions.remove(erased)
        self._labels.erase(covers)
        return len(erased)

    def begin_overwrite(self) -> None:
        """Begin to overwrite the payload of events that are gone by now; called while no checkpoint is written."""
        self._events.begin_overwrite()

    def close(self) -> None:
        """Close the file."""
        self.payload.close()

    def _needed_ms(self, watermark_ms: int, events_ms: int) -> int:
        """Return the time before which no event can match a label: none that comes, waits, or may be taken back.

        A label that waited for its event while that timed out takes it back only once it was settled as a negative.
        """
        needed = events_ms - self._wait
        if self._take_back:
            timed_out = self._table.time_ms[self._decisions.ids(Resolution.TIMED_OUT)]
            needed = min(needed, watermark_ms, int(timed_out.min(initial=_NEVER)) - self._wait)
        return needed

    def _make_room(self, count: int) -> None:
        """Let the oldest events time out early where `count` more would take the space that is left to decided ones."""
        counts = self._table.counts
        over = int(counts[Wait.WAITING] + counts[Wait.KEPT]) + count - (self.slots - self.slots // _RESERVE)
        if over > 0:
            self._time_out_early(over, count)
        elif self.waiting + count < self.slots // 4:
            self._losses.pop("early_timeouts", None)

    def _time_out_early(self, over: int, count: int) -> None:
        """Let the oldest `over` events time out, since there is no space for `count` more."""
        counts, before, removed = self._table.counts, self.counts.early_timeouts, self.counts.early_removals
        self._matching.make_room(over)
        if self.counts.early_timeouts > before:
            self._report_loss(
                "early_timeouts",
                f"stream.labels.bytes: {counts[Wait.WAITING] + count} events wait for labels, and there is no space "
                f"for more: {self.counts.early_timeouts} have timed out before stream.labels.wait was over; raise "
                "stream.labels.bytes, or lower stream.labels.wait",
            )
        if self.counts.early_removals > removed:
            self._report_loss(
                "early_removals",
                "stream.labels.bytes: there is no space for the events that timed out: "
                f"{self.counts.early_removals} of them cannot be taken back any more, although a label may still come; "
                "raise stream.labels.bytes, or lower stream.labels.wait",
            )

    def _report_loss(self, name: str, sentence: str) -> None:
        """Report and log what the total `name` counts; the problem is over a minute after the last loss."""
        now = time.monotonic()
        if name not in self._losses or now >= self._losses[name][1] + _WARN_SECONDS:
            log.warning("%s", sentence)
        self._losses[name] = sentence, now

    def _ready(
        self,
        ids: Ids,
        decided: Mapping[str, Array],
        columns: dict[str, Array],
        predictions: NDArray[np.float32],
        valid: NDArray[np.bool_],
    ) -> Ready:
        self._valid = valid
        resolution = decided["resolution"].astype(np.uint8)
        columns["label"], columns["labelled"] = decided["value"], resolution != Resolution.TIMED_OUT
        if not valid.all():
            columns = {name: column[valid] for name, column in columns.items()}
        return Ready(
            columns=columns,
            resolution=resolution[valid],
            predictions=predictions[valid],
            waited_ms=decided["waited_ms"].astype(np.int64)[valid],
            early=self._table.before[ids[valid]] == Before.EARLY,
            stored=self._table.before[ids[valid]] == Before.STORED,
            taken_back=self._table.state[ids[valid]] == Wait.TAKEN_BACK,
            damaged={
                **self._table.identity_columns(ids[~valid]),
                "taken_back": self._table.state[ids[~valid]] == Wait.TAKEN_BACK,
            },
        )
