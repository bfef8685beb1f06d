"""Which events are forgotten: what the records of `forgotten.log` say.

Legend: n events of a call, P partitions.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ingest.block import Array
from ingest.encoder import hash_texts
from ingest.identity import base_of

_FEW = 256
"""So many events are looked up one by one, so that the sorted keys need not be made anew for them."""


class ByKey(msgspec.Struct, frozen=True, kw_only=True, tag="key", tag_field="what"):
    """All events of a key so far are forgotten; those that come later are not."""

    number: int = 0
    """Counts the records from 1; given by the log."""
    time: float
    by: str
    """`command`, or the place of the tombstone as `topic#incarnation[partition]@offset`."""
    key_hash: str
    """16 hexadecimal digits; keys themselves are not written down."""
    up_to: dict[str, int]
    """For each partition, as `topic#incarnation[partition]`, the first offset that is not forgotten."""


class ByRange(msgspec.Struct, frozen=True, kw_only=True, tag="range", tag_field="what"):
    """All events of a range of offsets are forgotten."""

    number: int = 0
    time: float
    by: str
    partition: str
    """As `topic#incarnation[partition]`."""
    first: int
    last: int
    """Inclusive, as is `first`."""


Record = ByKey | ByRange


def hash_of_key(key: bytes) -> str:
    """Return what a record has of a key, given as the bytes of its text."""
    return f"{int(hash_texts([key])[0]):016x}"


class Forgotten:
    """What some records cover. Used by one thread while it grows."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self._ends: dict[int, dict[int, int]] = {}
        self._ranges: list[tuple[int, int, int]] = []
        self._sorted: NDArray[np.uint64] | None = None
        self.add(records)

    def __bool__(self) -> bool:
        return bool(self._ends or self._ranges)

    def add(self, records: Sequence[Record]) -> None:
        """Cover what further records say."""
        for record in records:
            if isinstance(record, ByRange):
                self._ranges.append((base_of(record.partition), record.first, record.last))
                continue
            key, known = int(record.key_hash, 16), len(self._ends)
            ends = self._ends.setdefault(key, {})
            for name, end in record.up_to.items():
                base = base_of(name)
                ends[base] = max(end, ends.get(base, 0))
            if len(self._ends) > known:
                self._sorted = None

    def covers(self, bases: NDArray[np.uint64], columns: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Return which of n events are forgotten, bool `[n]`.

        Args:
            bases: `partition_base` of each partition by its index, uint64 `[P]`.
            columns: `partition` (that index), `offset` and `key_hash`, each `[n]`. An offset below 0 is no event's.
        """
        partition, offset = columns["partition"], columns["offset"]
        found = np.zeros(len(offset), np.bool_)
        for base, first, last in self._ranges:
            for index in np.flatnonzero(bases == np.uint64(base)).tolist():
                found |= np.equal(partition, index) & np.greater_equal(offset, first) & np.less_equal(offset, last)
        if self._ends:
            keys = columns["key_hash"].astype(np.uint64, copy=False)
            for place in self._keyed(keys).tolist():
                ends, at = self._ends[int(keys[place])], int(offset[place])
                found[place] |= 0 <= at < ends.get(int(bases[int(partition[place])]), 0)
        return found

    def _keyed(self, keys: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the places of those of n keys that any record names."""
        if len(keys) <= _FEW:
            return np.array([place for place, key in enumerate(keys.tolist()) if key in self._ends], np.intp)
        if self._sorted is None:
            self._sorted = np.sort(np.fromiter(self._ends, np.uint64, len(self._ends)))
        places = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        return np.flatnonzero(self._sorted[places] == keys)
