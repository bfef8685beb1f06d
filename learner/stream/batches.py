"""From blocks to batches.

Legend: K rows of a span.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import IDENTITY_COLUMNS, Array, Block, Outcome
from anabranch.ingest.events.position import Position
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.stream.batch import PENDING, Batch, Span, step_ends, trainable
from anabranch.learner.stream.lag import LagPolicy

PATIENCE = timedelta(milliseconds=100)
_AT_ONCE = timedelta(0)
_STORED_ONLY, _HELD_OUT, _WAITING, _LABEL = (
    np.uint8(outcome) for outcome in (Outcome.STORED_ONLY, Outcome.HELD_OUT, Outcome.WAITING, Outcome.LABEL)
)
_STORED_FOR_ONE = 8
_LEAST_STORED = 4096
MOST_LATE = 4096
"""Number of waiting events and labels of a batch, where they are not trained on yet."""
MOST_STEPS = 32
"""Steps of a round at most."""
_KEPT = np.isin(np.arange(256), [PENDING, _STORED_ONLY, _WAITING, _LABEL])
"""By outcome, whether an event is kept after its round: in the store, or by an extension."""
_FEW = 8
"""A first read assumes that fewer than one row in `_FEW` is not to be trained on."""


class BlockSource(Protocol):
    """Where blocks come from: the reader of the stream, or what an extension has put around it."""

    @property
    def partitions(self) -> Sequence[Partition]:
        """All partitions, in the order of the index that blocks carry."""
        ...

    def poll(self, timeout: timedelta) -> Block | None:
        """Return the next block, or None when none comes in time."""
        ...

    def release(self, block: Block) -> None:
        """Give back a block whose columns are no longer used."""
        ...


Rows = tuple[Mapping[str, Array], NDArray[np.intp]]
"""Rows of a block as views, and the indices of the selected ones."""


@dataclass
class BatchBuilder:
    """Builds a batch. Blocks that `take` was called with must not be released before `batch` or `keep`."""

    new: list[Rows] = field(default_factory=list)
    stored_only: list[Rows] = field(default_factory=list)
    held_out: list[Rows] = field(default_factory=list)
    waiting: list[Rows] = field(default_factory=list)
    labels: list[Rows] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    contexts: list[str] = field(default_factory=list)
    count: int = 0
    stored: int = 0
    late: int = 0
    """Waiting events and labels."""
    most_rows: int | None = None
    """Number of rows that are taken of a block at once; None: no bound."""
    unlabelled: bool = False
    """Whether events without a label are trained on too."""
    policy: LagPolicy | None = None
    ended: bool = False
    """Whether all rows of the last block were taken."""

    def keep(self) -> None:
        """Copy the rows taken so far, so that their blocks may be released."""
        for rows in (self.new, self.stored_only, self.held_out, self.waiting, self.labels):
            if rows:
                copied = _copied(rows)
                rows[:] = [(copied, np.arange(len(copied["offset"])))]

    def batch(self) -> Batch:
        """Return copies of the rows that were taken."""
        return Batch(
            _copied(self.new),
            _copied(self.stored_only),
            _copied(self.held_out),
            self.spans,
            _copied(self.waiting),
            _copied(self.labels),
            contexts=self.contexts,
        )

    def take(self, block: Block, begin: int, max_rows: int, *, exactly: bool = False) -> int:
        """Take rows of a block from `begin` on, until there are `max_rows` (at least 1) to train on or the block ends.

        Args:
            block: the block.
            begin: the first row to take.
            max_rows: the largest number of rows to train on.
            exactly: end with the last row to train on, even if no other such row follows in the block.

        Returns:
            The first row that was not taken.
        """
        size = len(block)
        end = size if self.most_rows is None else min(size, begin + self.most_rows)
        rows, trained, indices = self._read(block.rows(begin, min(end, begin + max_rows + max_rows // _FEW + 1)))
        # The rows between the last row to train on and the next one are taken too.
        enough = max_rows + (not exactly)
        if len(indices) < enough and begin + len(trained) < end:
            rows, trained, indices = self._read(block.rows(begin, end))
        n = len(trained) if len(indices) < enough else int(indices[max_rows - 1]) + 1
        trained, indices = trained[:n], indices[:max_rows]
        _pick(rows, indices, self.new)
        if len(indices) < n:
            others = np.flatnonzero(~trained)
            outcome = rows["outcome"].take(others)
            stored_only = others[(outcome == PENDING) | (outcome == _STORED_ONLY)]
            _pick(rows, stored_only, self.stored_only)
            self.stored += len(stored_only)
            _pick(rows, others[outcome == _HELD_OUT], self.held_out)
            if self.most_rows is not None:
                waiting, labels = others[outcome == _WAITING], others[outcome == _LABEL]
                _pick(rows, waiting, self.waiting)
                _pick({name: column for name, column in rows.items() if not _is_feature(name)}, labels, self.labels)
                self.late += len(waiting) + len(labels)
        self.count += len(indices)
        self.ended = begin + n == size
        self.spans.append(_span(block, rows, begin, trained, done=self.ended))
        if block.contexts:
            self.contexts += [context for row, context in block.contexts if begin <= row < begin + n]
        return begin + n

    def _read(self, rows: Mapping[str, Array]) -> tuple[Mapping[str, Array], NDArray[np.bool_], NDArray[np.intp]]:
        """Return the rows by the policy, which of them to train on as bool `[K]`, and the indices of those."""
        if self.policy is not None and self.policy.behind:
            rows = self.policy.settle(rows)
        trained = trainable(rows, unlabelled=self.unlabelled)
        return rows, trained, np.flatnonzero(trained)


class _CopiedBlock(Block):
    """A block that has left its slot, so that it is not released."""


class Batches:
    """Splits the stream of blocks into batches of at most `batch_size` new events, in order.

    Attributes:
        round: steps of a batch at most. It has several only where all of their events have arrived: a batch never waits
            for a second step, and a step that is not full yet is left for the next batch.
    """

    def __init__(
        self,
        source: BlockSource,
        batch_size: int,
        max_delay: timedelta,
        policy: LagPolicy | None = None,
        *,
        most_late: Callable[[int], int] | None = None,
        unlabelled: bool = False,
    ) -> None:
        """Take `most_late`: it returns how many waiting events and labels a batch of some steps has; None: there are
        none.

        `unlabelled`: whether events without a label are trained on too.
        """
        self._unlabelled = unlabelled
        self._source = source
        self._most_late = most_late
        self._policy = policy
        self._batch_size = batch_size
        self._max_delay = max_delay.total_seconds()
        self._blocks: deque[Block] = deque()
        """Those that have arrived, and of which rows are left."""
        self._cursor = 0
        """The next row of the first block."""
        self._ended: list[Block] = []
        self.round = 1

    def next(self, stop: threading.Event) -> Batch | None:
        """Return the next batch, or None when no row arrived for 100 ms.

        It has the events of one step, or of up to `round` steps. A batch that is not full is returned when `max_delay`
        has passed since its first row, or when it has `most_stored` events that are stored only, or the waiting events
        and labels of a step. A batch without new events only moves positions.
        """
        return self._next(stop, polls=True)

    def next_arrived(self) -> Batch | None:
        """Return the next batch, or None unless blocks that were polled before have all events of a step.

        It polls for no block, so that it may be called in the middle of a step.
        """
        if not self._blocks:
            return None
        trained, _ = self._count(self._blocks[0], self._cursor, self._end_of_take(2 * self._batch_size))
        return self._next(threading.Event(), polls=False) if trained >= self._batch_size else None

    def _next(self, stop: threading.Event, *, polls: bool) -> Batch | None:
        parts = BatchBuilder(policy=self._policy, unlabelled=self._unlabelled)
        deadline: float | None = None
        stored, late = most_stored(self._batch_size), 1 if self._most_late is None else self._most_late(1)
        size = self._size(parts, polls=polls)
        while parts.count < size and parts.stored < stored and parts.late < late:
            if not self._blocks:
                # From the first row on, even if it is not trained on: a backlog of such rows moves positions too.
                left = PATIENCE.total_seconds() if deadline is None else deadline - time.monotonic()
                if stop.is_set() or left <= 0:
                    break
                if (block := self._next_block(parts, left)) is None:
                    if deadline is None:
                        break
                    continue
                self._blocks.append(block)
                size = self._size(parts, polls=polls)
            parts.most_rows = self._most_rows()
            self._cursor = parts.take(self._blocks[0], self._cursor, size - parts.count)
            if parts.ended:
                self._ended.append(self._blocks.popleft())
                self._cursor = 0
            if deadline is None:
                deadline = time.monotonic() + self._max_delay
        batch = parts.batch() if parts.spans else None
        self._release()
        self._leave_slots()
        if batch is not None and parts.count > self._batch_size:
            batch.ends = step_ends(parts.count, self._batch_size)
        return batch

    def _size(self, parts: BatchBuilder, *, polls: bool) -> int:
        """Return how many events the batch gets, with those that it has: of all full steps that have arrived, up to
        `round`, but of one step at least.

        With `polls`, it polls for further blocks, without waiting. Only one block has events of several steps where it,
        or the batch before it, has others that are kept: there is room for so many.
        """
        most, count = self.round * self._batch_size, parts.count
        rows, at = 2 * most, 0
        while self.round > 1 and count < most and rows > 0:
            if at == len(self._blocks):
                if not polls or (block := self._source.poll(_AT_ONCE)) is None:
                    break
                self._blocks.append(block)
            block, begin = self._blocks[at], 0 if at else self._cursor
            end = min(len(block), begin + rows) if at else self._end_of_take(rows)
            trained, kept = self._count(block, begin, end)
            if kept > trained and at:
                break
            count += trained
            if kept > trained or end < len(block) or parts.stored or parts.late:
                break
            rows, at = rows - (end - begin), at + 1
        return self._batch_size * max(1, min(self.round, count // self._batch_size))

    def _count(self, block: Block, begin: int, end: int) -> tuple[int, int]:
        """Return how many rows of a block are to be trained on, and how many are kept: these, and others."""
        if self._policy is not None and self._policy.behind:
            rows = self._policy.settle(block.rows(begin, end))
        else:
            rows = {name: block.columns[name][begin:end] for name in ("outcome", "labelled")}
        trained = np.count_nonzero(trainable(rows, unlabelled=self._unlabelled))
        return int(trained), int(np.count_nonzero(_KEPT[rows["outcome"]]))

    def _end_of_take(self, rows: int) -> int:
        """Return where `rows` rows of the first block end, of those that are taken of it at once."""
        return min(len(self._blocks[0]), self._cursor + min(rows, self._most_rows() or rows))

    def _most_rows(self) -> int | None:
        """Return how many rows are taken of the first block at once: those of as many full steps as it has, where
        waiting events are trained on; None: there is no bound."""
        if self._most_late is None:
            return None
        left, most = len(self._blocks[0]) - self._cursor, self._most_late
        return next((rows for steps in range(self.round, 1, -1) if (rows := most(steps)) <= left), most(1))

    def _next_block(self, parts: BatchBuilder, seconds: float) -> Block | None:
        """Return the next block, or None when none arrives within `seconds`, and within 100 ms.

        Before waiting, it releases the blocks that have ended: the reader may be waiting for their slots.
        """
        block = self._source.poll(_AT_ONCE) if self._ended else None
        if block is None:
            if self._ended:
                parts.keep()
                self._release()
            block = self._source.poll(min(PATIENCE, timedelta(seconds=seconds)))
        return block

    def _release(self) -> None:
        """Give back the blocks that have ended; no views of them are in use."""
        for block in self._ended:
            if not isinstance(block, _CopiedBlock):
                self._source.release(block)
        self._ended.clear()

    def _leave_slots(self) -> None:
        """Copy the blocks after the first, as a rule small parts of one step: the reader may need their slots until the
        next batch."""
        for at in range(1, len(self._blocks)):
            block = self._blocks[at]
            if not isinstance(block, _CopiedBlock):
                columns = {name: column.copy() for name, column in block.columns.items()}
                self._blocks[at] = _CopiedBlock(columns, block.coverage, contexts=block.contexts)
                self._source.release(block)

    def state(self) -> dict[str, Any]:
        """Return nothing: positions are enough to resume."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def most_stored(batch_size: int) -> int:
    """Return the number of events to store only at which a batch ends: the store needs free slots for them."""
    return max(_LEAST_STORED, _STORED_FOR_ONE * batch_size)


