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
        self._ranges: dict[int, NDArray[np.int64]] = {}
        """By partition base: ranges that neither meet nor overlap, rising, `[2, n]`: their first and last offsets."""
        self._sorted: NDArray[np.uint64] | None = None
        self.add(records)

    def __bool__(self) -> bool:
        return bool(self._ends or self._ranges)

    def add(self, records: Sequence[Record]) -> None:
        """Cover what further records say."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for record in records:
            if isinstance(record, ByRange):
                ranges.setdefault(base_of(record.partition), []).append((record.first, record.last))
                continue
            key, known = int(record.key_hash, 16), len(self._ends)
            ends = self._ends.setdefault(key, {})
            for name, end in record.up_to.items():
                base = base_of(name)
                ends[base] = max(end, ends.get(base, 0))
            if len(self._ends) > known:
                self._sorted = None
        for base, new in ranges.items():
            before = self._ranges.get(base, np.empty((2, 0), np.int64))
            self._ranges[base] = _merged(np.concatenate([before, np.array(new, np.int64).T], axis=1))

    def covers(self, bases: NDArray[np.uint64], columns: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Return which of n events are forgotten, bool `[n]`.

        Args:
            bases: `partition_base` of each partition by its index, uint64 `[P]`.
            columns: `partition` (that index), `offset` and `key_hash`, each `[n]`. An offset below 0 is no event's.
        """
        partition, offset = columns["partition"], columns["offset"]
        found = np.zeros(len(offset), np.bool_)
        for base, (firsts, lasts) in self._ranges.items():
            for index in np.flatnonzero(bases == np.uint64(base)).tolist():
                mine = np.flatnonzero(np.equal(partition, index))
                offsets = offset[mine]
                before = np.searchsorted(firsts, offsets, side="right") - 1
                found[mine] |= (before >= 0) & (offsets <= lasts[before])
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


def _merged(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ranges `[2, n]` that cover the same offsets, without those that meet or overlap, rising."""
    firsts, lasts = ranges[:, np.argsort(ranges[0], kind="stable")]
    reached = np.maximum.accumulate(lasts)
    begins = np.ones(len(firsts), np.bool_)
    begins[1:] = firsts[1:] - 1 > reached[:-1]
    return np.stack([firsts[begins], reached[np.append(begins[1:], True)]])
