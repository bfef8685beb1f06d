"""Erased events that wait for labels leave memory, their file and all checkpoints."""

import numpy as np
import pytest
from numpy.typing import NDArray

from anabranch.ingest.events.identity import partition_base, partition_name
from anabranch.ingest.events.partition import TopicPartition
from anabranch.learner.checkpoints.erase_checkpoints import Eraser, without_erased
from anabranch.replay.erasure.erased_events import ByKey, ByRange, ErasedEvents
from tests.learner.extensions.late_labels.joins import (
    NONE,
    JoinBench,
    drain,
    events,
    labels,
    oldest_open,
    options,
    predictions,
    schema_with,
)

EVENTS = TopicPartition("events", 0)
LEDGER = [
    {"topic": "events", "partition": 0, "incarnation": 0, "history": 0},
    {"topic": "labels", "partition": 0, "incarnation": 0, "history": 0},
]
SECRET = np.float32(123456.75)
"""A feature of the event 3."""


def erased_three():
    return ErasedEvents([ByRange(time=0.0, by="command", partition=partition_name(EVENTS), first=3, last=3)])


def covers_three(columns):
    covered: NDArray[np.bool_] = (columns["offset"] == 3) & (columns["partition"] == 0)
    return covered


@pytest.fixture
def bench(tmp_path):
    bench = JoinBench(tmp_path, keep=3)
    bench.ledger = LEDGER
    columns = events([1, 2, 3, 4], [10, 20, 30, 40], [1000] * 4)
    columns["feature.x"][2] = SECRET
    bench.join.add_events(columns, predictions([1, 2, 3, 4]))
    return bench


def files_with_secret(path, secret=SECRET.tobytes()):  # noqa: B008 bytes are never changed
    return [file.name for file in path.rglob("*") if file.is_file() and secret in file.read_bytes()]


def test_a_waiting_event_is_removed_and_its_bytes_are_overwritten(bench, tmp_path):
    assert files_with_secret(tmp_path)
    assert bench.join.erase(covers_three) == 1
    assert files_with_secret(tmp_path) == []
    bench.join.add_labels(labels([10, 20, 30, 40], [1] * 4, [1000] * 4))
    assert [row[0] for row in drain(bench.join)] == [1, 2, 4]


def test_a_decided_event_is_not_returned(bench):
    bench.join.add_labels(labels([30, 40], [1, 2], [1000] * 2))
    assert bench.join.erase(covers_three) == 1
    assert [row[0] for row in drain(bench.join)] == [4]


def test_an_erased_label_matches_no_event(bench):
    bench.join.add_labels(labels([50], [1], [1000], offset=9))
    assert bench.join.erase(lambda columns: columns["partition"] == 1) == 0
    assert bench.join.add_events(events([5], [50], [1000]), predictions([5])).tolist() == [True]


@pytest.mark.parametrize(("label_key", "kept"), [("order", 1), ("user", 0)])
def test_an_erasure_by_key_is_of_labels_that_have_this_key(tmp_path, label_key, kept):
    names = [TopicPartition("events", 0), TopicPartition("labels", 0)]
    up_to = {partition_name(name): 100 for name in names}
    erased = ErasedEvents([ByKey(time=0.0, by="command", key_hash=f"{42:016x}", up_to=up_to, beyond={})])
    bases = np.array([partition_base(name) for name in names], np.uint64)
    bench = JoinBench(tmp_path, schema=schema_with(label_key))
    bench.ledger = LEDGER
    bench.join.add_labels(labels([42], [1], [1000]))
    bench.checkpoint()
    found = bench.checkpoints.newest()
    assert found is not None
    bench.join.erase(lambda columns: erased.covers(bases, columns))
    assert len(bench.join.labels) == kept
    bench.join.payload.tier.close()
    bench.part = bench.open((1, without_erased(found[1], erased)[0]))
    assert len(bench.join.labels) == kept


def test_the_payload_of_events_that_are_gone_is_overwritten_in_pieces(bench, tmp_path):
    bench.join.add_labels(labels([30], [1], [1000]))
    drain(bench.join, check=False)
    assert files_with_secret(tmp_path)
    bench.part.begin_overwrite()
    for _ in bench.join.payload.overwrite(NONE, 64):
        pass
    assert files_with_secret(tmp_path) == []
    bench.join.advance(2000)
    assert [row[0] for row in drain(bench.join)] == [1, 2, 4]


