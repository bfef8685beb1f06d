"""The block: many events as columns, the unit that is passed between components.

Every event that was read is a row of exactly one block, also one that cannot be used: its outcome is then set and
its features are zeros. The first n rows therefore determine exactly which events have an outcome.

Legend: N events. Within a partition rows are in the order of (offset, row).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.position import Fingerprint
from anabranch.ingest.events.schema import Schema

Array = NDArray[np.generic]


class Outcome(IntEnum):
    """What became of an event. Exactly one for each; `PENDING` until the learner decides.

    With `[stream.labels]` events without a label are `WAITING`, and end later with one of `TRAINED` (with their label),
    `TIMED_OUT` (trained on as negatives, since no label came), `STORED_ONLY`, `HELD_OUT` and `SKIPPED`. `LABEL` is a
    row of a label topic.
    """

    PENDING = 0
    TRAINED = 1
    STORED_ONLY = 2
    HELD_OUT = 3
    DEAD_LETTERED = 4
    SKIPPED = 5
    WAITING = 6
    LABEL = 7
    TIMED_OUT = 8

    @property
    def label(self) -> str:
        """The name used in metrics and reports."""
        return self.name.lower()


class SkipReason(IntEnum):
    """Why an event was skipped; 0 for events that were not."""

    NONE = 0
    UNLABELLED = 1
    NON_FINITE = 2
    ERASED = 3
    TOMBSTONE = 4
    BEHIND = 5
    MODEL = 6
    TIMED_OUT = 7
    DAMAGED = 8
    LEFT_TO_TOPICS = 9
    REPEATED = 10
    UNTAUGHT = 11
    UNDONE = 12
    LEFT_TO_FILES = 13
    DELETED = 14

    @property
    def label(self) -> str:
        """The name used in reports."""
        return self.name.lower()


IDENTITY_COLUMNS: Mapping[str, np.dtype[np.generic]] = {
    "partition": np.dtype(np.int32),
    "offset": np.dtype(np.int64),
    "row": np.dtype(np.int32),
    "time_ms": np.dtype(np.int64),
    "key_hash": np.dtype(np.uint64),
    "group_hash": np.dtype(np.uint64),
    "outcome": np.dtype(np.uint8),
    "reason": np.dtype(np.uint8),
}
"""Columns `[N]` of every block besides the schema's: where an event came from, when, and its outcome.

`partition` is the index of the topic partition in the source's table (not Kafka's number), `offset` and `row` are the
position in it, `time_ms` is the record's timestamp in milliseconds since 1970. `key_hash` and `group_hash` are 0 where
the event has none. `join_hash`, uint64, is there only where labels find their events by a separate field.
"""


@dataclass(frozen=True)
class Coverage:
    """What a block covers of one partition.

    `start` is the first offset after what earlier blocks covered, `end` the first offset after this block; offsets
    between them without a row are gaps (transaction markers, aborted records, compaction). `removed` counts offsets
    from `start` on that retention removed before they were read, `passed` those that the lag policy skipped. `last` is
    the last record that the block covers, where it covers all that was fetched with it.
    """

    partition: int
    start: int
    end: int
    removed: int = 0
    passed: int = 0
    last: Fingerprint | None = None


@dataclass(frozen=True)
class Block:
    """N events as columns.

    Attributes:
        columns: the schema's payload (`Schema.payload`) and `IDENTITY_COLUMNS`, each `[N, ...]`. They may be views of
            shared memory, valid until the block is released.
        coverage: one entry for each partition that the block moves forward, also where it has no rows of it.
        contexts: sampled trace contexts of events, each with its row; bounded, and none unless they are asked for.
    """

    columns: Mapping[str, Array]
    coverage: tuple[Coverage, ...]
    contexts: Sequence[tuple[int, str]] = field(default=(), kw_only=True)

    def __len__(self) -> int:
        return len(self.columns["offset"])

    def rows(self, begin: int, end: int) -> dict[str, Array]:
        """Return views of rows `[begin, end)` of every column."""
        return {name: column[begin:end] for name, column in self.columns.items()}


class BlockLayout:
    """The offset of each column in a slot of shared memory; writer and reader compute the same."""

    def __init__(self, schema: Schema) -> None:
        self.columns = {**schema.payload(), **{name: (dtype, ()) for name, dtype in IDENTITY_COLUMNS.items()}}
        self.columns |= {f"{start}_hash": (IDENTITY_COLUMNS["key_hash"], ()) for start, _ in schema.hashed}

    def row_bytes(self) -> int:
        """Bytes of one event in all columns."""
        return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in self.columns.values())

    def slot_bytes(self, rows: int) -> int:
        """Bytes of a slot for `rows` events; each column begins on a 64-byte boundary."""
        return sum(_aligned(dtype.itemsize * int(np.prod(shape)) * rows) for dtype, shape in self.columns.values())

    def views(self, buffer: memoryview, rows: int) -> dict[str, Array]:
        """Return the columns of a slot that has room for `rows` rows."""
        views: dict[str, Array] = {}
        begin = 0
        for name, (dtype, shape) in self.columns.items():
            column = np.frombuffer(buffer, dtype, count=rows * int(np.prod(shape)), offset=begin)
            views[name] = column.reshape(rows, *shape)
            begin += _aligned(column.nbytes)
        return views

    def empty(self, rows: int) -> dict[str, Array]:
        """Return columns of zeros for `rows` events."""
        return {name: np.zeros((rows, *shape), dtype) for name, (dtype, shape) in self.columns.items()}


def _aligned(size: int) -> int:
    return (size + 63) & ~63
