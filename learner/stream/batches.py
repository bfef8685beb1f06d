"""From blocks to batches: the new events of one step, and what is settled when it is done.

Legend: B new events of a batch, K rows of a span.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import IDENTITY_COLUMNS, Array, Block, Outcome, SkipReason
from ingest.events.position import Fingerprint, Position

PATIENCE = timedelta(milliseconds=100)
_AT_ONCE = timedelta(0)
PENDING, _STORED_ONLY, _HELD_OUT = (
    np.uint8(outcome) for outcome in (Outcome.PENDING, Outcome.STORED_ONLY, Outcome.HELD_OUT)
)
"""To compare with a member of an enumeration takes numpy ten times as long."""
_STORED_FOR_ONE = 8
_LEAST_STORED = 4096
_FEW = 8
"""Rows are looked at first as if fewer than one in so many were not to be trained on."""
Settle = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Gives rows an outcome that are not to be trained on, and returns them all."""


class Blocks(Protocol):
    """Where blocks come from; `ingest.reader.reader.BlockReader` is one."""

    def poll(self, timeout: timedelta) -> Block | None:
        """Return the next block, or None when none comes in time."""
        ...

    def release(self, block: Block) -> None:
        """Give a block back whose columns are not looked at any more."""
        ...


@dataclass(frozen=True)
class Span:
    """Consecutive rows of one block, and how far they move each partition.

    Attributes:
        columns: the identity columns `[K]`, copied. Rows with outcome PENDING are the learner's to decide.
        trained: bool `[K]`, the rows that are in the batch.
        positions: by index of the partition, the first event without outcome after this span.
        removed: offsets that retention took before the span, by index of the partition.
        passed: offsets that were sought over by policy, likewise.
        last: the last record of each partition that the span ends with, where it ends a block.
    """

    columns: Mapping[str, Array]
    trained: NDArray[np.bool_]
    positions: Mapping[int, Position]
    removed: Mapping[int, int]
    passed: Mapping[int, int]
    last: Mapping[int, Fingerprint]


@dataclass
class Batch:
    """What one step is about.

    Attributes:
        new: columns of the B events to train on, each `[B, ...]`.
        stored_only: columns of events without a label that are to be stored.
        held_out: columns of events for the holdout set.
        spans: all rows that are done with once the step is, in order.
    """

    new: dict[str, Array]
    stored_only: dict[str, Array]
    held_out: dict[str, Array]
    spans: list[Span]

    def __len__(self) -> int:
        return len(self.new["offset"]) if self.new else 0

    def skip(self, rows: NDArray[np.bool_], reason: SkipReason) -> None:
        """Take new events, bool `[B]`, out of the batch, and settle them as skipped."""
        begin = 0
        for span in self.spans:
            places = np.flatnonzero(span.trained)
            left = places[rows[begin : begin + len(places)]]
            begin += len(places)
            span.columns["outcome"][left] = np.uint8(Outcome.SKIPPED)
            span.columns["reason"][left] = np.uint8(reason)
            span.trained[left] = False
        self.new = {} if rows.all() else {name: column[~rows] for name, column in self.new.items()}


Rows = tuple[Mapping[str, Array], NDArray[np.intp]]
"""Some rows of a block as views, and the places of those that are meant."""