def _is_feature(name: str) -> bool:
    return name.startswith("feature.")


def _pick(rows: Mapping[str, Array], indices: NDArray[np.intp], part: list[Rows]) -> None:
    """Append the rows with these indices, which are ascending, unless there are none."""
    if len(indices):
        part.append((rows, indices))


def _copied(parts: list[Rows]) -> dict[str, Array]:
    """Copy the selected rows of all parts, each once."""
    if not parts:
        return {}
    if len(parts) == 1:
        rows, indices = parts[0]
        return {name: column.take(indices, axis=0) for name, column in rows.items()}
    ends = np.cumsum([len(indices) for _, indices in parts]).tolist()
    copied: dict[str, Array] = {}
    for name, column in parts[0][0].items():
        copied[name] = np.empty((ends[-1], *column.shape[1:]), column.dtype)
        for (rows, indices), begin, end in zip(parts, [0, *ends], ends, strict=False):
            rows[name].take(indices, axis=0, out=copied[name][begin:end], mode="clip")
    return copied


def _last_rows(partition: Array) -> dict[int, int]:
    """Return the index of the last row of each partition; faster where there is one partition."""
    n = len(partition)
    if not n:
        return {}
    if (partition == partition[0]).all():
        return {int(partition[0]): n - 1}
    numbers, reversed_rows = np.unique(partition[::-1], return_index=True)
    return {number: n - 1 - row for number, row in zip(numbers.tolist(), reversed_rows.tolist(), strict=True)}


