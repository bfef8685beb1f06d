"""Uniform over the union of all tiers, whichever tier has a row, and while rows move."""

import numpy as np
import pytest
import torch

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.replay.build import build_store
from anabranch.replay.settings import ReplaySettings
from anabranch.testing.stores import plan_ahead

SAMPLED, STEPS, COMPARED = 8, 3000, 400
PARTITIONS = [TopicPartition("events", 0)]


@pytest.mark.services
@pytest.mark.parametrize("sampling", ["uniform", "recent"])
def test_each_event_of_all_tiers_is_sampled_as_often(schema, tmp_path, shared_redis, sampling):
    """By chi-square. Under `recent`, in which all are of one age here, rows that are sampled take the places of others.

    An event is in memory, in Redis or on disk, and each tier is read: sample by sample the events that a store in
    memory samples, which is the one that is counted since it costs least.
    """
    policy = {"capacity": 240, "sampling": sampling, "half_life": "36500d"}
    tiers = {
        "device_bytes": "3kB",
        "redis": {"url": shared_redis.url, "bytes": "40kB"},
        "disk": {"bytes": "40kB"},
    }
    cpu = torch.device("cpu")
    memory = build_store(ReplaySettings.model_validate(policy), schema, cpu, 0)
    settings = ReplaySettings.model_validate({**policy, **tiers})
    store = build_store(settings, schema, cpu, 0, tmp_path, keys="uniform:rank-0", first=True)
    for begin in range(0, 2000, 50):
        for each in (memory, store):
            each.add(fake_columns(schema, range(begin, begin + 50)), PARTITIONS)
    counts = np.zeros(2000)
    for step in range(STEPS):
        plan_ahead(memory, step, SAMPLED)
        offsets = memory.planner.sample(step, SAMPLED).records["offset"]
        counts[offsets] += 1
        if step < COMPARED:
            plan_ahead(store, step, SAMPLED)
            sample = store.planner.sample(step, SAMPLED)
            assert sample.records["offset"].tolist() == offsets.tolist()
            assert sample.columns["feature.x"][:, 0].tolist() == (offsets % 100).tolist()
    found = counts[memory.event_table.copy()["offset"]]
    assert found.sum() == SAMPLED * STEPS
    free, expected = len(found) - 1, found.mean()
    # As far beyond its mean as a fair trial is about once in 100,000.
    assert (((found - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free) < 4.5
    assert all(rows > 0 for rows in store.tiers.stats.read.values()), store.tiers.stats.read
    assert (store.tiers.stats.demoted > 0) == (sampling == "recent")
    store.close()
