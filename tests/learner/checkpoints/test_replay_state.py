"""The store's part of a checkpoint: checkpoints share segments, and a damaged segment loses only its events."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.checkpoints.checkpointer import complete
from anabranch.learner.checkpoints.parts import pack, unpack
from anabranch.learner.errors import CheckpointError
from anabranch.replay.build import build_store
from anabranch.replay.settings import ReplaySettings
from anabranch.testing.stores import add_now, plan_of
from tests.learner.checkpoints.store_bench import PARTITIONS, Bench

each_tier = pytest.mark.parametrize("options", [{}, {"disk": {"bytes": "200kB"}}], ids=["device", "disk"])


@pytest.fixture
def bench(tmp_path, schema, options):
    bench = Bench(tmp_path, schema, options)
    yield bench
    bench.close()


@each_tier
def test_a_checkpoint_writes_new_segments_and_links_the_others(bench):
    bench.add(900)
    bench.checkpoint()
    bench.add(50)
    bench.checkpoint()
    first, second = bench.files(1), bench.files(2)
    assert sorted(first) == ["segment-1.safetensors"]
    assert sorted(second) == ["segment-1.safetensors", "segment-2.safetensors"]
    assert second["segment-1.safetensors"].samefile(first["segment-1.safetensors"])
    sizes = {name: path.stat().st_size for name, path in second.items()}
    assert sizes["segment-2.safetensors"] < sizes["segment-1.safetensors"] / 10


@pytest.mark.parametrize("options", [{}])
def test_a_checkpoint_has_the_names_of_stale_caches(bench):
    assert bench.store is not None
    state, delta = bench.store.begin_snapshot(1).contents()
    packed, _ = pack(dataclasses.replace(state, stale=["redis"]), delta, (), bench.checkpoints)
    bench.checkpoints.write(1, complete(0, {}, {}, [packed]), 0.0)
    found = bench.checkpoints.newest()
    assert found is not None
    read = unpack(found[1])
    assert read is not None
    assert read[0].state.stale == ["redis"]


@each_tier
def test_a_checkpoint_is_complete_after_others_are_deleted(bench):
    held = {}
    for number in range(1, 9):
        bench.add(700 if number == 1 else 130)
        bench.checkpoint(keep=100)
        held[number] = bench.held
    for number in (1, 3, 4, 6, 8):
        shutil.rmtree(bench.checkpoints.path / str(number))
    assert bench.resume() == 7
    assert bench.held == held[7]
    shutil.rmtree(bench.checkpoints.path / "7")
    assert bench.resume() == 5
    assert bench.held == held[5]


@each_tier
def test_a_store_is_unchanged_by_restarts_and_failed_checkpoints(bench, schema):
    """It holds the events and rows of a store without restarts and failures."""
    whole = build_store(ReplaySettings(capacity=1000), schema, torch.device("cpu"), 0)
    for turn in range(25):
        add_now(whole, fake_columns(schema, range(bench.begin, bench.begin + 100)), PARTITIONS)
        bench.add(100)
        bench.checkpoint(fails=turn % 7 == 3)
        if turn % 7 == 3:
            bench.checkpoint()
            assert sorted(bench.files(bench.number)) == [f"segment-{bench.number}.safetensors"], "it is not full"
        if turn % 4 == 1:
            bench.resume()
        assert bench.held == whole.event_table.copy()["offset"].tolist()
    bench.resume()
    plan = plan_of(whole, 0, len(whole))
    offsets = plan.records["offset"].tolist()
    expected = dict(zip(offsets, whole.planner.fetch(plan).columns["feature.x"].tolist(), strict=True))
    assert bench.payload() == expected


@each_tier
def test_a_damaged_segment_loses_only_its_events(bench, caplog):
    """No other checkpoint is intact, so it is restored; the next checkpoint is intact again."""
    bench.add(700)
    bench.checkpoint()
    bench.add(100)
    bench.checkpoint(keep=1)
    before = bench.held
    _flip(bench.files(2)["segment-2.safetensors"])
    assert bench.resume() == 2
    assert bench.held == before[:700]
    assert bench.store is not None
    assert bench.store.lost == 100
    assert "going on without the events that were stored in it" in caplog.text
    bench.add(200)
    bench.checkpoint(keep=1)
    now = bench.payload()
    assert bench.resume() == 3
    assert bench.payload() == now
    assert bench.store.lost == 0


@each_tier
def test_an_intact_older_checkpoint_is_preferred_to_a_damaged_one(bench):
    bench.add(700)
    bench.checkpoint()
    held = bench.held
    bench.add(100)
    bench.checkpoint()
    _flip(bench.files(2)["segment-2.safetensors"])
    assert bench.resume() == 1
    assert bench.held == held


@each_tier
def test_a_checkpoint_that_merges_a_damaged_segment_fails(bench):
    bench.add(100)
    bench.checkpoint()
    _flip(bench.files(1)["segment-1.safetensors"])
    bench.add(100)
    with pytest.raises(CheckpointError, match="does not have its digest"):
        bench.checkpoint()
    assert bench.store is not None
    bench.store.end_snapshot(1, written=False)
    bench.checkpoint()
    before = bench.held
    assert bench.resume() == 3
    assert bench.held == before


@each_tier
def test_an_empty_store_and_one_that_has_lost_all_events_can_be_checkpointed(bench):
    bench.checkpoint()
    assert bench.resume() == 1
    assert bench.held == []
    bench.add(10)
    bench.checkpoint(keep=1)
    for path in bench.files(2).values():
        path.unlink()
    assert bench.resume() == 2
    assert bench.held == []
    bench.checkpoint()
    assert bench.resume() == 3
    bench.add(5)
    assert len(bench.held) == 5


def _flip(path):
    content = np.frombuffer(path.read_bytes(), np.uint8).copy()
    content[-1] ^= 1
    path.write_bytes(content.tobytes())