@dataclass
class BatchBuilder:
    """A batch in the making. Blocks that rows are taken of must not be released before `batch` or `keep`."""

    new: list[Rows] = field(default_factory=list)
    stored_only: list[Rows] = field(default_factory=list)
    held_out: list[Rows] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    count: int = 0
    stored: int = 0
    settle: Settle | None = None
    ended: bool = False
    """Whether all rows of the last block are taken."""

    def keep(self) -> None:
        """Copy what was taken so far."""
        for rows in (self.new, self.stored_only, self.held_out):
            if rows:
                copied = _copied(rows)
                rows[:] = [(copied, np.arange(len(copied["offset"])))]

    def batch(self) -> Batch:
        """Copy what was taken."""
        return Batch(_copied(self.new), _copied(self.stored_only), _copied(self.held_out), self.spans)

    def take(self, block: Block, begin: int, most: int, *, exactly: bool = False) -> int:
        """Take rows of a block from `begin` on, until there are `most` (at least 1) to train on or the block ends.

        Args:
            block: that has the rows.
            begin: the first of them.
            most: how many to train on.
            exactly: leave what comes after the last of these, also where it is the last of the block.

        Returns:
            The first row that was not taken.
        """
        size = len(block)
        rows, trained, places = self._look(block, begin, min(size, begin + most + most // _FEW + 1))
        # What follows the last one and is not to be trained on comes with it.
        enough = most + (not exactly)
        if len(places) < enough and begin + len(trained) < size:
            rows, trained, places = self._look(block, begin, size)
        n = len(trained) if len(places) < enough else int(places[most - 1]) + 1
        trained, places = trained[:n], places[:most]
        _pick(rows, places, self.new)
        if len(places) < n:
            others = np.flatnonzero(~trained)
            outcome = rows["outcome"].take(others)
            stored_only = others[(outcome == PENDING) | (outcome == _STORED_ONLY)]
            _pick(rows, stored_only, self.stored_only)
            self.stored += len(stored_only)
            _pick(rows, others[outcome == _HELD_OUT], self.held_out)
        self.count += len(places)
        self.ended = begin + n == size
        self.spans.append(_span(block, rows, begin, trained, done=self.ended))
        return begin + n

    def _look(
        self, block: Block, begin: int, end: int
    ) -> tuple[Mapping[str, Array], NDArray[np.bool_], NDArray[np.intp]]:
        """Return rows of a block, settled, which of them are to be trained on, and the places of those."""
        rows: Mapping[str, Array] = block.rows(begin, end)
        if self.settle is not None:
            rows = self.settle(rows)
        trained = (rows["outcome"] == PENDING) & rows["labelled"].astype(np.bool_, copy=False)
        return rows, trained, np.flatnonzero(trained)


class Batches:
    """Checkpoints the stream of blocks into batches of at most `batch_size` new events, in order."""

    def __init__(self, source: Blocks, batch_size: int, max_delay: timedelta, settle: Settle | None = None) -> None:
        self._source = source
        self._settle = settle
        self._batch_size = batch_size
        self._max_delay = max_delay.total_seconds()
        self._block: Block | None = None
        self._ended: list[Block] = []
        self._cursor = 0

    def next(self, stop: threading.Event) -> Batch | None:
        """Return the next batch, or None when nothing came for a moment.

        A batch that is not full is returned when `max_delay` has passed since its first row, and when it has about as
        many events to be stored only as it may. One without new events moves positions only.
        """
        parts = BatchBuilder(settle=self._settle)
        deadline: float | None = None
        stored = most_stored(self._batch_size)
        while parts.count < self._batch_size and parts.stored < stored and not stop.is_set():
            if self._block is None:
                left = PATIENCE.total_seconds() if deadline is None else max(0.0, deadline - time.monotonic())
                self._block = self._next_block(parts, left)
                self._cursor = 0
            if self._block is not None:
                self._cursor = parts.take(self._block, self._cursor, self._batch_size - parts.count)
                if parts.ended:
                    self._ended.append(self._block)
                    self._block = None
            elif deadline is None:
                break
            # From the first row on, also where none is to be trained on: a backlog of such rows moves positions too.
            if deadline is None:
                deadline = time.monotonic() + self._max_delay
            elif time.monotonic() >= deadline:
                break
        batch = parts.batch() if parts.spans else None
        self._release()
        return batch

    def _next_block(self, parts: BatchBuilder, seconds: float) -> Block | None:
        """Return the next block, or None when none comes for a moment, or in so many seconds.

        Only what is there already leaves blocks that have ended as they are: others may be waiting for their slots.
        """
        block = self._source.poll(_AT_ONCE) if self._ended else None
        if block is None:
            if self._ended:
                parts.keep()
                self._release()
            block = self._source.poll(min(PATIENCE, timedelta(seconds=seconds)))
        return block

    def _release(self) -> None:
        """Give blocks back that have ended, and of which nobody has views."""
        for block in self._ended:
            self._source.release(block)
        self._ended.clear()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep beside positions: nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what a checkpoint kept."""


def most_stored(batch_size: int) -> int:
    """Return the number of events to be stored only with which a batch ends: the store has to have room for them."""
    return max(_LEAST_STORED, _STORED_FOR_ONE * batch_size)


def _pick(rows: Mapping[str, Array], places: NDArray[np.intp], part: list[Rows]) -> None:
    """Add the rows in some places, which rise, to what was taken."""
    if len(places):
        part.append((rows, places))


def _copied(parts: list[Rows]) -> dict[str, Array]:
    """Copy the rows of all parts, once."""
    if not parts:
        return {}
    if len(parts) == 1:
        rows, places = parts[0]
        return {name: column.take(places, axis=0) for name, column in rows.items()}
    ends = np.cumsum([len(places) for _, places in parts]).tolist()
    copied: dict[str, Array] = {}
    for name, column in parts[0][0].items():
        copied[name] = np.empty((ends[-1], *column.shape[1:]), column.dtype)
        for (rows, places), begin, end in zip(parts, [0, *ends], ends, strict=False):
            rows[name].take(places, axis=0, out=copied[name][begin:end], mode="clip")
    return copied


def _last_places(partition: Array) -> dict[int, int]:
    """Return by index of the partition the place of its last row; looks no further where there is just one."""
    n = len(partition)
    if not n:
        return {}
    if (partition == partition[0]).all():
        return {int(partition[0]): n - 1}
    found, places = np.unique(partition[::-1], return_index=True)
    return {index: n - 1 - place for index, place in zip(found.tolist(), places.tolist(), strict=True)}


def _span(block: Block, rows: Mapping[str, Array], begin: int, trained: NDArray[np.bool_], *, done: bool) -> Span:
    """Return the span of rows of a block that begin there, with the outcomes that they have by now."""
    end = begin + len(trained)
    columns = {name: rows[name][: len(trained)].copy() for name in IDENTITY_COLUMNS}
    positions: dict[int, Position] = {}
    places = _last_places(columns["partition"])
    for index, place in places.items():
        offset, row = int(columns["offset"][place]), int(columns["row"][place])
        positions[index] = Position(offset, row + 1) if _torn(block, end, index, offset) else Position(offset + 1)
    for cover in block.coverage if done else ():
        last = places.get(cover.partition)
        if last is not None and int(columns["offset"][last]) == cover.end:
            positions[cover.partition] = Position(cover.end, int(columns["row"][last]) + 1)
        elif cover.end > (positions[cover.partition].offset if cover.partition in positions else -1):
            positions[cover.partition] = Position(cover.end)
    # What went before a partition's rows is told with the first span that moves it.
    before = block.columns["partition"][:begin]
    first = [
        cover
        for cover in block.coverage
        if (cover.removed or cover.passed) and cover.partition in positions and cover.partition not in before
    ]
    return Span(
        columns,
        trained,
        positions,
        {cover.partition: cover.removed for cover in first if cover.removed},
        {cover.partition: cover.passed for cover in first if cover.passed},
        {cover.partition: cover.last for cover in block.coverage if done and cover.last is not None},
    )


def _torn(block: Block, end: int, index: int, offset: int) -> bool:
    """Return whether rows from `end` on are of the same message as the last one of the partition before."""
    partition = block.columns["partition"][end:]
    if not len(partition):
        return False
    after = 0 if partition[0] == index else int(np.argmax(partition == index))
    return bool(partition[after] == index and block.columns["offset"][end + after] == offset)
