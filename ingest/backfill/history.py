"""The history: files that are read in order, each a partition whose offsets are its rows.

The list of files is made once. Then the positions and marks of their partitions say what is left to read, also to a
process that starts after this one was killed.
"""

import hashlib
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
from anabranch.ingest.backfill.files import DISORDER, FileMark, Switch
from anabranch.ingest.backfill.history_rows import HistoryRows
from anabranch.ingest.backfill.open_files import RowFiles
from anabranch.ingest.backfill.read_ahead import ReadAhead
from anabranch.ingest.backfill.row_tables import FileRows, RowTables, Seek
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Fingerprint, PartitionFingerprint, Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.envelopes.change_events import NO_ENVELOPE, RowEnvelope
from anabranch.ingest.settings.backfill import BackfillSettings
from anabranch.ingest.transport.protocol import HistoryProgress

log = logging.getLogger(__name__)


def shuffled(tables: Iterator[FileRows], window: int, seed: int, file: str) -> Iterator[FileRows]:
    """Yield tables of `window` rows, the last of fewer, each with its rows in an order of the seed.

    `tables` are consecutive, and begin at a multiple of `window` rows.
    """
    parts: list[Any] = []
    first: FileRows | None = None
    for table, row, hint in tables:
        begin = 0
        while begin < table.num_rows:
            first = first or FileRows(None, row + begin, hint)
            taken = min(table.num_rows - begin, window - sum(part.num_rows for part in parts))
            parts.append(table.slice(begin, taken))
            begin += taken
            if sum(part.num_rows for part in parts) == window:
                yield first._replace(table=_permuted(parts, first.row, seed, file))
                parts, first = [], None
    if first is not None:
        yield first._replace(table=_permuted(parts, first.row, seed, file))


def _permuted(parts: list[Any], first: int, seed: int, file: str) -> Any:
    table = pa.concat_tables(parts)
    return table.take(pa.array(order_of(table.num_rows, seed, file, first)))


def order_of(rows: int, seed: int, file: str, first: int) -> NDArray[np.int64]:
    """Return the order of a window's rows, int64 `[rows]`; `first` is the window's first row in the file."""
    digest = hashlib.blake2b(f"{seed} {file} {first}".encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).permutation(rows)


@dataclass(frozen=True)
class _Chunk:
    """Rows of one partition."""

    partition: int
    rows: FileRows


