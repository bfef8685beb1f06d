"""Batches that are a function of the stream alone: full ones, in which the partitions take turns."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from anabranch.core.errors import SettingsError
from ingest.events.block import Block, Outcome, SkipReason
from ingest.reader.cursors import Partition
from learner.stream.batches import PATIENCE, PENDING, Batch, BatchBuilder, Blocks

_DEAD_LETTERED, _SKIPPED = np.uint8(Outcome.DEAD_LETTERED), np.uint8(Outcome.SKIPPED)
_TOMBSTONE = np.uint8(SkipReason.TOMBSTONE)
MOST_ROWS = 1_000_000
"""How many events may wait for their turn."""


class Partitioned(Blocks, Protocol):
    """Blocks, and what is known of the partitions that they are from."""

    @property
    def partitions(self) -> Sequence[Partition]:
        """All partitions, in the order of the index that blocks carry."""
        ...


class _PartitionQueue:
    """What was read of one partition and has not had its turn."""

    def __init__(self) -> None:
        self.blocks: deque[Block] = deque()
        self.cursor = 0
        self.trainable = 0
        self.read_to = 0

    def add(self, block: Block) -> bool:
        """Take in a block; return False where nothing waits before it, and it may be settled at once."""
        (cover,) = block.coverage
        self.read_to = max(self.read_to, cover.end)
        if not self.blocks and not _matters(block):
            return False
        if self.blocks and not len(block) and not cover.removed and not cover.passed:
            # Markers and aborted records: one block is kept however many of them come.
            (before,) = self.blocks[-1].coverage
            merged = replace(before, end=cover.end, last=cover.last or before.last)
            self.blocks[-1] = Block(self.blocks[-1].columns, (merged,))
            return True
        self.blocks.append(block)
        self.trainable += _trainable(block)
        return True

    def give(self, count: int, parts: BatchBuilder) -> None:
        """Move so many events to train on, and all others that lie before the last of them."""
        self.trainable -= count
        end = parts.count + count
        while parts.count < end:
            self.cursor = parts.take(self.blocks[0], self.cursor, end - parts.count, exactly=True)
            if self.cursor == len(self.blocks[0]):
                self.blocks.popleft()
                self.cursor = 0


class RoundRobin:
    """Checkpoints the stream into batches of exactly `batch_size` new events: one of each partition in turn, by offset.

    A partition that has nothing is waited for, unless it is read to the broker's end. So the batches of topics that
    were filled beforehand depend on nothing else, on no clock and on no order in which blocks come. What is less than
    a batch at the end of all partitions waits for more.
    """

    def __init__(self, source: Partitioned, batch_size: int, settled: Callable[[int], int]) -> None:
        """Take the source, and what tells up to which offset a partition is done with, by its index."""
        self._source = source
        self._batch_size = batch_size
        self._settled = settled
        self._queues: list[_PartitionQueue] = []
        self._turn = 0

    def next(self, stop: threading.Event) -> Batch | None:
        """Return the next batch, or None when it is not full yet and nothing came for a moment.

        One without events moves positions over what no step depends on: offsets without an event, and events that are
        skipped or dead-lettered, where nothing of their partition waits.

        Raises:
            SettingsError: too many events wait for a partition that has none.
        """
        while not stop.is_set():
            shares = self._shares()
            if shares is not None:
                parts = BatchBuilder()
                for queue, share in zip(self._queues, shares, strict=True):
                    if share:
                        queue.give(share, parts)
                return parts.batch()
            block = self._source.poll(PATIENCE)
            if block is None:
                return None
            settled = self._sort(block)
            self._source.release(block)
            if settled is not None:
                return settled
        return None

    def state(self) -> dict[str, Any]:
        """Return whose turn is next, for a checkpoint."""
        return {"turn": self._turn}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what a checkpoint kept."""
        self._turn = int(state.get("turn", 0))

    def _shares(self) -> list[int] | None:
        """Return how many events each partition gives to the next batch; None as long as that is open."""
        partitions = self._source.partitions
        self._queues += [_PartitionQueue() for _ in range(len(partitions) - len(self._queues))]
        ended = [self._ended(index, partition) for index, partition in enumerate(partitions)]
        shares, turn, passed = [0] * len(partitions), self._turn, 0
        missing = self._batch_size
        while missing:
            if passed == len(partitions):
                return None
            index = turn % len(partitions)
            turn, passed = index + 1, passed + 1
            if shares[index] < self._queues[index].trainable:
                shares[index] += 1
                missing, passed = missing - 1, 0
            elif not ended[index]:
                return None
        self._turn = turn
        return shares

    def _ended(self, index: int, partition: Partition) -> bool:
        """Whether a partition is read to its end, as far as the broker has told one."""
        read_to = max(self._queues[index].read_to, self._settled(index), partition.start)
        return partition.end is not None and read_to >= partition.end

    def _sort(self, block: Block) -> Batch | None:
        """Copy a block's rows to the queues of their partitions, of which there may be more since the last look.

        Return what is settled at once, if there is any.
        """
        settled = BatchBuilder()
        self._queues += [_PartitionQueue() for _ in range(len(self._source.partitions) - len(self._queues))]
        for cover in block.coverage:
            mine = block.columns["partition"] == cover.partition
            rows = {name: column[mine] for name, column in block.columns.items()}
            part = Block(rows, (cover,))
            if not self._queues[cover.partition].add(part):
                settled.take(part, 0, 1)
        waiting = sum(len(each) for queue in self._queues for each in queue.blocks)
        if waiting > MOST_ROWS + self._batch_size:
            empty = [self._source.partitions[i].name for i, queue in enumerate(self._queues) if not queue.trainable]
            empty = empty or [self._source.partitions[0].name]
            raise SettingsError(
                f"learner.deterministic = true: {waiting} events wait for the turn of {empty[0].topic}"
                f"[{empty[0].partition}], which has none to train on; spread the events evenly, or set it to false"
            )
        return settled.batch() if settled.spans else None


def _matters(block: Block) -> bool:
    """Whether a step may depend on a block: not if all of its events, if any, are skipped or dead-lettered."""
    outcome, reason = block.columns["outcome"], block.columns["reason"]
    without = (outcome == _DEAD_LETTERED) | ((outcome == _SKIPPED) & (reason != _TOMBSTONE))
    return not bool(without.all())


def _trainable(block: Block) -> int:
    rows = block.columns
    return int(((rows["outcome"] == PENDING) & rows["labelled"].astype(np.bool_)).sum())
