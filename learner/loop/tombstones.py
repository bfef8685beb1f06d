"""Converts the tombstones of the stream to erasure records: a tombstone erases all earlier events of its key.

Says also where tombstones have keys that no event has, so that what they order to erase stays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from anabranch.ingest.events.block import Array, SkipReason
from anabranch.ingest.events.identity import partition_name
from anabranch.ingest.events.key_forms import PLAIN
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.learner.checkpoints.background_erasure import Positions
from anabranch.learner.stream.batch import Span
from anabranch.replay.erasure.erased_events import ByKey
from anabranch.replay.erasure.erasure_log import now

_MANY = 65536
"""Events after which the next tombstone's record has the current ends of all partitions."""
_MANY_WITHOUT_EFFECT = 10
"""Tombstones with keys of the right form that may all erase nothing: their events may have left the store."""
_TOMBSTONE = np.uint8(SkipReason.TOMBSTONE)
_EVENT = np.dtype([("key_hash", "u8"), ("offset", "i8"), ("partition", "i4")])


class Tombstones:
    """Makes the erasure records of tombstones. Used by one thread.

    Records share the ends of all partitions, which would otherwise take most of their space. Keys and offsets of the
    events read after these ends are kept, so that a record covers all events of its key read before the tombstone, and
    no later ones.
    """

    def __init__(self) -> None:
        self._partitions: Sequence[TopicPartition] = ()
        self._ends: dict[str, int] | None = None
        """The ends that records share; None: the next tombstone reads them again."""
        self._seen = 0
        self._events = np.empty(_MANY, _EVENT)

    def register_partitions(self, partitions: Sequence[TopicPartition]) -> None:
        """Set the partitions, by their index."""
        self._partitions = partitions

    def records(self, spans: Sequence[Span], positions: Positions) -> Iterator[ByKey]:
        """Yield a record for each tombstone of a batch; the iterator must be exhausted.

        `positions` returns the positions before the batch.
        """
        if self._ends is None and not any((span.columns["reason"] == _TOMBSTONE).any() for span in spans):
            return
        ends = {name: _end_of(position) for name, position in positions().items()}
        for span in spans:
            yield from self._of_span(span.columns, ends)
            ends |= {self._partitions[index]: _end_of(position) for index, position in span.positions.items()}

    def _of_span(self, columns: Mapping[str, Array], ends: Mapping[TopicPartition, int]) -> Iterator[ByKey]:
        seen = 0
        for index in np.flatnonzero(columns["reason"] == _TOMBSTONE).tolist():
            self._add(columns, seen, index)
            seen = index
            if self._ends is None:
                self._ends, self._seen = self._ends_before(columns, index, ends), 0
            key, offset = int(columns["key_hash"][index]), int(columns["offset"][index])
            name = partition_name(self._partitions[int(columns["partition"][index])])
            yield ByKey(
                time=now(),
                by=f"{name}@{offset}",
                key_hash=f"{key:016x}",
                up_to=self._ends,
                beyond=self._ends_of(key) | {name: offset},
            )
        self._add(columns, seen, len(columns["reason"]))

    def _add(self, columns: Mapping[str, Array], first: int, last: int) -> None:
        """Keep the keys and offsets of events; drop all of them, with the shared ends, when there are too many."""
        end = self._seen + last - first
        if self._ends is None or end > _MANY:
            self._ends = None
            return
        for name in _EVENT.names or ():
            self._events[name][self._seen : end] = columns[name][first:last]
        self._seen = end

    def _ends_of(self, key: int) -> dict[str, int]:
        """Return the ends of a key's events that were read after the shared ends, by partition."""
        events = self._events[: self._seen]
        events = events[events["key_hash"] == np.uint64(key)]
        return {
            partition_name(self._partitions[index]): int(events["offset"][events["partition"] == index].max()) + 1
            for index in np.unique(events["partition"]).tolist()
        }

    def _ends_before(
        self, columns: Mapping[str, Array], tombstone: int, ends: Mapping[TopicPartition, int]
    ) -> dict[str, int]:
        """Return the first unread offset of each partition before the event with index `tombstone` of a span."""
        before = dict(ends)
        for index in np.unique(columns["partition"][:tombstone]).tolist():
            last = np.flatnonzero(columns["partition"][:tombstone] == index)[-1]
            before[self._partitions[index]] = int(columns["offset"][last]) + 1
        before[self._partitions[int(columns["partition"][tombstone])]] = int(columns["offset"][tombstone])
        ends_of: dict[str, int] = {}
        for partition, end in before.items():
            if end > 0:  # the highest end of all passes over a file, whose events are the same
                name = partition_name(partition)
                ends_of[name] = max(end, ends_of.get(name, 0))
        return ends_of


def _end_of(position: Position) -> int:
    """Return the first offset without a read row."""
    return position.offset + (position.row > 0)


class TombstoneWatch:
    """Compares the tombstones that were read with the events that were erased. Thread-safe."""

    def __init__(self, forms: Callable[[], Mapping[str, int]], erased: Callable[[], int]) -> None:
        """Take functions that return the tombstones since the start by the form of their key, and the erased events."""
        self._forms = forms
        self._erased = erased

    @property
    def warning(self) -> str | None:
        """One sentence when tombstones have keys of another form than `[schema.key]`, or none has erased an event."""
        forms, erased = dict(self._forms()), self._erased()
        total, others = sum(forms.values()), {form: n for form, n in forms.items() if form != PLAIN}
        foreign = sum(others.values())
        if erased and foreign in (0, total):  # with one form alone, it is that of the events
            return None
        if foreign:
            named = ", ".join(f"{form} ({n:,})" for form, n in sorted(others.items()))
            return (
                f"{foreign:,} of {total:,} tombstones have a key in another form than the text of [schema.key], and "
                f"erase nothing: {named}; let the connector write the key as text, or erase with anabranch erase"
            )
        if not erased and total >= _MANY_WITHOUT_EFFECT:
            return (
                f"none of {total:,} tombstones has erased an event that is stored: is their key, byte for byte, the "
                "text of [schema.key]?"
            )
        return None
