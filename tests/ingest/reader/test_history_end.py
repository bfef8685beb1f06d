"""When the history ends for the reader: with the blocks of its last rows."""

import numpy as np

from anabranch.ingest.events.block import Block, Coverage
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import PartitionFingerprint, Position
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.transport.protocol import HistoryProgress, LagReport, PartitionsOpened

FILE, E0, E1 = TopicPartition("history", 0, 0, 1), TopicPartition("events", 0), TopicPartition("events", 1)
NAMES = (FILE, E0, E1)
SCHEMA = SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}})
READ = LagReport([(0, 1)], None, 0.0, history=HistoryProgress(1, 1, 2000, 2000, True))
BACKFILL = {"files": ["/x/*.parquet"], "identity": {"partition": "p", "offset": "o"}}


def stream(**more):
    return StreamSettings.model_validate({"topics": ["events"], "format": "rows", **more}).resolved("test")


def opened(reader, file):
    """Continue at an offset of the file, as after a checkpoint."""
    reader._cursors.load({FILE: Position(file), E0: Position(500), E1: Position(500)}, {})
    reader._cursors.add_opened(PartitionsOpened(list(NAMES), [0, 0, 0], [None, None, None]))


def test_the_history_lasts_until_its_last_block_is_handled_though_a_report_says_earlier_that_it_is_read():
    reader = BlockReader(stream(backfill=BACKFILL), SCHEMA, HoldOut(fraction=0, seed=0))
    opened(reader, 0)
    reader._update_lag(READ)
    assert reader.reads_history
    reader._cursors.advance(
        Block({name: np.empty(0, np.int64) for name in ("partition", "offset", "row")}, (Coverage(0, 0, 1),))
    )
    assert not reader.reads_history
    opened(reader, 1)
    assert not reader.reads_history


def test_without_the_section_files_end_where_they_were_read_to():
    """So that they hold up neither deterministic batches nor the time of the stream."""
    reader = BlockReader(stream(), SCHEMA, HoldOut(fraction=0, seed=0))
    sent: list[object] = []
    reader._process.start = lambda: None  # type: ignore[method-assign]
    reader._process.send = sent.append  # type: ignore[method-assign]
    reader._cursors.load({FILE: Position(1000), E0: Position(500)}, {FILE: PartitionFingerprint("x")})
    reader._begin()
    reader._cursors.add_opened(PartitionsOpened([FILE, E0], [1000, 0], ["x", None], [0]))
    reader._update_lag(LagReport([(1, 5000)], None, 0.0))
    assert [(each.name, each.end) for each in reader.partitions] == [(FILE, 1000), (E0, 5000)]
    assert not reader.reads_history