class FileHistory:
    """The files of `[stream.backfill]`, pass after pass. Used by one thread; another one reads a chunk ahead."""

    def __init__(
        self,
        settings: BackfillSettings,
        schema: Schema,
        seed: int,
        longest: int,
        *,
        need_label: bool = False,
        envelope: RowEnvelope = NO_ENVELOPE,
    ) -> None:
        """`seed` orders the rows of shuffled windows; lines of more than `longest` bytes are rejected.

        `need_label`: rows without a label are skipped. `envelope`: what JSON lines may be in.
        """
        self._need_label = need_label
        self._settings = settings
        self._seed = seed
        self._own_time = schema.time
        self.times = settings.time or schema.time
        """The column of record times, if there is one."""
        if settings.order == "time" and self.times is None:
            raise SettingsError(
                'stream.backfill.order = "time" needs stream.backfill.time or [schema.time]: name the column with it'
            )
        self._open_files = RowFiles(settings, schema, self.times, longest, envelope)
        self._files: list[FileMark] = []
        self.partitions: list[TopicPartition] = []
        """A partition for each file and pass, in the order in which they are read."""
        self.ends: dict[TopicPartition, int] = {}
        """The number of rows of each partition."""
        self._rows: list[int] = []
        """The next row of each partition."""
        self._hints: list[Seek | None] = []
        self._at = 0
        self._ahead = ReadAhead(self._read)

    def list_files(self, switch: Switch | None, *, lost: bool | None = None) -> Switch | None:
        """List the files and check their schemas; return where the topics begin, which have the rows from there on.

        With `lost`, `switch` is where the topics have their first records now, and moves to where both they and the
        files have all events: True if they have lost records from before.

        Raises:
            SettingsError: a pattern matches no file, a file has another schema, or no file has labels.
            HistoryError: a file cannot be decoded.
            HistoryAwayError: the storage does not answer.
        """
        files = self._open_files.listed(need_label=self._need_label)
        if switch is not None:
            until_ms = switch.until_ms if lost is None else self._moved(files, switch.until_ms, lost=lost)
            switch = msgspec.structs.replace(switch, until_ms=until_ms, own=self.times == self._own_time)
        fixed = {
            "until_ms": None if switch is None else switch.until_ms,
            "shuffle": self._settings.shuffle,
            "seed": self._seed,
        }
        self._files = [msgspec.structs.replace(mark, **fixed) for mark in files]
        self._files[0] = msgspec.structs.replace(self._files[0], switch=switch)
        self._begin([Position(0)] * len(self._files) * self._settings.epochs, [])
        size, rows = sum(mark.size for mark in self._files), sum(mark.rows for mark in self._files)
        log.info("the history has %d files with %d rows and %d bytes", len(self._files), rows, size)
        return switch

    def _moved(self, files: Sequence[FileMark], first_ms: int, *, lost: bool) -> int:
        """Return the time at which the topics begin, given that of their first records.

        Times are a little out of order in a topic. Of the events around its first record, and of those at the end of
        the files, only one of both has all: the switch is between them, and `DISORDER` away where files reach so far.
        """
        disorder_ms = int(DISORDER.total_seconds() * 1000)
        latest = self._open_files.latest_time(files, first_ms + 2 * disorder_ms)
        if latest < first_ms:
            return first_ms if latest <= 0 else latest + 1
        return first_ms + min(disorder_ms, (latest - first_ms) // 2) * lost

    def restore(
        self, positions: Sequence[tuple[TopicPartition, Position]], marks: Sequence[PartitionFingerprint]
    ) -> None:
        """Continue from the positions of the learner.

        Raises:
            SettingsError: the learner has read the topics already, without a history.
        """
        names = [name for name, _ in positions]
        own = [at for at, name in enumerate(names) if name.history and name.identity_topic == self._settings.name]
        self._files = marks_of(self._settings, names, marks)
        self._begin([positions[at][1] for at in own], [marks[at] for at in own])

    def plan(
        self,
        positions: Mapping[TopicPartition, int],
        starts: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        *,
        first: bool,
    ) -> dict[TopicPartition, int]:
        """Return no partition of the topics: all begin where they do without a history."""
        del positions, starts, ends, first
        return {}

    def _begin(self, positions: Sequence[Position], marks: Sequence[PartitionFingerprint]) -> None:
        count = len(self._files)
        self.partitions = [
            TopicPartition(self._settings.topic_of(at // count), at % count, 0, at // count + 1)
            for at in range(len(positions))
        ]
        self._rows = [position.offset for position in positions]
        self._hints = [_hint(mark.last) for mark in marks] or [None] * len(positions)
        self.ends = {name: self._files[name.partition].rows for name in self.partitions}

    @property
    def marks(self) -> list[PartitionFingerprint]:
        """What each partition is recognised by."""
        return [PartitionFingerprint(self._files[name.partition].encoded()) for name in self.partitions]

    @property
    def done(self) -> bool:
        """Whether all rows were returned."""
        while self._at < len(self.partitions) and self._rows[self._at] >= self.ends[self.partitions[self._at]]:
            self._at += 1
        return self._at == len(self.partitions)

    @property
    def progress(self) -> HistoryProgress:
        """How far the history was read."""
        done = self.done
        return HistoryProgress(
            files=len(self.partitions),
            files_done=self._at,
            rows=sum(self.ends.values()),
            rows_done=sum(self._rows),
            done=done,
            topics=tuple(map(self._settings.topic_of, range(self._settings.epochs))),
            file=None if done else self._files[self.partitions[self._at].partition].name,
        )

    def poll(self, timeout: timedelta) -> HistoryRows | None:
        """Return the next rows, or None when none are there in time.

        Raises:
            HistoryError: a file is missing, changed or damaged.
            HistoryAwayError: the storage does not answer; the next call tries again.
        """
        chunk = self._ahead.poll(timeout)
        if chunk is None:
            return None
        name = self.partitions[chunk.partition]
        # Decoded here: the reading thread has as much to do as a bare scan.
        decoded = self._decoded(name, self._files[name.partition], chunk.rows)
        self._rows[chunk.partition], self._hints[chunk.partition] = decoded.ends[name], chunk.rows.hint
        return decoded

    def close(self) -> None:
        """Stop reading."""
        self._ahead.close()

    def _decoded(self, name: TopicPartition, mark: FileMark, part: FileRows) -> HistoryRows:
        table, row, hint = part
        decoder, end = self._open_files.decoder(mark), row + table.num_rows
        times_ms = decoder.times_ms(table)
        left = None if mark.until_ms is None else np.greater_equal(times_ms, mark.until_ms)
        if left is not None and left.any():
            read = np.flatnonzero(~left)
            decoded = decoder.decode_all(table.take(pa.array(read))).at(read.astype(np.int32))
        else:
            left, decoded = None, decoder.decode_all(table)
        return HistoryRows(
            decoded,
            {name: table.num_rows},
            {name: end},
            np.arange(row, end, dtype=np.int64),
            times_ms,
            lambda row: decoder.text(table, row),
            left,
            {} if hint is None else {name: Fingerprint(hint.row, 0, f"@{hint.byte}")},
        )

    def _read(self) -> Iterator[_Chunk]:
        """Yield the rows that are left, from the reading thread."""
        for at, name in enumerate(self.partitions):
            row, mark = self._rows[at], self._files[name.partition]
            if row >= self.ends[name]:
                continue
            with self._open_files.opened(mark) as rows:
                for part in self._windows(mark, rows, row, self._hints[at]):
                    self._open_files.check_unchanged(mark)
                    row = part.row + part.table.num_rows
                    yield _Chunk(at, part)
                if row < mark.rows:
                    raise self._open_files.damaged(mark, f"it has {row} rows, not {mark.rows}")

    def _windows(self, mark: FileMark, rows: RowTables, row: int, hint: Seek | None) -> Iterator[FileRows]:
        """Yield tables of at most a chunk, from an offset on, in the order of the offsets."""
        window = mark.shuffle
        first = row // window * window if window else row
        columns = self._open_files.decoder(mark).columns_in(rows.schema)
        tables = rows.tables(columns, first, hint if hint is not None and hint.row <= first else None)
        for table, start, seek in shuffled(tables, window, mark.seed, mark.tag) if window else tables:
            for begin in range(max(0, row - start), table.num_rows, self._open_files.chunk_rows):
                yield FileRows(table.slice(begin, self._open_files.chunk_rows), start + begin, seek)


def _hint(last: Fingerprint | None) -> Seek | None:
    return None if last is None else Seek(last.offset, int(last.digest.removeprefix("@")))


def marks_of(
    settings: BackfillSettings, names: Sequence[TopicPartition], marks: Sequence[PartitionFingerprint]
) -> list[FileMark]:
    """Return the files of a history that was begun, as they were listed.

    Raises:
        SettingsError: the topics were read without it, or `identity` was set or removed since.
    """
    files = [
        FileMark.decoded(mark.topic_id or "")
        for name, mark in zip(names, marks, strict=True)
        if name.history == 1 and name.identity_topic == settings.name
    ]
    if not files:
        raise SettingsError(
            "[stream.backfill] was added after the topics were read, and history comes first; remove it, or begin "
            "again by moving the checkpoints away"
        )
    if files[0].identity != (settings.identity is not None):
        raise SettingsError(
            f"stream.backfill.identity was {'set' if files[0].identity else 'absent'} when the history began; put it "
            "back so, or begin again by moving the checkpoints away"
        )
    return files