def _span(block: Block, rows: Mapping[str, Array], begin: int, trained: NDArray[np.bool_], *, done: bool) -> Span:
    """Return the span of `rows`, which start at row `begin` of the block; `done`: they end it."""
    end = begin + len(trained)
    columns = {name: rows[name][: len(trained)].copy() for name in IDENTITY_COLUMNS}
    positions: dict[int, Position] = {}
    last_rows = _last_rows(columns["partition"])
    for index, last in last_rows.items():
        offset, row = int(columns["offset"][last]), int(columns["row"][last])
        positions[index] = Position(offset, row + 1) if _torn(block, end, index, offset) else Position(offset + 1)
    for cover in block.coverage if done else ():
        at = last_rows.get(cover.partition)
        if at is not None and int(columns["offset"][at]) == cover.end:
            positions[cover.partition] = Position(cover.end, int(columns["row"][at]) + 1)
        elif cover.end > (positions[cover.partition].offset if cover.partition in positions else -1):
            positions[cover.partition] = Position(cover.end)
    # Offsets removed or passed before a partition's rows belong to the first span that moves it.
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
    """Return whether the message at `offset` of a partition continues after row `end` of the block."""
    partition = block.columns["partition"][end:]
    if not len(partition):
        return False
    after = 0 if partition[0] == index else int(np.argmax(partition == index))
    return bool(partition[after] == index and block.columns["offset"][end + after] == offset)
