"""The labels that came within `wait`: an event that comes later may match one of them.

Labels that an event has matched are kept as well: other events may have the same key, and a second label for the event
is recognised as a duplicate.

Legend: n labels of a call, m pairs of an event and a label.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.identity import mix
from anabranch.ingest.events.schema import Label
from anabranch.learner.checkpoints.part_formats import KEPT_LABEL, Covers, erasable
from anabranch.learner.extensions.late_labels.decisions import MOST_OF_KEY, JoinCounts
from anabranch.learner.extensions.late_labels.durable_table import DurableTable
from anabranch.learner.extensions.late_labels.indexes import DueTimes, Ids

_UNUSED, _COUNTED, _USED = 1, 2, 3
"""States: no event has matched the label; the same, and it is counted as a duplicate; an event has matched it."""
_ERASABLE = ("key_hash", "time_ms", "partition", "offset")
_BYTES_AT_LEAST = 2**26
"""So much memory is used for labels before any is dropped, however small the file of the events is."""
_BITS = 2**22
_HASHES = 4
_MOST_RECENT = 2**19
"""Keys of a generation; then one in 40 keys that were not added is found."""


class KeptLabels(DurableTable):
    """At most `limit` labels; used by one thread.

    Attributes:
        own_keys: whether their key is another than that of erasures, so that an erasure by key is not of labels.
        timed_out: the keys of events that timed out: their labels that match none are late.
    """

    def __init__(self, label: Label, limit: int, counts: JoinCounts, *, own_keys: bool = False) -> None:
        names = KEPT_LABEL.names or ()
        entry = np.dtype([*((name, KEPT_LABEL[name]) for name in names), ("value", label.dtype, label.shape)])
        super().__init__(entry, "key_hash", max(limit, _BYTES_AT_LEAST // entry.itemsize), _USED + 1)
        self._counts = counts
        self.own_keys = own_keys
        self._expiry = DueTimes(self["time_ms"], lambda ids: self.state[ids] != 0)
        self._came = 0
        self.timed_out = RecentKeys()

    def add(self, columns: Mapping[str, Array]) -> Ids:
        """Add n labels in the order of arrival, and return their numbers; with too many, the oldest are dropped."""
        count = len(columns["label"])
        if len(self) + count > self.limit:
            oldest = self._expiry.pop_oldest(len(self) + count - self.limit)
            self._counts.dropped_labels += int(np.count_nonzero(self.state[oldest] != _USED))
            self.delete(oldest)
        order = np.arange(self._came, self._came + count)
        self._came += count
        ids = self.insert({**columns, "order": order, "value": columns["label"]}, _UNUSED)
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
        position, ids = self.index.find(keys)
        fits = (self["time_ms"][ids] >= begin_ms[position]) & (self["time_ms"][ids] <= end_ms[position])
        position, ids = position[fits], ids[fits]
        order = np.lexsort((self["order"][ids], position))
        position, ids = position[order], ids[order]
        first = np.ones(len(position), np.bool_)
        first[1:] = position[1:] != position[:-1]
        later = np.setdiff1d(ids[~first], ids[first])
        later = later[self.state[later] == _UNUSED]
        self.change(later, _COUNTED)
        return position[first], ids[first], len(later)

    def has_for(
        self, keys: NDArray[np.uint64], begin_ms: NDArray[np.int64], end_ms: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return which of n events have a label, bool `[n]`; the arguments are those of `first_for`."""
        _, ids = self.index.find(np.unique(keys))
        return self._any_within(ids, keys, begin_ms, end_ms)

    def values(self, ids: Ids) -> tuple[Array, NDArray[np.int32], NDArray[np.int64]]:
        """Return the values of n labels, and the partitions and offsets of their messages."""
        return self["value"][ids], self["partition"][ids], self["offset"][ids]

    def unused(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the partitions and offsets of the labels that no event has matched, save duplicates."""
        ids = self.ids(_UNUSED, _UNUSED)
        return self["partition"][ids], self["offset"][ids]

    def use(self, ids: Ids) -> None:
        """Mark n labels as used."""
        self.change(np.unique(ids), _USED)

    def mark_duplicates(self, ids: Ids, within_ms: int) -> int:
        """Mark those of n labels as duplicates that are unused and have the key of a used one; return how many.

        The record times of the two differ by at most `within_ms`. Of each key of the n labels, those are dropped that
        came after the first `MOST_OF_KEY`.
        """
        position, found = self.index.find(np.unique(self["key_hash"][ids]))
        ids = ids[self.state[ids] == _UNUSED]
        time_ms, used = self["time_ms"][ids], found[self.state[found] == _USED]
        duplicates = ids[self._any_within(used, self["key_hash"][ids], time_ms - within_ms, time_ms + within_ms)]
        self.change(duplicates, _COUNTED)
        excess = self._excess(position, found)
        self._counts.crowded_labels += int(np.count_nonzero(self.state[excess] == _UNUSED))
        self.delete(excess)
        return len(duplicates)

    def expire(self, time_ms: int) -> None:
        """Remove the labels with a record time below `time_ms`; those that are unused have matched no event."""
        ids = self._expiry.pop_before(time_ms)
        unused = ids[self.state[ids] == _UNUSED]
        late = int(np.count_nonzero(self.timed_out.find(self["key_hash"][unused])))
        self._counts.late_labels += late
        self._counts.unmatched_labels += len(unused) - late
        self.delete(ids)
        self.index.shrink(len(self))
        self._expiry.shrink(len(self))

    def erase(self, covers: Covers) -> None:
        """Remove erased labels."""
        ids = self.ids()
        erased = ids[covers(erasable(self.columns(_ERASABLE, ids), own_keys=self.own_keys))]
        self.delete(erased)
        self["value"][erased] = 0

    def restore(self, number: int | None, entries: NDArray[np.void], state: NDArray[np.uint8]) -> bool:
        """Restore the m labels of a checkpoint, `entry` `[m]`, and return whether the next one has the changes since.

        `number`: of the checkpoint; None if the next one has all labels.
        """
        if len(entries) > self.limit:
            last = np.argsort(entries["order"])[-self.limit :]
            number, entries, state = None, entries[last], state[last]
        ids = self.load(number, entries, state)
        self._came = int(entries["order"].max(initial=-1)) + 1
        self._expiry.add(ids)
        return number is not None

    def _any_within(
        self, ids: Ids, keys: NDArray[np.uint64], begin_ms: NDArray[np.int64], end_ms: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return for each of n keys whether one of m labels has it and a record time in the range, bool `[n]`.

        Without a loop, and without the pairs of both, of which there are many where few keys have many labels.
        """
        if not len(ids):
            return np.zeros(len(keys), np.bool_)
        times = np.sort(self["time_ms"][ids])
        distinct, of_label = np.unique(self["key_hash"][ids], return_inverse=True)
        of_key = np.minimum(np.searchsorted(distinct, keys), len(distinct) - 1)
        # Keys and times as one sorted number: the key's number, then the number of lower times.
        label = np.sort(of_label * (len(times) + 1) + np.searchsorted(times, self["time_ms"][ids]))
        first = of_key * (len(times) + 1) + np.searchsorted(times, begin_ms)
        end = of_key * (len(times) + 1) + np.searchsorted(times, end_ms, side="right")
        any_within = np.searchsorted(label, first) < np.searchsorted(label, end)
        found: NDArray[np.bool_] = any_within & (distinct[of_key] == keys)
        return found

    def _excess(self, position: NDArray[np.intp], ids: Ids) -> Ids:
        """Return those of m labels, each with the position of its key, that came after `MOST_OF_KEY` of their key."""
        many = np.bincount(position)[position] > MOST_OF_KEY if len(ids) else np.empty(0, np.bool_)
        position, ids = position[many], ids[many]
        order = np.lexsort((self["order"][ids], position))
        before = np.searchsorted(position, position)  # the positions ascend
        return ids[order[np.arange(len(ids)) - before >= MOST_OF_KEY]]


class RecentKeys:
    """The last half to one million keys that were added, in 8 MiB; a few others are found too. A key of 0 is no key.

    It is a Bloom filter in two generations (Bloom 1970).
    """

    def __init__(self) -> None:
        self._new, self._old = np.zeros(_BITS, np.bool_), np.zeros(0, np.bool_)
        self._count = 0

    def add(self, keys: NDArray[np.uint64]) -> None:
        """Add n keys."""
        if self._count > _MOST_RECENT:
            self._old, self._new, self._count = self._new, np.zeros(_BITS, np.bool_), 0
        self._new[self._bits(keys)] = True
        self._count += len(keys)

    def find(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of n keys were added recently, bool `[n]`."""
        bits_Hn = self._bits(keys)
        found: NDArray[np.bool_] = np.zeros(len(keys), np.bool_)
        for bits in (self._new, self._old):
            if len(bits):
                found |= bits[bits_Hn].all(axis=0)
        found &= keys != 0
        return found

    @staticmethod
    def _bits(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the positions of n keys, `[_HASHES, n]`: parts of one hash of 64 bits, and of another."""
        first, second = mix(keys), mix(~keys)
        hashes = [first, first >> np.uint64(32), second, second >> np.uint64(32)]
        return np.stack([(each % np.uint64(_BITS)).astype(np.int64) for each in hashes[:_HASHES]])
