"""A history whose rows are events of the topics: files keep topic, partition and offset of each row.

A row has the identity that the event has in the topic, and its account is that of the topic's partition. Files are read
up to the first offset that they do not have and the topic still has: from there on the topic is read. So each offset is
read once, from a file or from the topic, and the position of the partition says how far, which is all that a checkpoint
keeps.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.files import FileMark, Switch
from anabranch.ingest.backfill.history import marks_of
from anabranch.ingest.backfill.history_rows import HistoryRows
from anabranch.ingest.backfill.kafka_index import KafkaIndex, RowGroup
from anabranch.ingest.backfill.open_files import RowFiles
from anabranch.ingest.backfill.read_ahead import ReadAhead
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import PartitionFingerprint, Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.transport.protocol import HistoryProgress

_MOST_OVERLAPPING = 64
"""Row groups whose offsets are merged at once: their rows are in memory."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Merged:
    """Rows, or at the end of a row group the offsets up to which all files are read, by partition."""

    rows: HistoryRows | None
    reached: Mapping[TopicPartition, int]


class KafkaHistory:
    """Files of events of the topics. Used by one thread; another one reads ahead."""

    def __init__(self, stream: StreamSettings, schema: Schema) -> None:
        settings = stream.backfill
        assert settings is not None
        assert settings.identity is not None
        self._settings = settings
        self._topics = stream.topics
        self._identity = settings.identity
        self._need_label = stream.needs_label
        self.times = settings.time or schema.time
        """The column of record times, if there is one."""
        self._open_files = RowFiles(settings, schema, self.times, int(stream.max_message_bytes))
        self._files: list[FileMark] = []
        self._index: KafkaIndex | None = None
        self._next: dict[TopicPartition, int] = {}
        """The next offset of each partition."""
        self._until: dict[TopicPartition, int] = {}
        """The first offset that is read from the topic."""
        self._groups_done = self._rows_done = 0
        self._rows_of_group = 0
        """Rows that were returned of the row group that is read."""
        self._switched = False
        """Whether the topics were read already: the files are not needed any more."""
        self._ahead = ReadAhead(self._read)

    @property
    def partitions(self) -> list[TopicPartition]:
        """A partition for each file, whose mark recognizes it; its only offset is passed when the topics begin."""
        return [TopicPartition(self._settings.name, file, 0, 1) for file in range(len(self._files))]

    @property
    def ends(self) -> dict[TopicPartition, int]:
        """The offset after the only one of each of `partitions`."""
        return dict.fromkeys(self.partitions, 1)

    @property
    def marks(self) -> list[PartitionFingerprint]:
        """What each partition is recognised by."""
        return [PartitionFingerprint(mark.encoded()) for mark in self._files]

    def list_files(self, switch: Switch | None, *, lost: bool | None = None) -> None:
        """List the files; raises as `FileHistory.list_files`. Rows are left to the topics by their offsets."""
        del switch, lost
        files = self._open_files.listed(need_label=self._need_label)
        self._files = [msgspec.structs.replace(mark, identity=True) for mark in files]

    def restore(
        self, positions: Sequence[tuple[TopicPartition, Position]], marks: Sequence[PartitionFingerprint]
    ) -> None:
        """Continue with the files of the learner; raises as `FileHistory.restore`."""
        self._files = marks_of(self._settings, [name for name, _ in positions], marks)
        passed = {name for name, position in positions if position.offset}
        self._switched = passed.issuperset(self.partitions)

    def plan(
        self,
        positions: Mapping[TopicPartition, int],
        starts: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        *,
        first: bool,
    ) -> dict[TopicPartition, int]:
        """Decide which offsets are read from files, and return where each partition begins.

        Args:
            positions: where each partition of the topics is read next.
            starts: the first offset that it still has.
            ends: the offset after its last record.
            first: whether nothing was read yet: a partition then begins where the files do, if that is earlier.

        Raises:
            SettingsError: files have rows of other topics or partitions, or offsets that a topic does not have yet.
            HistoryError, HistoryAwayError: as `RowFiles.opened` does.
        """
        if self._switched:
            return {}
        if self._index is None:
            self._index = KafkaIndex(self._files, self._open_files, self._identity, self._topics[0])
        index = self._index
        known = {(name.topic, name.partition) for name in positions}
        for name, end in index.ends.items():
            if (name.topic, name.partition) not in known:
                raise SettingsError(
                    f"stream.backfill.files have rows of {name.topic}[{name.partition}], which is none of the "
                    "partitions of stream.topics; add the topic, or leave these rows out"
                )
            if end > ends.get(name, end):
                raise SettingsError(
                    f"stream.backfill.files have {name.topic}[{name.partition}]@{end - 1}, and the topic ends at "
                    f"{ends[name] - 1}: it was created again; leave the files out"
                )
        lowest = index.first_offsets if first else {}
        begins = {name: min(position, lowest.get(name, position)) for name, position in positions.items()}
        self._next |= begins
        self._until |= index.first_missing({name: max(begin, starts[name]) for name, begin in begins.items()})
        self._groups_done = self._rows_done = 0
        return begins

    @property
    def done(self) -> bool:
        """Whether all rows were returned."""
        if self._index is None:
            return self._switched
        while self._groups_done < len(self._index.groups) and not self._left(
            self._index.groups[self._groups_done], self._next
        ):
            self._rows_done += self._index.groups[self._groups_done].rows
            self._groups_done, self._rows_of_group = self._groups_done + 1, 0
        return self._groups_done == len(self._index.groups)

    @property
    def progress(self) -> HistoryProgress:
        """How far the history was read."""
        done = self.done
        groups = [] if self._index is None else self._index.groups
        rows = sum(mark.rows for mark in self._files)
        within = 0 if done or not groups else min(self._rows_of_group, groups[self._groups_done].rows)
        left = {group.file for group in groups[self._groups_done :]}
        return HistoryProgress(
            files=len(self._files),
            files_done=len(self._files) - len(left),
            rows=rows,
            rows_done=rows if done else self._rows_done + within,
            done=done,
            topics=(self._settings.name,),
            file=None if done or not groups else self._files[groups[self._groups_done].file].name,
        )

    def poll(self, timeout: timedelta) -> HistoryRows | None:
        """Return the next rows, or None when none are there in time; raises as `FileHistory.poll`."""
        merged = self._ahead.poll(timeout)
        if merged is not None:
            self._next |= merged.reached if merged.rows is None else merged.rows.ends
            self._rows_of_group += 0 if merged.rows is None else len(merged.rows)
        return None if merged is None else merged.rows

    def close(self) -> None:
        """Stop reading."""
        self._ahead.close()

    def _left(self, group: RowGroup, reached: Mapping[TopicPartition, int]) -> dict[TopicPartition, tuple[int, int]]:
        """Return the offsets of each partition that are read with a row group: from `reached` to its last one."""
        ranges = {
            name: (reached[name], min(high + 1, self._until[name]))
            for name, (low, high) in group.spans.items()
            if name in reached and low < self._until[name]
        }
        return {name: (begin, end) for name, (begin, end) in ranges.items() if begin < end}

    def _read(self) -> Iterator[_Merged]:
        """Yield the rows that are left, from the reading thread."""
        assert self._index is not None
        reached = dict(self._next)
        for group in self._index.groups:
            ranges = self._left(group, reached)
            if ranges:
                yield from self._merged(self._index, group, ranges)
                reached |= {name: end for name, (_, end) in ranges.items()}

    def _merged(
        self, index: KafkaIndex, group: RowGroup, ranges: Mapping[TopicPartition, tuple[int, int]]
    ) -> Iterator[_Merged]:
        """Yield the rows of a row group that are in `ranges`, with those of others there: each offset once, rising."""
        tables, placed = [], []
        overlapping = {
            other.key: other
            for name, (begin, end) in ranges.items()
            for other in index.overlapping(group, name, begin, end)
        }
        if len(overlapping) > _MOST_OVERLAPPING:
            raise SettingsError(
                f"stream.backfill.files: offsets in row group {group.group} of {self._files[group.file].name} overlap "
                f"with those of {len(overlapping)} others; sort the files by offset, or leave out "
                "stream.backfill.identity"
            )
        for each in (group, *overlapping.values()):
            table, rows_of = index.read(each, whole=True)
            tables.append(table)
            placed.append(rows_of)
        firsts = np.cumsum([0, *(table.num_rows for table in tables)])
        rows, offsets, counts = [], [], {}
        for name, (begin, end) in ranges.items():
            at = np.concatenate([of[name][0] + first for of, first in zip(placed, firsts, strict=False) if name in of])
            offset = np.concatenate([of[name][1] for of in placed if name in of])
            inside = (offset >= begin) & (offset < end)
            unique, first = np.unique(offset[inside], return_index=True)
            rows.append(at[inside][first])
            offsets.append(unique)
            counts[name] = len(unique)
        table = pa.concat_tables(tables, promote_options="permissive") if len(tables) > 1 else tables[0]
        every, offset = np.concatenate(rows), np.concatenate(offsets)
        part = np.repeat(np.arange(len(counts)), list(counts.values()))
        for begin in range(0, len(every), self._open_files.chunk_rows):
            chunk = slice(begin, begin + self._open_files.chunk_rows)
            yield _Merged(
                self._rows(group, table.take(pa.array(every[chunk])), list(counts), part[chunk], offset[chunk]), {}
            )
        yield _Merged(None, {name: end for name, (_, end) in ranges.items()})

    def _rows(
        self,
        group: RowGroup,
        table: Any,
        names: Sequence[TopicPartition],
        part: NDArray[np.intp],
        offset: NDArray[np.int64],
    ) -> HistoryRows:
        """Decode rows of `part`, indexes in `names`, with their offsets."""
        decoder = self._open_files.decoder(self._files[group.file])
        present, counts = np.unique(part, return_counts=True)
        last = np.cumsum(counts) - 1
        return HistoryRows(
            decoder.decode_all(table),
            {names[index]: int(count) for index, count in zip(present, counts, strict=True)},
            {names[index]: int(offset[at]) + 1 for index, at in zip(present, last, strict=True)},
            offset,
            decoder.times_ms(table),
            lambda row: decoder.text(table, row),
        )
