"""A reader that ends at given offsets, and writes nothing to Kafka: what was learned once is read again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np
from typing_extensions import override

from anabranch.ingest.events.block import Block
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.reader.reader import BlockReader, SharedBlock
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings


class BoundedReader(BlockReader):
    """Blocks up to the last offset of each partition of topics, as if the topics ended there; files are read whole."""

    def __init__(
        self,
        stream: StreamSettings,
        schema: SchemaSettings,
        hold_out: HoldOut | None,
        through: Mapping[TopicPartition, int],
    ) -> None:
        """`through`: the last offset of each partition that is read; others are not read."""
        super().__init__(stream, schema, hold_out, read_only=True)
        self._through = through
        self._read: Sequence[Partition] = ()
        self._bounded: Sequence[Partition] = ()

    @property
    @override
    def partitions(self) -> Sequence[Partition]:
        partitions = super().partitions
        if partitions is not self._read:
            self._read, self._bounded = partitions, [self._shortened(each) for each in partitions]
        return self._bounded

    @property
    def exhausted(self) -> bool:
        """Whether all blocks up to the last offsets were returned, and no others are to come, as far as is known."""
        if self.waits or self.reads_history:
            return False
        read = dict(self._cursors.positions)
        return all(
            each.name.history or (each.end is not None and read[each.name].offset >= each.end)
            for each in self.partitions
        )

    def ends_at(self, positions: Mapping[TopicPartition, Position]) -> bool:
        """Return whether no event that is read comes after these positions; the reader is exhausted."""
        return all(
            each.name.history
            or (each.end is not None and each.name in positions and positions[each.name].offset >= each.end)
            for each in self.partitions
        )

    @override
    def poll(self, timeout: timedelta) -> Block | None:
        block = super().poll(timeout)
        if block is None or (within := self._within(block)).coverage:
            return None if block is None else within
        self.release(block)
        return None

    @override
    def commit(self, offsets: dict[int, int]) -> None:
        """Do nothing: the consumer group's positions are those of the pipeline."""

    def _end(self, partition: Partition) -> int | None:
        """Return the first offset after those that are read; None where all are."""
        if partition.name.history:
            return None
        return max(self._through.get(partition.name, -1) + 1, partition.start)

    def _shortened(self, partition: Partition) -> Partition:
        end = self._end(partition)
        if end is None or partition.end is None or partition.end <= end:
            return partition
        return replace(partition, end=end)

    def _within(self, block: Block) -> Block:
        """Return the part of a block that is read; it has to be released as the block."""
        assert isinstance(block, SharedBlock)
        index, offset, stays = block.columns["partition"], block.columns["offset"], np.ones(len(block), np.bool_)
        coverage = []
        for cover in block.coverage:
            end = self._end(self.partitions[cover.partition])
            if end is None:
                coverage.append(cover)
                continue
            stays &= np.not_equal(index, cover.partition) | np.less(offset, end)
            if cover.end <= end:
                coverage.append(cover)
            elif cover.start < end:
                coverage.append(replace(cover, end=end, last=None))
        columns = block.columns if stays.all() else {name: column[stays] for name, column in block.columns.items()}
        return SharedBlock(columns, tuple(coverage), block.slot, block.ring)
