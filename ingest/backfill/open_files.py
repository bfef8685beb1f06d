"""Opens the files of the history in their formats, and turns errors of reading them into ours."""

import errno
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.csv_file import CsvRows
from anabranch.ingest.backfill.files import FileMark, FileStore, listed, store_of
from anabranch.ingest.backfill.jsonl_file import LINE, JsonlRows, LineDecoder
from anabranch.ingest.backfill.parquet_file import ParquetRows
from anabranch.ingest.backfill.row_decoder import RowDecoder
from anabranch.ingest.backfill.row_tables import CHUNK_BYTES, CHUNK_ROWS, Decoder, RowTables
from anabranch.ingest.errors import HistoryAwayError, HistoryError
from anabranch.ingest.events.block import BlockLayout
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.envelopes.change_events import NO_ENVELOPE, RowEnvelope
from anabranch.ingest.settings.backfill import BackfillSettings, FileFormat

_AT_ONCE = 16
"""Files that are opened at once when all are listed."""
_NEVER = 2**63 - 1
_MOST_AHEAD_MS = 86_400_000
"""First times that are further ahead of the clock are in another unit than seconds."""
_AWAY = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENXIO}
"""Errors of reading that say nothing of the file."""
_WAY_OUT = (
    "put back the file as it was, with its time of change, or move the checkpoints away to read the history again"
)


