"""The table of the events that wait for a label, without their payload.

Each event has a number, which indexes arrays of its key, record time, partition, offset, state and slot: 34 bytes, and
8 more where the key of labels is another than that of erasures. The table also tracks how its events differ from those
of the last checkpoint, for 4 bytes an event.

Legend: n events of a call, B events of the last checkpoint, A added since, H events of a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array
from ingest.events.identity import identity_hash
from learner.labels.index.numbers import Ids, Numbers, joined_ids

WAITING = np.dtype(
    [
        ("key", "u8"),
        ("key_hash", "u8"),
        ("time_ms", "i8"),
        ("offset", "i8"),
        ("partition", "i4"),
        ("slot", "i4"),
        ("before", "u1"),
    ]
)
"""An event without its payload, as in checkpoints, 41 bytes: `key` is that of labels, `key_hash` that of erasures."""


class Wait(IntEnum):
    """The state of an event in the join."""

    FREE = 0
    """There is no event of this number."""
    WAITING = 1
    """It has no label."""
    LABELLED = 2
    """Its label came; it is returned next."""
    TIMED_OUT = 3
    """Its label did not come in time; it is returned next."""
    KEPT = 4
    """It was returned as timed out, and is kept for its label."""
    TAKEN_BACK = 5
    """It was returned as timed out, then its label came; it is returned again next."""


class Before(IntEnum):
    """What became of an event before its label came."""

    NOTHING = 0
    EARLY = 1
    """It was trained on as a negative on arrival."""
    STORED = 2
    """It timed out as a negative, which was stored and not trained on."""


@dataclass(frozen=True)
class TableChanges:
    """The events of a checkpoint, as the changes since the one before.

    Attributes:
        base: the number of the checkpoint before; None if all events are new.
        alive: which of its events are left where they were, bool `[B]`.
        new: the other events, WAITING `[A]`, which follow them.
        ids: the numbers of all events, in the order of the checkpoint, `[H]`.
    """

    base: int | None
    alive: NDArray[np.bool_]
    new: NDArray[np.void]
    ids: Ids


class WaitingTable:
    """At most `most` events, found by their numbers; used by one thread.

    Attributes:
        key, time_ms, offset, partition, slot, state, before: of each event, by its number. `state` is a `Wait`, and is
            set by `change` alone; `before` is a `Before`, and is set by `set_before` alone.
        counts: events by state.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Pages of these arrays take memory once they are used.
        self.key, self._key_hash = np.zeros(limit, np.uint64), np.zeros(0, np.uint64)
        self.time_ms, self.offset = np.zeros(limit, np.int64), np.zeros(limit, np.int64)
        self.partition, self.slot = np.zeros(limit, np.int32), np.zeros(limit, np.int32)
        self.state, self.before = np.zeros(limit, np.uint8), np.zeros(limit, np.uint8)
        self.counts = np.zeros(len(Wait), np.int64)
        self._numbers = Numbers(limit)
        self._gone: list[Ids] = []
        """Numbers of removed events of the last checkpoint and since; used again after the next checkpoint."""
        self._base: int | None = None
        """The number of the last checkpoint."""
        self._base_ids = np.empty(0, np.int32)
        self._new: list[Ids] = []
        """Events since, in order."""
        self._moved: list[Ids] = []
        """Events whose slot, or `before`, has changed since."""

    def __len__(self) -> int:
        return int(self.counts[Wait.WAITING :].sum())

    @property
    def own_keys(self) -> bool:
        """Whether the key of labels is another than that of erasures."""
        return bool(len(self._key_hash))

    @property
    def free(self) -> int:
        """Events that can be added now."""
        return self._numbers.free

    @property
    def needs_checkpoint(self) -> bool:
        """Whether numbers run low, and a checkpoint lets them be used again."""
        return bool(self._gone) and self.free < self._limit // 8

    @property
    def nbytes(self) -> int:
        """Bytes of memory: of the arrays up to the highest number that was used, and of the lists."""
        columns = (self.key, self.time_ms, self.offset, self.partition, self.slot, self.state, self.before)
        each = sum(column.itemsize for column in columns) + 8 * self.own_keys
        lists = [self._base_ids, *self._new, *self._gone, *self._moved]
        return self._numbers.used * each + self._numbers.nbytes + sum(ids.nbytes for ids in lists)

    def add(self, columns: Mapping[str, Array]) -> Ids:
        """Add n events that wait, without a slot yet, and return their numbers."""
        ids = self._numbers.take(len(columns["offset"]))
        if "label_key" in columns and not self.own_keys:
            self._begin_own_keys()
        if self.own_keys:
            self._key_hash[ids] = columns["key_hash"]
        self.key[ids] = columns.get("label_key", columns["key_hash"])
        self.time_ms[ids], self.offset[ids] = columns["time_ms"], columns["offset"]
        self.partition[ids], self.before[ids] = columns["partition"], Before.NOTHING
        self.state[ids] = Wait.WAITING
        self.counts[Wait.WAITING] += len(ids)
        if self._base is not None:
            self._new.append(ids)
        return ids

    def change(self, ids: Ids, state: Wait) -> None:
        """Set the state of n events."""
        self.counts -= np.bincount(self.state[ids], minlength=len(Wait))
        self.state[ids] = state
        self.counts[state] += len(ids)

    def set_before(self, ids: Ids, before: Before) -> None:
        """Set what became of n events before their label came."""
        self.before[ids] = before
        if self._base is not None:
            self._moved.append(ids)

    def move(self, ids: Ids, slots: NDArray[np.int32]) -> None:
        """Set other slots for n events."""
        self.slot[ids] = slots
        if self._base is not None:
            self._moved.append(ids)

    def remove(self, ids: Ids) -> None:
        """Remove n events."""
        self.change(ids, Wait.FREE)
        if self._base is None:
            self._numbers.release(ids)
        else:
            self._gone.append(ids)

    def ids(self) -> Ids:
        """Return the numbers of all events."""
        return np.flatnonzero(self.state[: self._numbers.used]).astype(np.int32)

    def identity(self, ids: Ids) -> NDArray[np.uint64]:
        """Return what the checksums of the payload of n events depend on besides the payload."""
        return row_identity(self.partition[ids], self.offset[ids], self.key[ids])

    def identity_columns(self, ids: Ids) -> dict[str, Array]:
        """Return `partition`, `offset`, `time_ms` and `key_hash` of n events."""
        key_hash = self._key_hash if self.own_keys else self.key
        return {
            "partition": self.partition[ids],
            "offset": self.offset[ids],
            "time_ms": self.time_ms[ids],
            "key_hash": key_hash[ids],
        }

    def in_order(self, ids: Ids) -> Ids:
        """Return n events by record time, then partition and offset."""
        return ids[np.lexsort((self.offset[ids], self.partition[ids], self.time_ms[ids]))]

    def oldest_waiting(self) -> dict[int, int]:
        """Return, by index of the partition, the lowest offset of an event that was not returned and settled."""
        state = self.state[: self._numbers.used]
        ids = np.flatnonzero((state >= Wait.WAITING) & (state <= Wait.TIMED_OUT))
        partition = self.partition[ids]
        lowest = np.full(int(partition.max(initial=-1)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(lowest, partition, self.offset[ids])
        return {int(index): int(lowest[index]) for index in np.unique(partition)}

    def waiting_by_partition(self) -> dict[int, int]:
        """Return, by index of the partition, how many events were not returned and settled."""
        state = self.state[: self._numbers.used]
        partition = self.partition[np.flatnonzero((state >= Wait.WAITING) & (state <= Wait.TIMED_OUT))]
        numbers, counts = np.unique(partition, return_counts=True)
        return dict(zip(numbers.tolist(), counts.tolist(), strict=True))

    def begin_snapshot(self, number: int) -> TableChanges:
        """Return the events for checkpoint `number`, from which changes are tracked from now on."""
        base, alive = self._base, self.state[self._base_ids] != Wait.FREE
        if base is None:
            new = self.ids()
        else:
            moved = np.zeros(self._numbers.used, np.bool_)
            moved[joined_ids(self._moved)] = True
            moved_base = moved[self._base_ids]
            new = joined_ids([*self._new, self._base_ids[alive & moved_base]])
            new = new[self.state[new] != Wait.FREE]
            alive &= ~moved_base
        self._track(number, np.concatenate([self._base_ids[alive], new]))
        return TableChanges(base, alive, self._entries(new), self._base_ids)

    def not_written(self) -> None:
        """Let the next checkpoint have all events: the last one was not written."""
        self._track(None, self._base_ids[:0])

    def restore(self, number: int | None, entries: NDArray[np.void], state: NDArray[np.uint8], *, own: bool) -> Ids:
        """Restore the events of a checkpoint, and return their numbers.

        Args:
            number: of the checkpoint, if the next one has the changes since; None if the next one has all events.
            entries: the events, WAITING `[H]`, in the order of the checkpoint.
            state: of each event, `[H]`.
            own: whether the key of labels is another than that of erasures.
        """
        ids = self._numbers.take(len(entries))
        if own:
            self._begin_own_keys()
            self._key_hash[ids] = entries["key_hash"]
        for name in ("key", "time_ms", "offset", "partition", "slot", "before"):
            getattr(self, name)[ids] = entries[name]
        self.state[ids] = state
        self.counts += np.bincount(state, minlength=len(Wait))
        self._track(number, ids if number is not None else ids[:0])
        return ids

    def _begin_own_keys(self) -> None:
        self._key_hash = np.zeros(self._limit, np.uint64)
        used = slice(self._numbers.used)
        self._key_hash[used] = self.key[used]

    def _track(self, number: int | None, ids: Ids) -> None:
        self._base, self._base_ids, self._new, self._moved = number, ids, [], []
        for gone in self._gone:
            self._numbers.release(gone)
        self._gone = []

    def _entries(self, ids: Ids) -> NDArray[np.void]:
        entries = np.zeros(len(ids), WAITING)
        for name, column in self.identity_columns(ids).items():
            entries[name] = column
        entries["key"], entries["slot"], entries["before"] = self.key[ids], self.slot[ids], self.before[ids]
        return entries


def row_identity(
    partition: NDArray[np.int32], offset: NDArray[np.int64], key: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return what the checksums of n rows depend on besides the row."""
    return identity_hash(partition.astype(np.uint64), offset, np.zeros(len(offset), np.int32)) ^ key
