"""What the tombstones of the stream erase: all events of a key that were read before, on any partition."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ingest.events.block import Array, SkipReason
from ingest.events.identity import partition_name
from ingest.events.partition import TopicPartition
from ingest.events.position import Position
from learner.stream.batches import Span
from replay.erasure.erased_events import ByKey
from replay.erasure.erasure_log import now

_MANY = 65536
"""Events that may be read before the ends of all partitions are written down again, if there is a tombstone then."""
_TOMBSTONE = np.uint8(SkipReason.TOMBSTONE)

Positions = Callable[[], Mapping[TopicPartition, Position]]


class Tombstones:
    """Makes records of tombstones. Used by one thread.

    Records share the ends of all partitions, which would take much more than all else that they say. Since those were
    taken it is remembered which keys came where, so that a record has all that was read before its tombstone and
    nothing that came later.
    """

    def __init__(self) -> None:
        self._partitions: Sequence[TopicPartition] = ()
        self._ends: dict[str, int] | None = None
        """What records share; None where they are to be taken with the next tombstone."""
        self._seen = 0
        self._keys = np.empty(_MANY, np.uint64)
        self._places = np.empty(_MANY, np.int32)
        self._offsets = np.empty(_MANY, np.int64)

    def meet(self, partitions: Sequence[TopicPartition]) -> None:
        """Learn of partitions by their index."""
        self._partitions = partitions

    def records(self, spans: Sequence[Span], positions: Positions) -> Iterator[ByKey]:
        """Yield a record for each tombstone of a batch, all of which must be asked for; `positions`: before it."""
        if self._ends is None and not any((span.columns["reason"] == _TOMBSTONE).any() for span in spans):
            return
        ends = {name: _end_of(position) for name, position in positions().items()}
        for span in spans:
            yield from self._of_span(span.columns, ends)
            ends |= {self._partitions[index]: _end_of(position) for index, position in span.positions.items()}

    def _of_span(self, columns: Mapping[str, Array], ends: Mapping[TopicPartition, int]) -> Iterator[ByKey]:
        seen = 0
        for place in np.flatnonzero(columns["reason"] == _TOMBSTONE).tolist():
            self._see(columns, seen, place)
            seen = place
            if self._ends is None:
                self._ends, self._seen = self._ends_before(columns, place, ends), 0
            key, offset = int(columns["key_hash"][place]), int(columns["offset"][place])
            name = partition_name(self._partitions[int(columns["partition"][place])])
            yield ByKey(
                time=now(),
                by=f"{name}@{offset}",
                key_hash=f"{key:016x}",
                up_to=self._ends,
                beyond=self._seen_of(key) | {name: offset},
            )
        self._see(columns, seen, len(columns["reason"]))

    def _see(self, columns: Mapping[str, Array], first: int, last: int) -> None:
        """Remember the keys of events; those of too many are let go of, and with them the ends."""
        end = self._seen + last - first
        if self._ends is None or end > _MANY:
            self._ends = None
            return
        self._keys[self._seen : end] = columns["key_hash"][first:last]
        self._places[self._seen : end] = columns["partition"][first:last]
        self._offsets[self._seen : end] = columns["offset"][first:last]
        self._seen = end

    def _seen_of(self, key: int) -> dict[str, int]:
        """Return the ends in the partitions in which events of a key came since the ends of all were taken."""
        mine = np.flatnonzero(self._keys[: self._seen] == np.uint64(key))
        places, offsets = self._places[mine], self._offsets[mine]
        return {
            partition_name(self._partitions[place]): int(offsets[places == place].max()) + 1
            for place in np.unique(places).tolist()
        }

    def _ends_before(
        self, columns: Mapping[str, Array], place: int, ends: Mapping[TopicPartition, int]
    ) -> dict[str, int]:
        """Return the first offset of each partition that was not read before an event of a span."""
        before = dict(ends)
        for index in np.unique(columns["partition"][:place]).tolist():
            mine = np.flatnonzero(columns["partition"][:place] == index)[-1]
            before[self._partitions[index]] = int(columns["offset"][mine]) + 1
        before[self._partitions[int(columns["partition"][place])]] = int(columns["offset"][place])
        return {partition_name(each): end for each, end in before.items() if end > 0}


def _end_of(position: Position) -> int:
    """Return the first offset of which no row was read."""
    return position.offset + (position.row > 0)
