"""Which offsets of the topics the row groups of files have, where columns name topic, partition and offset.

Legend: K rows of a row group.
"""

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.files import FileMark
from anabranch.ingest.backfill.open_files import RowFiles
from anabranch.ingest.backfill.parquet_file import ParquetRows
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.settings.backfill import KafkaColumns

_AT_ONCE = 8


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file, and the lowest and highest offset that it has of each partition."""

    file: int
    group: int
    rows: int
    spans: Mapping[TopicPartition, tuple[int, int]]

    @property
    def key(self) -> tuple[int, int]:
        """By what row groups differ."""
        return self.file, self.group


class KafkaIndex:
    """The row groups of files, in an order in which the offsets of each partition rise as far as they can."""

    def __init__(self, files: Sequence[FileMark], open_files: RowFiles, columns: KafkaColumns, topic: str) -> None:
        """Read the columns of `columns` of all files; `topic` is that of rows without a column that names it.

        Raises:
            SettingsError: the columns are of other types, or have nulls.
            HistoryError, HistoryAwayError: as `RowFiles.opened` does.
        """
        self._files = files
        self._open_files = open_files
        self._columns = columns
        self._topic = topic
        self.names = [name for name in (columns.topic, columns.partition, columns.offset) if name is not None]
        """The columns that name a row's offset in the topics."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = [group for groups in pool.map(self._groups, range(len(files))) for group in groups]
        self.groups = _rising(found)
        self._of: dict[TopicPartition, list[RowGroup]] = {}
        for group in self.groups:
            for name in group.spans:
                self._of.setdefault(name, []).append(group)

    @property
    def first_offsets(self) -> dict[TopicPartition, int]:
        """The lowest offset of each partition."""
        return {name: min(group.spans[name][0] for group in groups) for name, groups in self._of.items()}

    @property
    def ends(self) -> dict[TopicPartition, int]:
        """The offset after the highest one of each partition."""
        return {name: max(group.spans[name][1] for group in groups) + 1 for name, groups in self._of.items()}

    def first_missing(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return the first offset of each partition, from that of `offsets` on, that no file has.

        Reads the files of several partitions at once: in an object store, each takes a round trip or more.
        """
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return dict(zip(offsets, pool.map(self._first_missing, offsets, offsets.values()), strict=True))

    def _first_missing(self, name: TopicPartition, offset: int) -> int:
        while True:
            before = offset
            for group in self._of.get(name, ()):
                low, high = group.spans[name]
                if low <= offset <= high:
                    found = np.unique(self.read(group, whole=False)[1][name][1])
                    at = int(np.searchsorted(found, offset))
                    if at < len(found) and found[at] == offset:
                        breaks = np.flatnonzero(np.diff(found[at:]) != 1)
                        offset = int(found[at + int(breaks[0]) if len(breaks) else -1]) + 1
            if offset == before:
                return offset

    def overlapping(self, group: RowGroup, name: TopicPartition, begin: int, end: int) -> list[RowGroup]:
        """Return the other row groups that may have offsets `[begin, end)` of a partition."""
        return [
            other
            for other in self._of[name]
            if other is not group and other.spans[name][0] < end and other.spans[name][1] >= begin
        ]

    def read(
        self, group: RowGroup, *, whole: bool
    ) -> tuple[Any, dict[TopicPartition, tuple[NDArray[np.intp], NDArray[np.int64]]]]:
        """Return a row group as a table, and of each partition the rows and their offsets.

        Unless `whole`, the table has only the columns that name a row's offset.
        """
        mark = self._files[group.file]
        with self._open_files.opened(mark) as rows:
            assert isinstance(rows, ParquetRows)
            columns = self._open_files.decoder(mark).columns_in(rows.schema) if whole else []
            table = rows.group(group.group, list(dict.fromkeys([*columns, *self.names])))
            self._open_files.check_unchanged(mark)
            return table, self._placed(mark, table)

    def _groups(self, file: int) -> Iterator[RowGroup]:
        mark = self._files[file]
        found: list[RowGroup] = []
        with self._open_files.opened(mark) as rows:
            assert isinstance(rows, ParquetRows)
            self._check(mark, rows.schema)
            for group, count in enumerate(rows.group_rows()):
                spans = self._from_statistics(rows, group) or self._from_rows(mark, rows, group)
                found.append(RowGroup(file, group, count, spans))
        return iter(found)

    def _from_statistics(self, rows: ParquetRows, group: int) -> dict[TopicPartition, tuple[int, int]] | None:
        """Return the spans of a row group that its footer shows to be of one partition."""
        found = [rows.statistics(group, name) for name in self.names]
        *fixed, offset = [each for each in found if each is not None] or [(0, 1)]
        if None in found or any(low != high for low, high in fixed):
            return None
        topic = fixed[0][0] if self._columns.topic is not None else self._topic
        topic = topic.decode() if isinstance(topic, bytes) else topic
        return {TopicPartition(topic, int(fixed[-1][0])): (int(offset[0]), int(offset[1]))}

    def _from_rows(self, mark: FileMark, rows: ParquetRows, group: int) -> dict[TopicPartition, tuple[int, int]]:
        placed = self._placed(mark, rows.group(group, self.names))
        return {name: (int(offsets.min()), int(offsets.max())) for name, (_, offsets) in placed.items()}

    def _placed(self, mark: FileMark, table: Any) -> dict[TopicPartition, tuple[NDArray[np.intp], NDArray[np.int64]]]:
        """Return the rows of each partition, and their offsets."""
        for name in self.names:
            if table.column(name).null_count:
                raise SettingsError(
                    f"stream.backfill.files: {mark.name} has a row without {name}, which stream.backfill.identity "
                    "names; leave these rows out"
                )
        offsets = _numbers(table.column(self._columns.offset))
        partitions = _numbers(table.column(self._columns.partition))
        topics = np.zeros(table.num_rows, np.int64)
        words = [self._topic]
        if self._columns.topic is not None:
            column = table.column(self._columns.topic).combine_chunks()
            coded = column if types.is_dictionary(column.type) else column.dictionary_encode()
            topics, words = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64), coded.dictionary.to_pylist()
        both = np.stack([topics, partitions], axis=1)
        keys, of = np.unique(both, axis=0, return_inverse=True) if table.num_rows else (both, topics)
        return {
            TopicPartition(words[topic], partition): (at := np.flatnonzero(of.reshape(-1) == index), offsets[at])
            for index, (topic, partition) in enumerate(keys.tolist())
        }

    def _check(self, mark: FileMark, schema: Any) -> None:
        for name in self.names:
            wrong = (
                "it is missing"
                if name not in schema.names
                else f"it is of Arrow type {schema.field(name).type}"
                if not _fits(schema.field(name).type, text=name == self._columns.topic)
                else None
            )
            if wrong:
                raise SettingsError(
                    f"stream.backfill.files: {mark.name} does not fit stream.backfill.identity, which names the column "
                    f"{name}: {wrong}; correct identity, or leave the file out"
                )


def _fits(kind: Any, *, text: bool) -> bool:
    plain = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(plain) or types.is_large_string(plain)) if text else bool(types.is_integer(kind))


def _numbers(column: Any) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = column.combine_chunks().cast(pa.int64()).to_numpy(zero_copy_only=False)
    return numbers


def _rising(groups: Sequence[RowGroup]) -> list[RowGroup]:
    """Return row groups in their order, but none before another one that has lower offsets of one of its partitions.

    Kahn 1962, "Topological sorting of large networks"; groups that wait for each other come last.
    """
    of: dict[TopicPartition, list[int]] = {}
    for index, group in enumerate(groups):
        for name in group.spans:
            of.setdefault(name, []).append(index)
    after: list[list[int]] = [[] for _ in groups]
    waits_for = [0] * len(groups)
    for name, indexes in of.items():
        rising = sorted(indexes, key=lambda index: groups[index].spans[name][0])
        for one, next_ in itertools.pairwise(rising):
            after[one].append(next_)
            waits_for[next_] += 1
    ready = [index for index, count in enumerate(waits_for) if not count]
    sorted_: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        sorted_.append(index)
        for other in after[index]:
            waits_for[other] -= 1
            if not waits_for[other]:
                heapq.heappush(ready, other)
    left = sorted(set(range(len(groups))) - set(sorted_))
    return [groups[index] for index in (*sorted_, *left)]
