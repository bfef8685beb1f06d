"""A reader that ends at given offsets."""

from collections import deque
from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest

from anabranch.ingest.events.block import Block, Coverage
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.reader.bounded_reader import BoundedReader
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.reader.reader import BlockReader, SharedBlock
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings

SCHEMA = SchemaSettings.model_validate(
    {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
)
A, B, NEW = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("a", 2)


@pytest.fixture
def read(monkeypatch):
    """Reads blocks, given as `(offsets of a, offsets of b, coverage)`, up to offset 9 of a and 4 of b."""

    def run(*blocks):
        waiting = deque(_block(*block) for block in blocks)
        released: list[Block] = []
        partitions = [Partition(A, 0, 50), Partition(B, 2, 3), Partition(NEW, 0, 7)]
        monkeypatch.setattr(BlockReader, "poll", lambda _self, _timeout: waiting.popleft() if waiting else None)
        monkeypatch.setattr(BlockReader, "release", lambda _self, block: released.append(block))
        monkeypatch.setattr(BlockReader, "partitions", property(lambda _self: partitions))
        stream = StreamSettings.model_validate({"topics": ["a"]}).resolved("test")
        reader = BoundedReader(stream, SCHEMA, HoldOut(fraction=0, seed=0), {A: 9, B: 4})
        found = [reader.poll(timedelta(0)) for _ in blocks]
        assert len(released) == found.count(None), "a block that is left out gives its slot back"
        return reader, [block for block in found if block is not None]

    return run


def _block(a, b, coverage):
    offsets = enumerate((list(a), list(b)))
    parts = [fake_columns(Schema(SCHEMA), each, partition=index) for index, each in offsets if each]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return SharedBlock(columns, coverage, 0, cast("Any", None))


def test_blocks_end_at_the_last_offsets(read):
    whole = ([7, 8], [3], (Coverage(0, 7, 9), Coverage(1, 3, 4)))
    across = ([9, 10, 11], [4, 5], (Coverage(0, 9, 12), Coverage(1, 4, 6)))
    beyond = ([12], [], (Coverage(0, 12, 13),))
    _, blocks = read(whole, across, beyond)
    assert [(block.columns["offset"].tolist(), block.coverage) for block in blocks] == [
        ([7, 8, 3], whole[2]),
        ([9, 4], (Coverage(0, 9, 10), Coverage(1, 4, 5))),
    ]


def test_the_rest_of_a_message_of_several_rows_beyond_the_end_is_not_read(read):
    """The rows of message 10 are in two blocks, of which the first ends at its offset."""
    _, blocks = read(([9, 10, 10], [], (Coverage(0, 9, 10),)), ([10], [], (Coverage(0, 10, 11),)))
    assert [block.columns["offset"].tolist() for block in blocks] == [[9]]


def test_partitions_end_where_they_are_read_to(read):
    reader, _ = read()
    assert [partition.end for partition in reader.partitions] == [10, 3, 0]
    assert reader.partitions is reader.partitions
