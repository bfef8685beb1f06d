"""The events that were undone: blocks of the stream are read without them, as if they had never been there."""

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ingest.events.block import Block, Outcome, SkipReason
from ingest.events.identity import partition_base, partition_name
from ingest.reader.cursors import Partition
from learner.state_dir.undo_file import UndoRecord, UndoReport
from learner.stream.partition_ledger import PartitionLedger
from learner.stream.round_robin import Partitioned
from replay.erasure.erased_events import ByRange, ErasedEvents

_LEFT_ALONE = tuple(np.uint8(outcome) for outcome in (Outcome.DEAD_LETTERED, Outcome.SKIPPED))
"""Outcomes that stay: among them are tombstones, whose erasures are not undone."""


class UndoneEvents:
    """The events of all records of an `undo.json`. Used by one thread."""

    def __init__(self, records: Sequence[UndoRecord] = ()) -> None:
        self.records = records
        self.number = records[-1].number if records else 0
        """The last record."""
        self._events = ErasedEvents(
            [
                ByRange(time=record.time, by="undo", partition=name, first=first, last=last)
                for record in records
                for name, ranges in record.ranges.items()
                for first, last in zip(ranges.firsts, ranges.lasts, strict=True)
            ]
        )
        self._partitions: Sequence[Partition] = ()
        self._bases: NDArray[np.uint64] = np.empty(0, np.uint64)

    def skip_in(self, block: Block, partitions: Sequence[Partition]) -> None:
        """Set the outcome of the block's undone events to SKIPPED; `partitions` are those that its rows index."""
        if partitions is not self._partitions:
            self._partitions = partitions
            self._bases = np.array([partition_base(each.name) for each in partitions], np.uint64)
        outcome, reason = block.columns["outcome"], block.columns["reason"]
        undone = self._events.covers(self._bases, block.columns) & ~np.isin(outcome, _LEFT_ALONE)
        outcome[undone] = np.uint8(Outcome.SKIPPED)
        reason[undone] = np.uint8(SkipReason.UNDONE)

    def report(self, accounts: Sequence[PartitionLedger]) -> UndoReport | None:
        """Return how far the stream is learned again since the last record; None without one.

        Partitions that are not read any more have nothing left that could be.
        """
        if not self.records or (went_back := self.records[-1].went_back) is None:
            return None
        record = self.records[-1]
        now = {partition_name(each.name): each.position.offset for each in accounts if each.read}
        left = total = 0
        for name in now.keys() & record.until.keys():
            until, begin = record.until[name], went_back.positions.get(name, record.until[name])
            total += max(0, until - begin)
            left += max(0, until - max(begin, now[name]))
        return UndoReport(
            number=record.number,
            checkpoint=went_back.checkpoint,
            offsets=sum(ranges.count for ranges in record.ranges.values()),
            left=left,
            fraction=1 - left / total if total else 1.0,
        )


class WithoutUndone(Partitioned):
    """The blocks of a source, in which undone events are skipped."""

    def __init__(self, source: Partitioned, undone: UndoneEvents) -> None:
        self._source, self._undone = source, undone

    @property
    @override
    def partitions(self) -> Sequence[Partition]:
        return self._source.partitions

    @override
    def poll(self, timeout: timedelta) -> Block | None:
        block = self._source.poll(timeout)
        if block is not None:
            self._undone.skip_in(block, self._source.partitions)
        return block

    @override
    def release(self, block: Block) -> None:
        self._source.release(block)
