"""No event of a step is lost for lack of a slot, however many the step has and however few spare slots there are."""

import numpy as np
import pytest
import torch

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.replay.build import build_store
from anabranch.replay.settings import ReplaySettings
from anabranch.testing.stores import FakeCheckpoints, plan_ahead, sample_of

PARTITIONS = [TopicPartition("events", 0)]
KEPT = 3
"""Checkpoints that may be resumed."""


def events(schema, begin, n):
    """Of which `recent` lets nearly all in: an event is twice as likely as one a second older."""
    columns = fake_columns(schema, range(begin, begin + n))
    columns["time_ms"] = np.arange(begin, begin + n) * 10
    return columns


def rows_of(store):
    sample = sample_of(store, 0, len(store))
    return dict(zip(sample.records["offset"].tolist(), sample.columns["feature.x"].tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("step", [1500, 4096, 12_000])
@pytest.mark.parametrize("tiers", [{"device_bytes": "400kB"}, {"disk": {"bytes": "500kB"}}], ids=["device", "disk"])
def test_a_step_finds_slots_for_all_its_events(schema, tmp_path, tiers, step):
    """Also one with more events than are kept; checkpoints are made when the store asks for them, and one in five
    steps."""
    options = {"admission": "recent", "half_life": "1s", **tiers}
    store = build_store(ReplaySettings.model_validate(options), schema, torch.device("cpu"), 0, tmp_path, step=step)
    checkpoints, number = FakeCheckpoints(store), 0
    for turn in range(12):
        for _ in range(KEPT + 1):
            if store.has_room() and turn % 5 != 1:
                break
            number += 1
            checkpoints.checkpoint(number, oldest=max(1, number - KEPT + 1))
        assert store.has_room()
        moment = store.begin_snapshot(number := number + 1) if turn % 3 == 2 else None
        store.add(events(schema, turn * step, step), PARTITIONS)
        plan_ahead(store, turn, 8)
        if moment is not None:
            checkpoints.finish(moment)
            store.end_snapshot(max(1, number - KEPT + 1))
    assert store.lost == 0
    assert len(store) >= store.capacity
    expected = events(schema, 0, 12 * step)["feature.x"]
    assert all(row == expected[offset].tolist() for offset, row in rows_of(store).items())
    store.close()
