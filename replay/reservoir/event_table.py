"""The table of held events, without their payload.

Records are stored by slot, where they stay as long as the event is held. The columns that scans and samples read are
stored by logical position: when events are removed, later ones move up, and only these columns are copied.

Legend: H events held, S slots, n events of a call.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.identity import identity_hash, partition_base
from anabranch.ingest.events.partition import TopicPartition
from anabranch.replay.erasure.erased_events import ErasedEvents
from anabranch.replay.snapshot import ENTRY

FIELDS = ("offset", "key_hash", "time_s", "partition", "row", "label")
RECORD = np.dtype([(name, ENTRY[name]) for name in FIELDS])
"""The record of an event, stored by slot."""
_WORDS = RECORD.itemsize // 8

FREE = -1
"""The offset of a slot that had no event since the start; its payload is unknown."""
_ERASED = -2
"""The offset of a slot without an event whose payload is erased."""
_LEFT = -3
"""A slot whose event was removed has this offset minus the event's; it keeps the payload until it is written."""


class EventTable:
    """At most `limit` events in S slots; 50 bytes an event."""

    def __init__(self, slots: int, limit: int, groups: int = 1) -> None:
        self.by_slot = np.zeros(slots, RECORD)
        """The record of the event in each slot. `take` takes a tenth of the time of fancy indexing."""
        # numpy scatters words in a third of the time.
        self._words = self.by_slot.view(np.uint64).reshape(slots, _WORDS)
        self.by_slot["offset"] = FREE
        self.limit = limit
        self._slot = np.zeros(limit, np.int32)
        self._priority = np.zeros(limit, np.float64)
        self._group = np.zeros(limit, np.int16)
        self._set_held(0)
        self.counts = np.zeros(groups, np.int64)
        """Events held of each quota group."""
        self.bases = np.empty(0, np.uint64)
        """Of each registered partition, the hash from which the identities of its events are computed."""

    def __len__(self) -> int:
        return self._held

    def still_at(self, slots: NDArray[np.int32], events: Mapping[str, Array] | NDArray[np.void]) -> NDArray[np.bool_]:
        """Return which of n slots still have the events with these identities, bool `[n]`."""
        present = self.by_slot.take(slots)
        same: NDArray[np.bool_] = present["offset"] == events["offset"]
        for name in ("partition", "row"):
            same &= present[name] == events[name]
        return same

    def column(self, name: str, slots: NDArray[np.int32] | NDArray[np.int64]) -> Array:
        """Return one column of RECORD for the events in n slots, `[n]`."""
        column: Array = self.by_slot[name][slots]
        return column

    def covered(self, erased: ErasedEvents) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Return which held events are erased, bool `[H]`, and the slots of removed events that are erased."""
        # By slot, in one pass: gathering the held events first takes three times as long.
        columns = columns_of(self.by_slot)
        offset = columns["offset"]
        columns["offset"] = np.where(np.less_equal(offset, _LEFT), _LEFT - offset, offset)
        covered = erased.covers(self.bases, columns)
        left = np.flatnonzero(covered & np.less(offset, 0))
        return covered[self.slots], left.astype(np.int32)

    def erase(self, slots: NDArray[np.int32] | NDArray[np.int64]) -> None:
        """Clear n slots, whose payload is erased."""
        self.by_slot[slots] = np.zeros(1, RECORD)
        self.by_slot["offset"][slots] = _ERASED

    def register(self, partitions: Sequence[TopicPartition]) -> None:
        """Register partitions by their index."""
        if len(partitions) > len(self.bases):
            new = [partition_base(name) for name in partitions[len(self.bases) :]]
            self.bases = np.concatenate([self.bases, np.array(new, np.uint64)])

    def identity(self, slots: NDArray[np.int32] | NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the identities of the events in n slots."""
        records = self.by_slot.take(slots)
        return identity_hash(self.bases[records["partition"]], records["offset"], records["row"])

    def find(self, events: NDArray[np.void]) -> NDArray[np.int32]:
        """Return the slots of n events that have the fields of a record, -1 for those not held; reads all events."""
        slots_of = np.full(len(events), FREE, np.int32)
        if len(slots_of):
            identities = identity_hash(self.bases[events["partition"]], events["offset"], events["row"])
            order, held = np.argsort(identities), self.identity(self.slots)
            positions = np.minimum(np.searchsorted(identities[order], held), len(identities) - 1)
            alike = identities[order][positions] == held
            slots_of[order[positions[alike]]] = self.slots[alike]
        return slots_of

    def append(
        self,
        slots: NDArray[np.int32],
        priority: NDArray[np.float64],
        group: NDArray[np.int16] | int,
        records: NDArray[np.void],
    ) -> None:
        """Append n events, RECORD `[n]`."""
        begin, end = self._held, self._held + len(slots)
        self._slot[begin:end], self._priority[begin:end], self._group[begin:end] = slots, priority, group
        self._words[slots] = records.view(np.uint64).reshape(len(records), _WORDS)
        self._set_held(end)
        self._count(self._group[begin:end], 1)

    def keep(self, stays: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Remove the events that do not stay, bool `[H]`, and return their slots."""
        positions = np.flatnonzero(~stays)
        left = self.slots.take(positions)
        self._count(self.groups.take(positions), -1)
        kept = self._held - len(left)
        for column in (self._slot, self._priority, self._group):
            column[:kept] = column[: self._held][stays]
        self._set_held(kept)
        self.by_slot["offset"][left] = _LEFT - self.by_slot["offset"][left]
        return left

    def copy(self, begin: int = 0) -> NDArray[np.void]:
        """Return the events from a position on, ENTRY `[H - begin]`."""
        slots = self.slots[begin:]
        events = np.empty(len(slots), ENTRY)
        records = self.by_slot.take(slots)
        for name in FIELDS:
            events[name] = records[name]
        events["slot"], events["priority"], events["group"] = slots, self.priorities[begin:], self.groups[begin:]
        return events

    def restore(self, index: NDArray[np.void], bases: Sequence[int]) -> None:
        """Replace the held events by these, ENTRY `[H]`."""
        self.by_slot["offset"][self.slots] = FREE
        self._set_held(0)
        self.counts[:] = 0
        self.bases = np.array(bases, np.uint64)
        self.append(index["slot"], index["priority"], index["group"], records_of(index))

    def regroup(self, group: NDArray[np.int16]) -> None:
        """Assign all events to other groups, `[H]`."""
        self._group[: self._held] = group
        self.counts[:] = 0
        self._count(group, 1)

    def _set_held(self, held: int) -> None:
        self._held = held
        self.slots = self._slot[:held]
        """The slot of each event, `[H]`, in logical order."""
        self.priorities = self._priority[:held]
        """The priority of each event, `[H]`."""
        self.groups = self._group[:held]
        """The quota group of each event, `[H]`."""

    def _count(self, group: NDArray[np.int16], sign: int) -> None:
        one = len(self.counts) == 1
        self.counts += sign * (len(group) if one else np.bincount(group, minlength=len(self.counts)))


def records_of(columns: Mapping[str, Array] | NDArray[np.void]) -> NDArray[np.void]:
    """Return the records of n events, RECORD `[n]`, from columns or fields of these names, all `[n]`."""
    records = np.empty(len(columns["offset"]), RECORD)
    for name in FIELDS:
        records[name] = columns[name]
    return records


def columns_of(records: NDArray[np.void]) -> dict[str, Array]:
    """Return the columns of n records that `ErasedEvents.covers` reads."""
    return {name: records[name] for name in ("partition", "offset", "key_hash")}
