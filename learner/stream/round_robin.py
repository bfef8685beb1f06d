"""Deterministic batches, which depend on the stream alone: full batches, in which the partitions take turns."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.block import Block, Outcome, SkipReason
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.stream.batch import Batch, joined, trainable
from anabranch.learner.stream.batches import PATIENCE, BatchBuilder, BlockSource

_DEAD_LETTERED, _SKIPPED = np.uint8(Outcome.DEAD_LETTERED), np.uint8(Outcome.SKIPPED)
_TOMBSTONE = np.uint8(SkipReason.TOMBSTONE)
_AT_ONCE = timedelta(0)
MOST_ROWS = 1_000_000
"""Largest number of events that may wait for their turn."""


class _PartitionQueue:
    """Blocks of one partition that wait for their turn."""

    def __init__(self, *, unlabelled: bool) -> None:
        self._unlabelled = unlabelled
        self.blocks: deque[Block] = deque()
        self.cursor = 0
        self.rows = 0
        """Of all blocks; the first one counts until all of it is given."""
        self.trainable = 0
        self.read_to = 0

    def add(self, block: Block) -> bool:
        """Add a block; return False, without adding it, if the queue is empty and no step depends on the block."""
        (cover,) = block.coverage
        self.read_to = max(self.read_to, cover.end)
        if not self.blocks and not _matters(block):
            return False
        if self.blocks and not len(block) and not cover.removed and not cover.passed:
            # Markers and aborted records: consecutive blocks without rows are kept as one.
            (before,) = self.blocks[-1].coverage
            merged = replace(before, end=cover.end, last=cover.last or before.last)
            self.blocks[-1] = Block(self.blocks[-1].columns, (merged,), contexts=self.blocks[-1].contexts)
            return True
        self.blocks.append(block)
        self.rows += len(block)
        self.trainable += int(trainable(block.columns, unlabelled=self._unlabelled).sum())
        return True

    def give(self, count: int, parts: BatchBuilder) -> None:
        """Move `count` events to train on into the batch, with all other events before the last of them."""
        self.trainable -= count
        end = parts.count + count
        while parts.count < end:
            self.cursor = parts.take(self.blocks[0], self.cursor, end - parts.count, exactly=True)
            if self.cursor == len(self.blocks[0]):
                self._remove_first()

    def give_rest(self, parts: BatchBuilder) -> None:
        """Move all events that are left, of which none is to train on, into the batch."""
        while self.blocks:
            parts.take(self.blocks[0], self.cursor, 1)
            self._remove_first()

    def _remove_first(self) -> None:
        self.rows -= len(self.blocks.popleft())
        self.cursor = 0


class RoundRobin:
    """Splits the stream into batches of exactly `batch_size` new events: one of each partition in turn, by offset.

    Files of the history come first, one after the other.

    It waits for a partition without events, unless the partition is read to the broker's end. So the batches of topics
    that were filled beforehand depend on no clock, and not on the order in which blocks arrive. At the end of all
    partitions, fewer events than a batch wait for more.

    Attributes:
        round: steps of a batch at most. The events of each are the same, whatever it is; a step with events that are
            only stored is the last of its batch, and one with a tombstone, which takes effect after it, is alone.
    """

    def __init__(
        self, source: BlockSource, batch_size: int, settled: Callable[[int], int], *, unlabelled: bool = False
    ) -> None:
        """Take `settled`: it returns the first offset without outcome of a partition, given its index.

        `unlabelled`: whether events without a label are trained on too.
        """
        self._unlabelled = unlabelled
        self._source = source
        self._batch_size = batch_size
        self._settled = settled
        self._queues: list[_PartitionQueue] = []
        self._turn = 0
        self._held: tuple[int, Batch] | None = None
        """A step that has to be the first of its batch, and whose turn it was before it."""
        self.round = 1

    def next(self, stop: threading.Event) -> Batch | None:
        """Return the next batch, or None when it is not full yet and no block arrived for 100 ms.

        A batch without events moves positions over offsets that no step depends on: those without an event, and events
        that are skipped or dead-lettered while no other event of their partition waits.

        Raises:
            SettingsError: too many events wait for a partition that has none.
        """
        while not stop.is_set():
            waiting = sum(queue.trainable for queue in self._queues)
            block = self._source.poll(_AT_ONCE) if waiting < self.round * self._batch_size else None
            if block is None:
                if steps := self._steps():
                    return joined(steps)
                if (block := self._source.poll(PATIENCE)) is None:
                    return None
            settled = self._sort(block)
            self._source.release(block)
            if settled is not None:
                return settled
        return None

    def _steps(self) -> list[Batch]:
        """Return the steps of the next batch, of which none waits for a block; empty where there is none."""
        steps = list[Batch]()
        while len(steps) < self.round and (found := self._next_step()) is not None:
            turn, step = found
            erases = any((span.columns["reason"] == _TOMBSTONE).any() for span in step.spans)
            if erases and steps:
                self._held = turn, step
                break
            steps.append(step)
            if erases or step.stored_only:
                break
        return steps

    def _next_step(self) -> tuple[int, Batch] | None:
        """Return the next step, and whose turn it was before it; None while more has to be read first."""
        if (held := self._held) is not None:
            self._held = None
            return held
        turn = self._turn
        if (counts := self._counts()) is None:
            return None
        parts = BatchBuilder(unlabelled=self._unlabelled)
        self._give(counts, parts)
        return turn, parts.batch()

    def state(self) -> dict[str, Any]:
        """Return the index of the partition whose turn is next, for a checkpoint."""
        return {"turn": self._turn if self._held is None else self._held[0]}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the turn of a checkpoint."""
        self._turn = int(state.get("turn", 0))

    def _counts(self) -> list[int] | None:
        """Return how many events each partition gives to the next batch; None while more have to be read first."""
        partitions = self._source.partitions
        self._open_queues()
        ended = [self._ended(index, partition) for index, partition in enumerate(partitions)]
        counts, turn, passed = [0] * len(partitions), self._turn, 0
        missing = self._batch_size
        for index, partition in enumerate(partitions):
            if missing and partition.name.history:
                counts[index] = min(missing, self._queues[index].trainable)
                missing -= counts[index]
                if missing and not ended[index]:
                    return None
        while missing:
            if passed == len(partitions):
                return None
            index = turn % len(partitions)
            turn, passed = index + 1, passed + 1
            if partitions[index].name.history:
                continue
            if counts[index] < self._queues[index].trainable:
                counts[index] += 1
                missing, passed = missing - 1, 0
            elif not ended[index]:
                return None
        self._turn = turn
        return counts

    def _open_queues(self) -> None:
        missing = len(self._source.partitions) - len(self._queues)
        self._queues += [_PartitionQueue(unlabelled=self._unlabelled) for _ in range(missing)]

    def _give(self, counts: Sequence[int], parts: BatchBuilder) -> None:
        """Move events into the batch; with the first one after a file, all that are left of the file too."""
        for index, (queue, partition) in enumerate(zip(self._queues, self._source.partitions, strict=True)):
            if counts[index]:
                queue.give(counts[index], parts)
            if partition.name.history and any(counts[index + 1 :]):
                queue.give_rest(parts)

    def _ended(self, index: int, partition: Partition) -> bool:
        """Return whether a partition is read to its end, which the broker has to have reported."""
        read_to = max(self._queues[index].read_to, self._settled(index), partition.start)
        return partition.end is not None and read_to >= partition.end

    def _sort(self, block: Block) -> Batch | None:
        """Copy a block's rows to the queues of their partitions; return those that may be settled at once, if any."""
        settled = BatchBuilder()
        self._open_queues()
        for cover in block.coverage:
            own = block.columns["partition"] == cover.partition
            rows = {name: column[own] for name, column in block.columns.items()}
            contexts = [(int(np.count_nonzero(own[:row])), context) for row, context in block.contexts if own[row]]
            part = Block(rows, (cover,), contexts=contexts)
            if not self._queues[cover.partition].add(part):
                settled.take(part, 0, 1)
        waiting = sum(queue.rows for queue in self._queues)
        if waiting > MOST_ROWS + self._batch_size:
            empty = [self._source.partitions[i].name for i, queue in enumerate(self._queues) if not queue.trainable]
            empty = empty or [self._source.partitions[0].name]
            raise SettingsError(
                f"learner.deterministic = true: {waiting} events wait for the turn of {empty[0].topic}"
                f"[{empty[0].partition}], which has none to train on; spread the events evenly, or set it to false"
            )
        return settled.batch() if settled.spans else None


def _matters(block: Block) -> bool:
    """Return whether a step may depend on a block: not if all events, if any, are skipped or dead-lettered."""
    outcome, reason = block.columns["outcome"], block.columns["reason"]
    without = (outcome == _DEAD_LETTERED) | ((outcome == _SKIPPED) & (reason != _TOMBSTONE))
    return not bool(without.all())
