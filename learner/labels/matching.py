"""Matches labels with the events that wait for them, and decides these events.

Legend: n events or labels of a call.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array
from learner.labels.decisions import Decisions
from learner.labels.index.key_index import rounds
from learner.labels.index.numbers import Ids, joined_ids
from learner.labels.join_counts import JoinCounts
from learner.labels.kept_labels import KeptLabels
from learner.labels.ready import Resolution
from learner.labels.waiting_events import WaitingEvents
from learner.labels.waiting_table import Before, Wait

_BEFORE_ALL = -(2**62)
_LABEL_COLUMNS = ("key_hash", "label", "time_ms", "partition", "offset")


class Matching:
    """Events, labels, and the decisions on the events; used by one thread.

    An event matches the labels of its key from `wait_ms` before its record time to `wait_ms` after it, or twice that
    after it once it was returned as timed out. The first of these labels that arrives decides it.
    """

    def __init__(
        self, wait_ms: int, events: WaitingEvents, labels: KeptLabels, decisions: Decisions, counts: JoinCounts
    ) -> None:
        self._wait = wait_ms
        self._events, self._table = events, events.table
        self._labels = labels
        self._decisions = decisions
        self._counts = counts
        self.watermark_ms = _BEFORE_ALL
        """Stream time of the label topics, as this process last received it."""

    def add_labels(self, columns: Mapping[str, Array]) -> None:
        """Add n labels in the order of arrival, and decide the events that they match."""
        labels = self._labels.add({name: columns[name] for name in _LABEL_COLUMNS})
        used, ids = self._match(labels)
        table = self._table
        by_event = (table.offset[ids], table.partition[ids], table.time_ms[ids])
        order = np.lexsort((*by_event, self._labels.order[used]))
        self._decide(ids[order], used[order])
        self._counts.duplicate_labels += self._labels.mark_duplicates(labels, 2 * self._wait)

    def find_labels(self, ids: Ids) -> NDArray[np.intp]:
        """Decide those of n events that wait, or were kept, whose label is there already; return their positions."""
        if not len(self._labels):
            return np.empty(0, np.intp)
        keys, time_ms = self._table.key[ids], self._table.time_ms[ids]
        after = np.where(self._table.state[ids] == Wait.KEPT, 2 * self._wait, self._wait)
        positions, labels = [np.empty(0, np.intp)], []
        for turn in rounds(keys):
            begin, end = time_ms[turn] - self._wait, time_ms[turn] + after[turn]
            found, label, duplicates = self._labels.first_for(keys[turn], begin, end)
            positions.append(turn[found])
            labels.append(label)
            self._counts.duplicate_labels += duplicates
        position, label = np.concatenate(positions), joined_ids(labels)
        order = np.argsort(position)
        self._claim(ids[position[order]], label[order])
        self._decide(ids[position[order]], label[order])
        return position

    def advance(self, watermark_ms: int) -> None:
        """Time out the events that are due, and remove the kept events that no label can match any more.

        Stream time may go back, where a clock was wrong: then nothing is due until it is as late again.
        """
        self.watermark_ms = int(watermark_ms)
        self._time_out(self._events.due(self.watermark_ms - self._wait))
        self._events.remove_kept(self.watermark_ms - 2 * self._wait)

    def make_room(self, count: int) -> None:
        """Remove about `count` kept events, the oldest first; if there are fewer, time out the oldest that wait."""
        kept, oldest = self._events.oldest(count)
        could = self._table.time_ms[kept] >= self.watermark_ms - 2 * self._wait
        self._counts.early_removals += int(np.count_nonzero(could))
        self._events.remove(kept)
        self._time_out(oldest)
        self._counts.early_timeouts += len(oldest)

    def _time_out(self, ids: Ids) -> None:
        if not len(ids):  # as at most calls of `advance`
            return
        waited = np.clip(self.watermark_ms - self._table.time_ms[ids], 0, self._wait)
        self._labels.timed_out.add(self._table.key[ids])
        self._table.change(ids, Wait.TIMED_OUT)
        self._decisions.push(ids, np.full(len(ids), Resolution.TIMED_OUT, np.uint8), waited)
        self._counts.timed_out += len(ids)

    def _match(self, labels: Ids) -> tuple[Ids, Ids]:
        """Return those of n labels that match an event, and these events, each event once."""
        table, keys = self._table, self._labels.key_hash[labels]
        distinct, of_label = np.unique(keys, return_inverse=True)
        position, ids = self._events.find(distinct)
        matched: list[tuple[Ids, Ids]] = []
        for turn in rounds(keys):
            undecided = (table.state[ids] == Wait.WAITING) | (table.state[ids] == Wait.KEPT)
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
        state, lag = self._table.state[ids], self._labels.time_ms[labels] - self._table.time_ms[ids]
        in_time = (lag >= -self._wait) & (lag <= self._wait)
        ever = (lag >= -self._wait) & (lag <= 2 * self._wait)
        hits = (in_time & (state == Wait.WAITING)) | (ever & (state == Wait.KEPT))
        self._claim(ids[hits], labels[hits])
        return labels[hits], ids[hits]

    def _claim(self, ids: Ids, labels: Ids) -> None:
        """Set the states of n events and of their labels, so that no other label matches these events."""
        kept = self._table.state[ids] == Wait.KEPT
        self._table.change(ids[kept], Wait.TAKEN_BACK)
        self._table.change(ids[~kept], Wait.LABELLED)
        self._labels.use(labels)

    def _decide(self, ids: Ids, labels: Ids) -> None:
        again = self._table.state[ids] == Wait.TAKEN_BACK
        early = self._table.before[ids] == Before.EARLY
        resolution = np.where(again | early, Resolution.CORRECTED, Resolution.LABELLED)
        waited = self._labels.time_ms[labels] - self._table.time_ms[ids]
        self._decisions.push(ids, resolution.astype(np.uint8), waited, self._labels.values(labels))
        self._counts.matched += int(np.count_nonzero(~again))
        self._counts.taken_back += int(np.count_nonzero(again))