def test_an_extent_that_is_written_during_an_erasure_is_overwritten_first(tmp_path):
    bench = JoinBench(tmp_path, options(bytes=2**14))
    columns = events([3, 4], [30, 40], [1000, 1000])
    columns["feature.x"][0] = SECRET
    bench.join.add_events(columns, predictions([3, 4]))
    bench.join.add_labels(labels([30, 40], [1, 1], [1000] * 2))
    drain(bench.join, check=False)
    bench.part.begin_overwrite()
    for offset in range(10, 50):
        bench.join.add_events(events([offset], [offset + 100], [1000]), predictions([offset]))
    assert files_with_secret(tmp_path) == []
    for _ in bench.join.payload.overwrite(NONE, 8):
        pass
    bench.join.advance(2000)
    assert [row[0] for row in drain(bench.join)] == list(range(10, 50))


def test_slots_that_checkpoints_name_are_not_overwritten(bench):
    bench.checkpoint()
    bench.join.add_labels(labels([30], [1], [1000]))
    drain(bench.join, check=False)
    bench.part.begin_overwrite()
    for _ in bench.join.payload.overwrite(np.arange(4), 64):
        pass
    bench.restart()
    bench.join.add_labels(labels([40], [1], [1000]))
    assert [row[0] for row in drain(bench.join)] == [4]
    assert bench.join.counts.damaged == 0


def test_checkpoints_on_the_disk_are_rewritten(bench, tmp_path):
    bench.join.add_labels(labels([30, 40, 77], [1, 2, 0], [1000] * 3))
    bench.checkpoint()
    bench.join.add_events(events([5], [50], [1000]), predictions([5]))
    bench.checkpoint()
    bench.join.payload.tier.close()
    eraser = Eraser(bench.checkpoints, erased_three())
    assert eraser.run().checkpoints == 2
    assert files_with_secret(tmp_path) == []
    bench.part = bench.open(bench.checkpoints.newest())
    assert [row[0] for row in drain(bench.join)] == [4]
    bench.join.add_labels(labels([10, 20, 30, 50], [1] * 4, [1000] * 4))
    assert [row[0] for row in drain(bench.join)] == [1, 2, 5]
    bench.checkpoint()  # the segments are merged with those that were rewritten
    bench.restart()
    assert bench.join.events.waiting == 0


def test_erased_labels_leave_the_checkpoints_on_the_disk(bench, tmp_path):
    bench.join.add_labels(labels([51, 52, 53], [1, 2, 0], [1000] * 3))
    bench.checkpoint()
    bench.join.add_labels(labels([54], [2], [1000], offset=3))
    bench.checkpoint()
    key = np.uint64(52).tobytes() + np.int64(1000).tobytes()
    assert files_with_secret(tmp_path, key) == ["segment-kept-1.safetensors"] * 2
    bench.join.payload.tier.close()
    name = partition_name(TopicPartition("labels", 0))
    erased = ErasedEvents([ByRange(time=0.0, by="command", partition=name, first=1, last=1)])
    assert Eraser(bench.checkpoints, erased).run().checkpoints == 2
    assert files_with_secret(tmp_path, key) == []
    for _ in range(2):  # as rewritten, and merged into a later segment
        bench.part = bench.open(bench.checkpoints.newest())
        assert len(bench.join.labels) == 3
        bench.checkpoint()
        bench.join.payload.tier.close()
    bench.part = bench.open(bench.checkpoints.newest())
    assert bench.join.waits(events([9] * 4, [51, 52, 53, 54], [1000] * 4)).tolist() == [False, True, False, False]


def test_a_loaded_checkpoint_has_no_erased_events(bench):
    bench.join.add_labels(labels([30, 40], [1, 2], [1000] * 2))
    bench.checkpoint()
    found = bench.checkpoints.newest()
    assert found is not None
    checkpoint, removed = without_erased(found[1], erased_three())
    assert removed == (1, 0)
    bench.join.payload.tier.close()
    bench.part = bench.open((1, checkpoint))
    assert [row[0] for row in drain(bench.join)] == [4]
    assert oldest_open(bench.join, 0) == {0: 1}


def test_events_that_come_during_an_erasure_are_not_overwritten(tmp_path):
    bench = JoinBench(tmp_path, options(bytes=2**21))
    assert bench.join.payload.rows >= 200
    before, during = list(range(50)), list(range(50, 150))
    bench.join.add_events(events(before, [offset + 1000 for offset in before], [1000] * 50), predictions(before))
    bench.part.begin_overwrite()
    overwriting = bench.join.payload.overwrite(NONE, 40)
    assert next(overwriting, "done") is None
    bench.join.add_events(events(during, [offset + 1000 for offset in during], [1000] * 100), predictions(during))
    for _ in overwriting:
        pass
    bench.join.advance(2000)
    assert [row[0] for row in drain(bench.join)] == before + during
    assert bench.join.counts.damaged == 0
