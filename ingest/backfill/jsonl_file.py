"""Rows of a file of JSON lines: each line is a row, decoded as a message of `stream.format = "json"` is.

Lines may be in the envelope of the stream, as messages are.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.ingest.backfill.row_tables import CHUNK_ROWS, Decoder, FileRows, RowTables, Seek
from anabranch.ingest.backfill.text_files import BYTE_ORDER_MARK, other_than_lines, start_of, unpacked
from anabranch.ingest.events.schema import UNITS, Schema
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Decoded, Reject, joined, nothing, seconds_of
from anabranch.ingest.formats.envelopes.change_events import NO_ENVELOPE, Delete, RowEnvelope
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.formats.json_text import decoded

LINE = "line"
"""A column of the tables: the bytes of a line."""
FAULT = "fault"
"""Another, of files whose rows became lines: why a row is none; empty where it is one."""
LINES_BYTES = 4_000_000
"""Bytes of lines that are decoded together; decoded values may take many times as much memory."""
_COUNT_BYTES = 1 << 20
_BLANK = re.compile(rb"\n[ \t\r\x0b\x0c]*(?=\n)")
_TYPE = pa.large_binary()


class JsonlRows(RowTables):
    """An open file of JSON lines."""

    def __init__(self, file: BinaryIO, name: str, longest: int) -> None:
        """Read the first bytes; of a line with more than `longest` bytes, only one byte more is read."""
        self._file = unpacked(file, name)
        self._longest = longest
        self._begin = len(BYTE_ORDER_MARK) * start_of(self._file).startswith(BYTE_ORDER_MARK)

    @property
    @override
    def rows(self) -> int:
        """Number of lines that are not blank; counts them."""
        self._file.seek(self._begin)
        count, is_open = 0, False
        while part := self._file.read(_COUNT_BYTES):
            first, last = part.find(b"\n"), part.rfind(b"\n")
            if first < 0:
                is_open |= bool(part.strip())
                continue
            count += is_open or bool(part[:first].strip())
            between = part[first : last + 1]
            count += between.count(b"\n") - 1 - len(_BLANK.findall(between))
            is_open = bool(part[last + 1 :].strip())
        return count + is_open

    @override
    def problem(self) -> str | None:
        self._file.seek(self._begin)
        first = self._line()
        if first is None or len(first[0]) > self._longest:
            return None
        return other_than_lines(first[0], lambda: None if (line := self._line()) is None else line[0])

    @property
    @override
    def schema(self) -> Any:
        return pa.schema([(LINE, _TYPE)])

    @override
    def tables(self, columns: Sequence[str], row: int, hint: Seek | None = None) -> Iterator[FileRows]:
        at, byte = (hint.row, hint.byte) if hint is not None else (0, self._begin)
        self._file.seek(byte)
        while at < row and (line := self._line()) is not None:
            at, byte = at + 1, byte + line[1]
        while True:
            lines: list[bytes] = []
            size = 0
            while len(lines) < CHUNK_ROWS and size < LINES_BYTES and (line := self._line()) is not None:
                lines.append(line[0])
                size += line[1]
            if not lines:
                return
            yield FileRows(pa.table({LINE: pa.array(lines, _TYPE)}), at, Seek(at, byte))
            at, byte = at + len(lines), byte + size

    def _line(self) -> tuple[bytes, int] | None:
        """Return the next line that is not blank, without its end, and its bytes with the blank ones before it.

        None at the end of the file.
        """
        size = 0
        while line := self._file.readline(self._longest + 2):
            size += len(line)
            end, blank = line[-1:] == b"\n", not line.strip()
            while not end and (more := self._file.readline(_COUNT_BYTES)):
                size, end, blank = size + len(more), more[-1:] == b"\n", blank and not more.strip()
            if not blank:
                return line.rstrip(b"\r\n"), size
        return None

    @override
    def close(self) -> None:
        """Do nothing: the file is closed by who opened it."""


class LineDecoder(Decoder):
    """Decodes JSON lines."""

    def __init__(self, schema: Schema, time: str | None, longest: int, envelope: RowEnvelope = NO_ENVELOPE) -> None:
        """Take `time`, the field of record times if there is one; longer lines than `longest` bytes are rejected."""
        super().__init__(schema)
        self._format = JsonFormat(schema)
        self._longest = longest
        self._envelope = envelope
        self._time, self._unit = time and schema.path(time), schema.time_unit if time == schema.time else "s"
        kind: Any = float | str | None
        for part in reversed(self._time or ()):
            kind = msgspec.defstruct("Level", [("inner", kind | None, None)], rename={"inner": part})
        self._times = msgspec.json.Decoder(kind)

    @override
    def columns_in(self, schema: Any) -> list[str]:
        return [name for name in (LINE, FAULT) if name in schema.names]

    @override
    def problem(self, schema: Any) -> str | None:
        return None

    @override
    def decode(self, table: Any) -> Decoded:
        lines = table.column(LINE).to_pylist()
        faults = table.column(FAULT).to_pylist() if FAULT in table.column_names else [""] * len(lines)
        rows: dict[int, bytes] = {}
        rejects, deletes = [], {}
        for index, (line, fault) in enumerate(zip(lines, faults, strict=True)):
            try:
                row = _fair(line, fault, self._longest, self._envelope)
            except ValueError as exc:
                rejects.append(Reject(index, WHOLE_MESSAGE, str(exc)))
                continue
            if isinstance(row, Delete):
                rejects.append(Reject(index, WHOLE_MESSAGE, row.reason))
                deletes[index] = row.key
            else:
                rows[index] = row
        decoded = self._format.decode(list(rows.values()))
        if not rejects:
            return decoded
        others = replace(nothing(self._schema, rejects), deletes=deletes)
        return joined([decoded.at(np.array(list(rows), np.int32)), others])

    @override
    def times_ms(self, table: Any) -> NDArray[np.int64]:
        times = np.zeros(table.num_rows, np.int64)
        if self._time is not None:
            for row, line in enumerate(table.column(LINE).to_pylist()):
                times[row] = self._time_of(line)
        return times

    def _time_of(self, line: bytes) -> int:
        """Return the time of a line in milliseconds since 1970; 0 where it has none that can be read."""
        try:
            row = self._envelope.row(line)
            time: Any = None if isinstance(row, Delete) else decoded(self._times.decode, row)
            while isinstance(time, msgspec.Struct):
                time = getattr(time, "inner")  # noqa: B009 a struct that mypy does not know
            if isinstance(time, str):
                time = seconds_of(time)
            elif time is not None:
                time /= UNITS[self._unit][0]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            return 0
        return round(min(time, 2**52) * 1000) if time is not None and time > -(2**52) else 0

    @override
    def text(self, table: Any, row: int) -> bytes:
        line: bytes = table.column(LINE)[row].as_py()
        with contextlib.suppress(ValueError):
            event = self._envelope.row(line)
            return line if isinstance(event, Delete) else event
        return line


def _fair(line: bytes, fault: str, longest: int, envelope: RowEnvelope) -> bytes | Delete:
    """Return the row in a line; raises ValueError where there is none, with the reason."""
    if fault or len(line) > longest:
        raise ValueError(fault or f"oversized: more than {longest} bytes")
    return envelope.row(line)
