"""The labels that came within `wait`: an event that comes later may match one of them.

Labels that an event has matched are kept as well: other events may have the same key, and a second label for the event
is recognised as a duplicate.

Legend: n labels of a call, m pairs of an event and a label.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array
from ingest.events.schema import Label
from learner.labels.index.due_times import DueTimes
from learner.labels.index.key_index import KeyIndex
from learner.labels.index.numbers import Ids, Numbers
from learner.labels.index.recent_keys import RecentKeys
from learner.labels.join_counts import JoinCounts
from replay.snapshot import StoreDelta

FREE, UNUSED, COUNTED, USED = 0, 1, 2, 3
"""States: there is no label of this number; no event has matched it; the same, and it is counted as a duplicate; an
event has matched it."""
IDENTITY = np.dtype([("key_hash", "u8"), ("time_ms", "i8"), ("offset", "i8"), ("partition", "i4")])
"""A label without its value, as in checkpoints: `partition` and `offset` are those of its message, for erasure."""
COLUMNS = tuple(IDENTITY.names or ())
_BYTES_AT_LEAST = 2**26
"""So much memory is used for labels before any is dropped, however small the file of the events is."""
MOST_OF_KEY = 64
"""Labels of one key that are kept, so that the time of a batch does not grow with those of a frequent key."""


class KeptLabels:
    """At most `most` labels; used by one thread.

    Attributes:
        key_hash, time_ms, value: of each label, by its number.
        order: in which labels came.
        entry: the dtype of a label in checkpoints.
        own_keys: whether their key is another than that of erasures, so that an erasure by key is not of labels.
    """

    def __init__(self, label: Label, limit: int, counts: JoinCounts, *, own_keys: bool = False) -> None:
        self._counts = counts
        self.own_keys = own_keys
        self.entry = np.dtype([*((name, IDENTITY[name]) for name in COLUMNS), ("value", label.dtype, label.shape)])
        self.limit = limit = max(limit, _BYTES_AT_LEAST // self.entry.itemsize)
        # Pages of these arrays take memory once they are used.
        self.key_hash, self.time_ms = np.zeros(limit, np.uint64), np.zeros(limit, np.int64)
        self.value = np.zeros((limit, *label.shape), label.dtype)
        self._state = np.zeros(limit, np.uint8)
        self._partition, self._offset = np.zeros(limit, np.int32), np.zeros(limit, np.int64)
        self.order = np.zeros(limit, np.int64)
        self._index = KeyIndex(self.key_hash, self._state)
        self._expiry = DueTimes(self.time_ms, lambda ids: self._state[ids] != FREE)
        self._numbers = Numbers(limit)
        self._count = self._came = 0
        self.timed_out = RecentKeys()
        """The keys of events that timed out: their labels that match none are late."""
        self.not_written()

    def __len__(self) -> int:
        return self._count

    def add(self, columns: Mapping[str, Array]) -> Ids:
        """Add n labels in the order of arrival, and return their numbers; with too many, the oldest are dropped."""
        count = len(columns["label"])
        if self._count + count > self.limit:
            oldest = self._expiry.pop_oldest(self._count + count - self.limit)
            self._counts.dropped_labels += int(np.count_nonzero(self._state[oldest] != USED))
            self._remove(oldest)
        ids = self._numbers.take(count)
        self.key_hash[ids], self.time_ms[ids] = columns["key_hash"], columns["time_ms"]
        self.value[ids] = columns["label"]
        self._partition[ids], self._offset[ids] = columns["partition"], columns["offset"]
        self.order[ids] = np.arange(self._came, self._came + count)
        self._came += count
        self._state[ids] = UNUSED
        self._count += count
        self._index.add(ids)
        self._expiry.add(ids)
        return ids

    def first_for(
        self, keys: NDArray[np.uint64], begin_ms: NDArray[np.int64], end_ms: NDArray[np.int64]
    ) -> tuple[NDArray[np.intp], Ids, int]:
        """Return the first label for each of n events that has one, and mark the later ones as duplicates.

        Args:
            keys: of the events, `[n]`.
            begin_ms: the earliest record time of a label that matches, `[n]`.
            end_ms: the latest.

        Returns:
            The positions of the events, their labels, and the number of labels that are duplicates now.
        """
        position, ids = self._index.find(keys)
        fits = (self.time_ms[ids] >= begin_ms[position]) & (self.time_ms[ids] <= end_ms[position])
        position, ids = position[fits], ids[fits]
        order = np.lexsort((self.order[ids], position))
        position, ids = position[order], ids[order]
        first = np.ones(len(position), np.bool_)
        first[1:] = position[1:] != position[:-1]
        later = np.setdiff1d(ids[~first], ids[first])
        later = later[self._state[later] == UNUSED]
        self._state[later] = COUNTED
        return position[first], ids[first], len(later)

    def has_for(
        self, keys: NDArray[np.uint64], begin_ms: NDArray[np.int64], end_ms: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return which of n events have a label, bool `[n]`; the arguments are those of `first_for`."""
        _, ids = self._index.find(np.unique(keys))
        return self._any_within(ids, keys, begin_ms, end_ms)

    def values(self, ids: Ids) -> tuple[Array, NDArray[np.int32], NDArray[np.int64]]:
        """Return the values of n labels, and the partitions and offsets of their messages."""
        return self.value[ids], self._partition[ids], self._offset[ids]

    def unused(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the partitions and offsets of the labels that no event has matched, save duplicates."""
        ids = np.flatnonzero(self._state[: self._numbers.used] == UNUSED)
        return self._partition[ids], self._offset[ids]

    def use(self, ids: Ids) -> None:
        """Mark n labels as used."""
        self._state[ids] = USED

    def mark_duplicates(self, ids: Ids, within_ms: int) -> int:
        """Mark those of n labels as duplicates that are unused and have the key of a used one; return how many.

        The record times of the two differ by at most `within_ms`. Of each key of the n labels, those are dropped that
        came after the first `MOST_OF_KEY`.
        """
        position, found = self._index.find(np.unique(self.key_hash[ids]))
        ids = ids[self._state[ids] == UNUSED]
        time_ms, used = self.time_ms[ids], found[self._state[found] == USED]
        duplicates = ids[self._any_within(used, self.key_hash[ids], time_ms - within_ms, time_ms + within_ms)]
        self._state[duplicates] = COUNTED
        excess = self._excess(position, found)
        self._counts.crowded_labels += int(np.count_nonzero(self._state[excess] == UNUSED))
        self._remove(excess)
        return len(duplicates)

    def expire(self, time_ms: int) -> None:
        """Remove the labels with a record time below `time_ms`; those that are unused have matched no event."""
        ids = self._expiry.pop_before(time_ms)
        unused = ids[self._state[ids] == UNUSED]
        late = int(np.count_nonzero(self.timed_out.find(self.key_hash[unused])))
        self._counts.late_labels += late
        self._counts.unmatched_labels += len(unused) - late
        self._remove(ids)
        self._index.shrink(self._count)
        self._expiry.shrink(self._count)

    def erase(self, covers: Callable[[Mapping[str, Array]], NDArray[np.bool_]]) -> int:
        """Remove erased labels, and return how many."""
        ids = self._ids()
        erased = ids[covers(erasable(self._columns(ids), own_keys=self.own_keys))]
        self._remove(erased)
        self.value[erased] = 0
        return len(erased)

    def begin_snapshot(self, number: int) -> tuple[StoreDelta, NDArray[np.uint8]]:
        """Return the labels for checkpoint `number` as changes, from which changes are tracked from now on, and the
        state of each label in the order of arrival."""
        base, ids = self._base_ids, self._ids()
        # A number that was used again is of a label that came later.
        alive = (self._state[base] != FREE) & (self.order[base] < self._base_came)
        new = ids[self.order[ids] >= self._base_came]
        new = new[np.argsort(self.order[new])]
        entries = np.zeros(len(new), self.entry)
        for name, column in self._columns(new).items():
            entries[name] = column
        entries["value"] = self.value[new]
        change = StoreDelta(self._base, alive, entries, None)
        self._track(number, np.concatenate([base[alive], new]))
        return change, self._state[self._base_ids]

    def not_written(self) -> None:
        """Let the next checkpoint have all labels: the last one was not written."""
        self._track(None, np.empty(0, np.int32))
        self._base_came = 0

    def restore(self, number: int | None, entries: NDArray[np.void], state: NDArray[np.uint8]) -> bool:
        """Restore the m labels of a checkpoint, and return whether the next one has the changes since.

        Args:
            number: of the checkpoint; None if the next one has all labels.
            entries: the labels in the order of arrival, `entry` `[m]`.
            state: of each label, `[m]`.
        """
        kept = slice(max(0, len(entries) - self.limit), None)
        columns = {name: entries[name][kept] for name in COLUMNS}
        ids = self.add({**columns, "label": entries["value"][kept]})
        self._state[ids] = state[kept]
        is_same = number is not None and len(ids) == len(entries)
        if is_same:
            self._track(number, ids)
        return is_same

    def _track(self, number: int | None, ids: Ids) -> None:
        self._base, self._base_ids, self._base_came = number, ids, self._came

    def _any_within(
        self, ids: Ids, keys: NDArray[np.uint64], begin_ms: NDArray[np.int64], end_ms: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return for each of n keys whether one of m labels has it and a record time in the range, bool `[n]`.

        Without a loop, and without the pairs of both, of which there are many where few keys have many labels.
        """
        if not len(ids):
            return np.zeros(len(keys), np.bool_)
        times = np.sort(self.time_ms[ids])
        distinct, of_label = np.unique(self.key_hash[ids], return_inverse=True)
        of_key = np.minimum(np.searchsorted(distinct, keys), len(distinct) - 1)
        # Keys and times as one sorted number: the key's number, then the number of lower times.
        label = np.sort(of_label * (len(times) + 1) + np.searchsorted(times, self.time_ms[ids]))
        first = of_key * (len(times) + 1) + np.searchsorted(times, begin_ms)
        end = of_key * (len(times) + 1) + np.searchsorted(times, end_ms, side="right")
        any_within = np.searchsorted(label, first) < np.searchsorted(label, end)
        found: NDArray[np.bool_] = any_within & (distinct[of_key] == keys)
        return found

    def _excess(self, position: NDArray[np.intp], ids: Ids) -> Ids:
        """Return those of m labels, each with the position of its key, that came after `MOST_OF_KEY` of their key."""
        many = np.bincount(position)[position] > MOST_OF_KEY if len(ids) else np.empty(0, np.bool_)
        position, ids = position[many], ids[many]
        order = np.lexsort((self.order[ids], position))
        before = np.searchsorted(position, position)  # the positions ascend
        return ids[order[np.arange(len(ids)) - before >= MOST_OF_KEY]]

    def _columns(self, ids: Ids) -> dict[str, Array]:
        return {
            "key_hash": self.key_hash[ids],
            "time_ms": self.time_ms[ids],
            "partition": self._partition[ids],
            "offset": self._offset[ids],
        }

    def _ids(self) -> Ids:
        return np.flatnonzero(self._state[: self._numbers.used]).astype(np.int32)

    def _remove(self, ids: Ids) -> None:
        self._state[ids] = FREE
        self._count -= len(ids)
        self._numbers.release(ids)


def erasable(columns: Mapping[str, Array], *, own_keys: bool) -> dict[str, Array]:
    """Return the columns of n labels with the keys of erasures: none if the labels have other keys."""
    return {**columns, "key_hash": np.zeros_like(columns["key_hash"])} if own_keys else dict(columns)
