"""The table of cursors is where another ingest process would continue."""

import numpy as np

from anabranch.ingest.events.block import Block, Coverage
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Fingerprint, PartitionFingerprint, Position
from anabranch.ingest.reader.cursors import CursorTable, Partition
from anabranch.ingest.transport.protocol import LagReport, PartitionsOpened

P0, P1 = TopicPartition("events", 0), TopicPartition("events", 1)
LAST = Fingerprint(9, 1, "digest")


def opened(*names, unread=()):
    table = CursorTable()
    table.load({}, {})
    table.add_opened(PartitionsOpened(list(names), [0] * len(names), ["id"] * len(names), list(unread)))
    return table


def block(rows, *coverage):
    """Return a block with these (partition, offset, row)."""
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    return Block(dict(zip(("partition", "offset", "row"), columns, strict=True)), coverage)


def test_a_block_moves_the_position_and_the_fingerprint_of_its_partitions():
    table = opened(P0, P1)
    table.advance(block([(0, 8, 0), (0, 9, 0)], Coverage(0, 0, 10, last=LAST)))
    assert table.positions == [(P0, Position(10)), (P1, Position(0))]
    assert table.fingerprints == [PartitionFingerprint("id", LAST), PartitionFingerprint("id")]


def test_a_block_that_ends_within_a_message_leaves_the_position_at_its_next_row():
    table = opened(P0)
    table.advance(block([(0, 4, 0), (0, 4, 1)], Coverage(0, 0, 4)))
    assert table.positions == [(P0, Position(4, 2))]


def test_partitions_are_the_same_list_until_an_end_is_reported():
    table = opened(P0)
    before = table.partitions
    assert table.partitions is before
    table.set_ends(LagReport([(0, 7)], None, 0.0, [(0, 3)]))
    assert table.partitions == [Partition(P0, 0, 7, "id", 3)]


def test_a_recreated_partition_ends_where_it_was_read_to():
    table = opened(P0, P0.next_incarnation, unread=[0])
    assert [partition.end for partition in table.partitions] == [0, None]
    table.advance(block([(0, 4, 0)], Coverage(0, 0, 5)))
    assert [partition.end for partition in table.partitions] == [5, None]


def test_a_partition_that_nobody_reads_ends_where_it_was_read_to_whatever_its_end_was():
    table = opened(P0, P1)
    table.set_ends(LagReport([(0, 7), (1, 7)], None, 0.0))
    table.advance(block([(1, 4, 0)], Coverage(1, 0, 5)))
    table.add_opened(PartitionsOpened([P0, P1], [0, 0], ["id", "id"], [1]))
    assert table.partitions == [Partition(P0, 0, 7, "id"), Partition(P1, 0, 5, read=False)]
    table.add_opened(PartitionsOpened([P0, P1], [0, 0], ["id", "id"]))
    assert table.partitions[1].end == 7
