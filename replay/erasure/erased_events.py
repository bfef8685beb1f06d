"""The erased events, in the form of the records of `erasures.log` that erase them.

Legend: n events of a call, P partitions, R rows of ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.identity import base_of

_NONE = 2**32 - 1
"""Stands for no column."""
_GROWTH = 4
"""A run of keys is merged with the previous one while that is less than _GROWTH times as long."""
_AT_ONCE = 65536
"""How many records are compared at once."""
_REST = np.dtype([("end", np.int64), ("row", np.uint32), ("part", np.uint32)])


class ByKey(msgspec.Struct, frozen=True, kw_only=True, tag="key", tag_field="what"):
    """Erases all events of a key so far; later ones are not erased."""

    number: int = 0
    """The number of the record, from 1; assigned by the log."""
    time: float
    by: str
    """`command`, or the position of the tombstone as `topic#incarnation[partition]@offset`."""
    key_hash: str
    """16 hexadecimal digits; keys themselves are not stored."""
    up_to: dict[str, int]
    """By partition, as `topic#incarnation[partition]`, the first offset that is not erased. Records may share it."""
    beyond: dict[str, int] = {}
    """Higher ends, for the partitions in which events of the key arrived since `up_to` was determined."""


class ByRange(msgspec.Struct, frozen=True, kw_only=True, tag="range", tag_field="what"):
    """Erases all events of a range of offsets."""

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
    """Return the hash of a key, given as the bytes of its text, as records contain it."""
    return f"{int(hash_texts([key])[0]):016x}"


@dataclass(frozen=True)
class _Run:
    """Keys in ascending order, with their records; the records of one key are in the order of their numbers."""

    keys: NDArray[np.uint64]
    rest: NDArray[np.void]
    """For each key the row of its ends, and one partition with a higher end, _REST."""

    def __len__(self) -> int:
        return len(self.keys)


class Packed(msgspec.Struct, frozen=True, kw_only=True, tag="packed", tag_field="what"):
    """The events that a set of records covers, as a line of a file; numbers are little-endian."""

    nonce: str = ""
    """By which, and a secret, `keys` are masked in the file."""
    bases: list[int]
    """Partition bases, uint64 `[P]`."""
    rows: bytes
    """Rows of ends: the first offset of each partition that is not erased, int64 `[R, P]`."""
    numbers: bytes
    """The number of the last record that refers to each row, int64 `[R]`."""
    keys: bytes
    """Hashes of keys, ascending, uint64."""
    rest: bytes
    """For each key the end in one partition (int64), its row of ends and the column of that partition (uint32)."""
    ranges: dict[int, tuple[list[int], list[int]]]
    """First and last offsets, by partition base."""


class ErasedEvents:
    """The events that a set of records covers. Used by one thread while it grows; a copy does not change.

    Takes about 24 bytes a key, and 8 P + 8 for each row of ends, which records share. A record that a later one of the
    same key covers takes no space.
    """

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self._columns: dict[int, int] = {}
        """The column of each partition, by its base."""
        self._rows: NDArray[np.int64] = np.zeros((0, 1), np.int64)
        self._numbers: NDArray[np.int64] = np.zeros(0, np.int64)
        """The number of the last record that refers to each row."""
        self._used = 0
        self._last: Mapping[str, int] | None = None
        """The ends that the last row was built from."""
        self._runs: list[_Run] = []
        self._ranges: dict[int, NDArray[np.int64]] = {}
        """Disjoint ranges in ascending order by partition base: first and last offsets, `[2, n]`."""
        self.add(records)

    def __bool__(self) -> bool:
        return bool(self._runs or self._ranges)

    def __len__(self) -> int:
        """The number of keys and ranges; different records of one key count each."""
        return sum(len(run) for run in self._runs) + sum(len(ranges[0]) for ranges in self._ranges.values())

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        runs = sum(run.keys.nbytes + run.rest.nbytes for run in self._runs)
        return runs + self._rows.nbytes + self._numbers.nbytes + sum(ranges.nbytes for ranges in self._ranges.values())

    def copy(self) -> "ErasedEvents":
        """Return a copy for another thread."""
        copy = ErasedEvents()
        copy._columns, copy._rows, copy._used = dict(self._columns), self._rows[: self._used], self._used
        copy._numbers = self._numbers[: self._used].copy()
        copy._runs, copy._ranges = list(self._runs), dict(self._ranges)
        return copy

    def add(self, records: Sequence[Record]) -> None:
        """Cover the events of further records."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        keys: list[int] = []
        rest: list[tuple[int, int, int]] = []
        for record in records:
            if isinstance(record, ByRange):
                ranges.setdefault(base_of(record.partition), []).append((record.first, record.last))
                continue
            row = self._row(record.up_to)
            self._numbers[row] = max(self._numbers[row], record.number)
            beyond = [(end, row, self._column(base_of(name))) for name, end in record.beyond.items()]
            rest += beyond or [(0, row, _NONE)]
            keys += [int(record.key_hash, 16)] * max(1, len(beyond))
        if keys:
            self._add_run(np.array(keys, np.uint64), np.array(rest, _REST))
        for base, new in ranges.items():
            before = self._ranges.get(base, np.empty((2, 0), np.int64))
            self._ranges[base] = _merged(np.concatenate([before, np.array(new, np.int64).T], axis=1))

    def drop(self, ends: Mapping[str, int], through: int) -> int:
        """Drop the records by key up to number `through` that cover only offsets below `ends`.

        Args:
            ends: by name of the partition; a partition without an end counts as 0.
            through: a number of a record.

        Returns:
            The highest number of a record that was dropped; 0 where none was.
        """
        below = np.zeros(self._rows.shape[1], np.int64)
        for name, end in ends.items():
            if (column := self._columns.get(base_of(name))) is not None:
                below[column] = end
        numbers = self._numbers[: self._used]
        may_drop_R = (self._rows[: self._used] <= below).all(axis=1) & (numbers <= through)
        runs, dropped = [], 0
        for run in self._runs:
            row, part = run.rest["row"], run.rest["part"]
            drops = may_drop_R[row] & ((part == _NONE) | (run.rest["end"] <= below[np.where(part == _NONE, 0, part)]))
            dropped = max(dropped, int(numbers[row[drops]].max(initial=0)))
            runs.append(_Run(run.keys[~drops], run.rest[~drops]) if drops.any() else run)
        if dropped:
            self._runs = [run for run in runs if len(run)]
            self._merge_all()
        return dropped

    def contains_tombstone(self, key: int, partition: str, offset: int) -> bool:
        """Return whether the records already cover the tombstone of a key at an offset of a partition."""
        column = self._columns.get(base_of(partition))
        for run in self._runs if column is not None else ():
            first = np.searchsorted(run.keys, np.uint64(key))
            last = np.searchsorted(run.keys, np.uint64(key), side="right")
            rest = run.rest[first:last]
            if ((rest["part"] == column) & (rest["end"] >= offset)).any():
                return True
        return False

    def covers(self, bases: NDArray[np.uint64], columns: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Return which of n events are erased, bool `[n]`.

        Args:
            bases: `partition_base` of each partition by its index, uint64 `[P]`.
            columns: `partition` (that index), `offset` and `key_hash`, each `[n]`. An offset below 0 is no event.
        """
        partition, offset = columns["partition"], columns["offset"]
        erased = np.zeros(len(offset), np.bool_)
        for base, (firsts, lasts) in self._ranges.items():
            for index in np.flatnonzero(bases == np.uint64(base)).tolist():
                members = np.flatnonzero(np.equal(partition, index))
                offsets = offset[members]
                before = np.searchsorted(firsts, offsets, side="right") - 1
                erased[members] |= (before >= 0) & (offsets <= lasts[before])
        if self._runs and len(offset):
            self._cover_keys(bases, columns, erased)
        return erased

    @property
    def keys(self) -> NDArray[np.uint64]:
        """The hashes of keys of which there are records, uint64."""
        return np.unique(np.concatenate([np.empty(0, np.uint64), *(run.keys for run in self._runs)]))

    def packed(self) -> Packed:
        """Return the covered events in the form of a file."""
        self._merge_all()
        runs = self._runs or [_Run(np.empty(0, np.uint64), np.empty(0, _REST))]
        return Packed(
            bases=list(self._columns),
            rows=self._rows[: self._used].astype("<i8").tobytes(),
            numbers=self._numbers[: self._used].astype("<i8").tobytes(),
            keys=runs[0].keys.astype("<u8").tobytes(),
            rest=runs[0].rest.tobytes(),
            ranges={base: (firsts.tolist(), lasts.tolist()) for base, (firsts, lasts) in self._ranges.items()},
        )

    @classmethod
    def unpacked(cls, packed: Packed) -> "ErasedEvents":
        """Return the events that `packed` was called for."""
        new = cls()
        new._columns = {base: column for column, base in enumerate(packed.bases)}
        new._rows = np.frombuffer(packed.rows, "<i8").astype(np.int64).reshape(-1, max(1, len(packed.bases)))
        new._numbers = np.frombuffer(packed.numbers, "<i8").astype(np.int64)
        new._used = len(new._rows)
        if packed.keys:
            new._runs = [_Run(np.frombuffer(packed.keys, "<u8").astype(np.uint64), np.frombuffer(packed.rest, _REST))]
        new._ranges = {base: np.array(ranges, np.int64) for base, ranges in packed.ranges.items()}
        return new

    def _cover_keys(self, bases: NDArray[np.uint64], columns: Mapping[str, Array], erased: NDArray[np.bool_]) -> None:
        keys = columns["key_hash"].astype(np.uint64, copy=False)
        column_of = np.array([self._columns.get(base, _NONE) for base in bases.tolist()], np.int64)
        for run in self._runs:
            at = np.searchsorted(run.keys, keys)
            # A row without an event may have an unknown partition.
            members = np.flatnonzero((run.keys.take(at, mode="clip") == keys) & np.greater_equal(columns["offset"], 0))
            at = at[members]
            while len(members):
                rest, offset = run.rest[at], columns["offset"][members].astype(np.int64)
                column = column_of[columns["partition"][members]]
                known = column < self._rows.shape[1]
                ends = np.where(known, self._rows[rest["row"], np.where(known, column, 0)], 0)
                ends = np.where(rest["part"] == column, np.maximum(ends, rest["end"]), ends)
                erased[members] |= offset < ends
                at = at + 1
                more = (at < len(run)) & (run.keys.take(at, mode="clip") == keys[members])
                at, members = at[more], members[more]

    def _row(self, up_to: Mapping[str, int]) -> int:
        """Return the row of these ends; the previous record's ends are not stored again."""
        if self._last is not None and (up_to is self._last or up_to == self._last):
            return self._used - 1
        columns = np.array([self._column(base_of(name)) for name in up_to], np.int64)
        if self._used == len(self._rows):
            more = max(4, len(self._rows) // 2)
            self._rows = np.concatenate([self._rows, np.zeros((more, self._rows.shape[1]), np.int64)])
            self._numbers = np.concatenate([self._numbers, np.zeros(more, np.int64)])
        np.maximum.at(self._rows[self._used], columns, np.array(list(up_to.values()), np.int64))
        self._used, self._last = self._used + 1, up_to
        return self._used - 1

    def _column(self, base: int) -> int:
        """Return the column of a partition, which never changes."""
        column = self._columns.setdefault(base, len(self._columns))
        if column >= self._rows.shape[1]:
            more = np.zeros((len(self._rows), column + 1 - self._rows.shape[1]), np.int64)
            self._rows = np.concatenate([self._rows, more], axis=1)
        return column

    def _add_run(self, keys: NDArray[np.uint64], rest: NDArray[np.void]) -> None:
        order = np.argsort(keys, kind="stable")
        self._runs.append(_Run(keys[order], rest[order]))
        while len(self._runs) > 1 and len(self._runs[-2]) < _GROWTH * len(self._runs[-1]):
            self._merge_last()

    def _merge_all(self) -> None:
        while len(self._runs) > 1:
            self._merge_last()
        if self._runs:
            self._runs = [self._without_covered(*self._concatenated(self._runs[-1:]))]
        self._drop_rows()

    def _merge_last(self) -> None:
        """Merge the last two runs; later records of a key stay behind earlier ones."""
        self._runs[-2:] = [self._without_covered(*self._concatenated(self._runs[-2:]))]
        if len(self._runs) == 1:
            self._drop_rows()

    @staticmethod
    def _concatenated(runs: Sequence[_Run]) -> tuple[NDArray[np.uint64], NDArray[np.void]]:
        keys, rest = np.concatenate([run.keys for run in runs]), np.concatenate([run.rest for run in runs])
        order = np.argsort(keys, kind="stable")  # fast for runs that are sorted
        return keys[order], rest[order]

    def _without_covered(self, keys: NDArray[np.uint64], rest: NDArray[np.void]) -> _Run:
        """Leave out records that the next record of the same key covers as well."""
        first = np.flatnonzero(keys[:-1] == keys[1:])
        stays = np.ones(len(keys), np.bool_)
        for begin in range(0, len(first), _AT_ONCE):
            positions = first[begin : begin + _AT_ONCE]
            one, next_ = rest[positions], rest[positions + 1]
            covered = (self._rows[one["row"]] <= self._rows[next_["row"]]).all(axis=1)
            part = np.where(one["part"] == _NONE, 0, one["part"])
            end = np.where(one["part"] == next_["part"], next_["end"], 0)
            end = np.maximum(end, self._rows[next_["row"], part])
            stays[positions] = ~(covered & ((one["part"] == _NONE) | (one["end"] <= end)))
        return _Run(keys[stays], rest[stays])

    def _drop_rows(self) -> None:
        """Drop the rows that no record refers to any more, once they are half of all."""
        run = self._runs[0] if self._runs else _Run(np.empty(0, np.uint64), np.empty(0, _REST))
        used = np.unique(run.rest["row"])
        if self._last is not None:
            used = np.union1d(used, np.array([self._used - 1], used.dtype))
        if 2 * len(used) < self._used:
            rest = run.rest.copy()
            rest["row"] = np.searchsorted(used, rest["row"])
            self._runs = [_Run(run.keys, rest)] if len(run) else []
            self._rows, self._numbers, self._used = self._rows[used], self._numbers[used], len(used)


def _merged(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ascending disjoint ranges `[2, n]` that cover the same offsets; adjacent ones are merged."""
    firsts, lasts = ranges[:, np.argsort(ranges[0], kind="stable")]
    reached = np.maximum.accumulate(lasts)
    begins = np.ones(len(firsts), np.bool_)
    begins[1:] = firsts[1:] - 1 > reached[:-1]
    return np.stack([firsts[begins], reached[np.append(begins[1:], True)]])