class RowFiles:
    """Files of rows, by their marks. Thread-safe."""

    def __init__(
        self,
        settings: BackfillSettings,
        schema: Schema,
        time: str | None,
        longest: int,
        envelope: RowEnvelope = NO_ENVELOPE,
    ) -> None:
        """Take `time`, the column of record times, and what JSON lines may be in; see `LineDecoder`."""
        self._settings = settings
        self._schema = schema
        self._time = time
        self._label = schema.label.name
        self._longest = longest
        self.chunk_rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES // BlockLayout(schema).row_bytes()))
        """Most rows that are decoded together."""
        self._decoders: dict[FileFormat, Decoder] = {
            "parquet": RowDecoder(schema, time, longest),
            "jsonl": LineDecoder(schema, time, longest, envelope),
            "csv": LineDecoder(schema, time, longest),
        }

    def decoder(self, mark: FileMark) -> Decoder:
        """Return the decoder of a file."""
        return self._decoders[self._settings.format_of(mark.name)]

    def listed(self, *, need_label: bool) -> list[FileMark]:
        """List the files in the order in which they are read, check their schemas, and count their rows.

        `need_label`: whether rows without a label are skipped.

        Raises:
            SettingsError: a pattern matches no file, a file has another schema or times in another unit, or no file has
                labels and they need some.
            HistoryError: a file cannot be decoded.
            HistoryAwayError: the storage does not answer.
        """
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = list(pool.map(self._inspected, listed(self._settings)))
        if self._settings.order == "time":
            found.sort(key=lambda each: each[1])
        marks = [mark for mark, _ in found]
        if need_label and (problem := self.no_labels(marks)):
            raise SettingsError(f"stream.backfill.files: {problem}; name another label, or add the column to the files")
        return marks

    @contextmanager
    def opened(self, mark: FileMark) -> Iterator[RowTables]:
        """Open a file that is unchanged and fits the schema; errors of reading it become ours."""
        store = store_of(mark.name, self._settings)
        _check_unchanged(store, mark)
        try:
            with store.open(mark) as file:
                rows = self._rows(file, mark.name)
                try:
                    self._check_schema(mark, rows)
                    yield rows
                finally:
                    rows.close()
        except (pa.ArrowException, OSError, ValueError, EOFError, zlib.error) as exc:
            if isinstance(exc, OSError) and exc.errno in _AWAY:
                raise HistoryAwayError(
                    f"{mark.name} cannot be read: {exc.strerror}; reading it is tried again"
                ) from exc
            _check_unchanged(store, mark)  # a file that was changed while it was read is not damaged
            raise self.damaged(mark, str(exc).partition("\n")[0]) from exc

    def _rows(self, file: BinaryIO, name: str) -> RowTables:
        kind = self._settings.format_of(name)
        if kind == "parquet":
            return ParquetRows(file, self.chunk_rows)
        if kind == "csv":
            delimiter = self._settings.delimiter_of(name)
            return CsvRows(file, name, delimiter, self._schema, self._time, self._longest)
        return JsonlRows(file, name, self._longest)

    def check_unchanged(self, mark: FileMark) -> None:
        """Raise HistoryError where a file is no longer the one that was listed."""
        _check_unchanged(store_of(mark.name, self._settings), mark)

    @staticmethod
    def damaged(mark: FileMark, why: str) -> HistoryError:
        """Return the error for a file that is unchanged and cannot be decoded."""
        return HistoryError(
            f"{mark.name} is damaged: {why}; write it again and move the checkpoints away, or leave it out of "
            "stream.backfill.files"
        )

    def _inspected(self, mark: FileMark) -> tuple[FileMark, int]:
        """Return a file with its number of rows, and its earliest time where files are read by time."""
        with self.opened(mark) as rows:
            self.check_times(mark, rows)
            earliest = min(self._earliest_times(mark, rows), default=_NEVER) if self._settings.order == "time" else 0
            return msgspec.structs.replace(mark, rows=rows.rows), earliest

    def check_times(self, mark: FileMark, rows: RowTables) -> None:
        """Raise SettingsError where the first times of a file, as numbers, are all ahead of the clock."""
        if self._time is None or (
            self._time in rows.schema.names and types.is_timestamp(rows.schema.field(self._time).type)
        ):
            return
        first = next(self._earliest_times(mark, rows), _NEVER)
        if time.time() * 1000 + _MOST_AHEAD_MS < first < _NEVER:
            raise SettingsError(
                f"stream.backfill.files: {mark.name} has only times more than a day ahead of now in {self._time}, "
                "which is read as seconds since 1970 and seems to have milliseconds; write seconds, or a timestamp"
            )

    def no_labels(self, marks: Sequence[FileMark]) -> str | None:
        """Return that no file has labels, if so; each may lack the column, and its rows have none then."""
        for mark in marks:
            with self.opened(mark) as rows:
                may_have = {LINE, self._label} & {*self.decoder(mark).columns_in(rows.schema)}
                if may_have and not rows.is_null(self._label):
                    return None
        name = f"no file has a value in the column {self._label} of [schema.label], so that nothing can be learned"
        folders = (folder for mark in marks for folder in mark.name.split("/"))
        part = next((folder for folder in folders if folder.startswith(f"{self._label}=")), None)
        return name if part is None else f"{name}; their paths have it ({part}), which is not read"

    def latest_time(self, marks: Sequence[FileMark], enough: int) -> int:
        """Return the latest time in files, in milliseconds since 1970, or one that is at least `enough`; 0 for none.

        Files are read from the last one on, whose times are the latest as a rule.
        """
        latest = 0
        for mark in reversed(marks):
            with self.opened(mark) as rows:
                for times in self._times(mark, rows):
                    latest = max(latest, int(times.max(initial=0)))
                    if latest >= enough:
                        return latest
        return latest

    def _earliest_times(self, mark: FileMark, rows: RowTables) -> Iterator[int]:
        """Yield the earliest time in each table of a file; `_NEVER` where none has one."""
        for times in self._times(mark, rows):
            yield int(times[times > 0].min(initial=_NEVER))

    def _times(self, mark: FileMark, rows: RowTables) -> Iterator[NDArray[np.int64]]:
        """Yield the times in each table of a file."""
        decoder = self.decoder(mark)
        columns = [name for name in decoder.columns_in(rows.schema) if name in (self._time, LINE)]
        for part in rows.tables(columns, 0):
            yield decoder.times_ms(part.table)

    def _check_schema(self, mark: FileMark, rows: RowTables) -> None:
        if (other := rows.problem()) is not None:
            raise SettingsError(
                f"stream.backfill.files: {mark.name} cannot be read as JSON lines: {other}, or leave the file out"
            )
        problem = self.decoder(mark).problem(rows.schema)
        if problem is not None:
            raise SettingsError(
                f"stream.backfill.files: {mark.name} does not fit [schema]: {problem}; correct [schema], or leave the "
                "file out"
            )


def _check_unchanged(store: FileStore, mark: FileMark) -> None:
    now: Any = store.find(mark.name)
    if now is None:
        raise HistoryError(f"{mark.name} is missing, which is a file of the history; {_WAY_OUT}")
    if now.size < mark.size:
        raise HistoryError(
            f"{mark.name} has {now.size} bytes, and had {mark.size} when the history was listed; {_WAY_OUT}"
        )
    if (now.size, now.tag) != (mark.size, mark.tag):
        raise HistoryError(f"{mark.name} was changed after the history was listed; {_WAY_OUT}")
