"""Where the events of a backtest come from, and the reader by which a learner gets them in place of a topic.

Legend: N events of a block.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from typing_extensions import override

from anabranch.commands.event_files.files import EventFile, FileRecord, SourceFormat, open_source
from anabranch.ingest.events.block import Array, Block, Coverage, Outcome
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.event_fields import document_of
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.transport.protocol import PartitionsOpened
from anabranch.ingest.worker.block_builder import BlockBuilder, Incoming

_ROWS = 1024
"""Records that are decoded at once."""


class EventRows(Protocol):
    """Events in the order of time, which may be read several times."""

    @property
    def name(self) -> str:
        """For errors."""
        ...

    def open(self, schema: Schema, envelope: str) -> AbstractContextManager[EventFile]:
        """Open them from the first on; `envelope`: of the stream."""
        ...


@dataclass(frozen=True)
class EventsOfFile:
    """The events of a file: JSON lines, CSV or Parquet; `-` is stdin, which can be read once.

    `kind` is by default by the suffix, and `delimiter` is of CSV.
    """

    path: Path
    kind: SourceFormat | None = None
    delimiter: str | None = None

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def open(self, schema: Schema, envelope: str) -> AbstractContextManager[EventFile]:
        """Open the file; raises SettingsError."""
        return open_source(self.path, self.kind, self.delimiter, schema, checked=True, envelope=envelope)


class EventsInMemory:
    """Events in memory: of each its fields, by their names in messages, as plain values of Python."""

    def __init__(self, events: Sequence[Mapping[str, Any]], name: str = "the table") -> None:
        self.name = name
        self._events = events

    def open(self, schema: Schema, envelope: str) -> AbstractContextManager[EventFile]:  # noqa: ARG002 see `EventRows`
        """Begin with the first."""
        return contextlib.nullcontext(_TableOfEvents(self._events))


class _TableOfEvents:
    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self._events, self._done = events, 0
        self.total: int | None = len(events)
        self.left_out: list[str] = []

    def done(self) -> int:
        return self._done

    def __iter__(self) -> Iterator[FileRecord]:
        for number, event in enumerate(self._events, start=1):
            self._done = number
            yield FileRecord(f"row {number}", dict(event))


class BlocksReader(BlockReader):
    """Blocks of one partition, the first of the first topic, from this process: no broker and no ingest process.

    The record time of an event is that of `[schema.time]`; without it, that of all is 0.
    """

    def __init__(
        self,
        stream: StreamSettings,
        schema: SchemaSettings,
        blocks: Callable[[HoldOut], Iterator[Mapping[str, Array]]],
        ends: threading.Event,
    ) -> None:
        """Take what returns the columns of each block; `ends` is set once there are no more."""
        super().__init__(stream, schema, None, read_only=True)
        self._begin_blocks, self._ends, self._read = blocks, ends, 0
        self._columns: Iterator[Mapping[str, Array]] | None = None
        self._cursors.load({}, {})
        self._cursors.add_opened(PartitionsOpened([partition_of(stream)], [0], [None]))

    @override
    def receive(self) -> None:
        """Do nothing: no process sends anything."""

    @override
    def poll(self, timeout: timedelta) -> Block | None:
        if self._columns is None:
            assert self.hold_out is not None
            self._columns = self._begin_blocks(self.hold_out)
        columns = next(self._columns, None)
        if columns is None:
            self._ends.set()
            return None
        if "time" in columns:
            columns = {**columns, "time_ms": (columns["time"].astype(np.float64) * 1000).astype(np.int64)}
        begin, self._read = self._read, int(columns["offset"][-1]) + 1
        block = Block(columns, (Coverage(0, begin, self._read),))
        self._cursors.advance(block)
        return block

    @override
    def release(self, block: Block) -> None:
        """Do nothing: no slot is in use."""

    @override
    def hold(self, partitions: frozenset[int]) -> None:
        """Do nothing: there is one partition."""

    @override
    def commit(self, offsets: dict[int, int]) -> None:
        """Do nothing: there is no consumer group."""

    @override
    def close(self) -> None:
        """Do nothing: there is no process."""


def partition_of(stream: StreamSettings) -> TopicPartition:
    """Return the partition that the events of a file are of."""
    return TopicPartition(stream.topics[0], 0)


@dataclass
class RowsRead:
    """What was read so far."""

    source: EventFile
    records: int = 0
    unusable: int = 0
    """Events that cannot be used, or have no label."""
    first_fault: str | None = None
    """Why the first event that is none could not be used."""

    @property
    def part(self) -> float | None:
        """The part of all records; None where it is not known."""
        return min(1.0, self.source.done() / self.source.total) if self.source.total else None


def blocks_of(read: RowsRead, stream: StreamSettings, schema: Schema, hold_out: HoldOut) -> Iterator[dict[str, Array]]:
    """Yield the columns of the blocks of a topic with these events, of which each is a message, by its number."""
    # A file has one row a record, whatever messages are.
    message: dict[str, object] = {"format": "json", "format_args": {}, "registry": None, "envelope": "none"}
    builder = BlockBuilder(schema, stream.model_copy(update={**message, "labels": None}), hold_out)
    records, first, partition = iter(read.source), 0, partition_of(stream)
    while some := list(itertools.islice(records, _ROWS)):
        count = len(some)
        values = [b"" if each.fault else _message(schema, each) for each in some]
        faults = {index: each.fault for index, each in enumerate(some) if each.fault}
        offsets, none, headers = range(first, first + count), [None] * count, [()] * count
        messages = Messages(partition, offsets, [0] * count, none, values, headers, first + count, faults=faults)
        assembled = builder.assemble([Incoming(messages, 0)])
        columns, outcome = assembled.columns, assembled.columns["outcome"]
        left_out = (outcome == np.uint8(Outcome.DEAD_LETTERED)) | (outcome == np.uint8(Outcome.SKIPPED))
        read.unusable += int(left_out.sum())
        if assembled.letters and read.first_fault is None:
            reason = dict(assembled.letters[0].added)["anabranch-error"].decode()
            at = int(columns["offset"][outcome == np.uint8(Outcome.DEAD_LETTERED)][0]) - first
            read.first_fault = f"{some[at].location}: {reason}"
        first = read.records = first + count
        yield columns


def _message(schema: Schema, record: FileRecord) -> bytes:
    content = record.content
    return content if isinstance(content, bytes) else msgspec.json.encode(document_of(schema, content))
