"""A store that goes on from a checkpoint samples what it would have sampled; under another policy it keeps what that
one keeps."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.replay.build import build_store
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.store import Store
from anabranch.testing.stores import FakeCheckpoints, add_now, plan_ahead

PARTITIONS = [TopicPartition("events", 0)]
ARRANGEMENTS: list[dict[str, Any]] = [
    {},
    {"disk": {"bytes": "500kB"}},
    {"disk": {"bytes": "150kB"}, "device_bytes": "1kB"},
]
ADMISSIONS: dict[str, dict[str, Any]] = {
    **{name: {"admission": name} for name in ("reservoir", "class-balanced", "recent")},
    "floor": {"admission": "reservoir", "class_floor": 0.5},
}
SAMPLINGS = ["uniform", "class-balanced", "recent", "loss"]
CAPACITY, SAMPLED = 200, 24


def block(schema, step, rows):
    """Events of a step; classes are uneven, and a step is a minute."""
    columns = fake_columns(schema, range(step * 1000, step * 1000 + rows), label=[0, 0, 0, 0, 1, 1, 2, -1])
    columns["weight"] = np.resize(np.array([0.5, 1.0, 1.0, 3.0], np.float32), rows)
    columns["time_ms"] = np.full(rows, step * 60_000)
    return columns


def take_step(store, schema, step, rows):
    """Sample, learn, add and plan as the learner does; return all of the sample."""
    sample = store.planner.sample(step, SAMPLED)
    store.update_priorities(sample, (sample.records["offset"] * 7 % 19 / 5).astype(np.float32))
    store.add(block(schema, step, rows), PARTITIONS)
    plan_ahead(store, step + 1, SAMPLED)
    columns = [column.tolist() for _, column in sorted(sample.columns.items())]
    return [sample.records["offset"].tolist(), sample.importance.tolist(), *columns]


@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@settings(max_examples=8)
@given(
    lives=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 4), st.sampled_from(ARRANGEMENTS)), max_size=4),
    rows=st.sampled_from([20, 150]),
)
@pytest.mark.slow
def test_no_restart_changes_a_sample(schema, sampling, admission, lives, rows):
    """Bit for bit, in whatever tiers each life has its rows; what a crash undoes is done again."""
    policies = {"capacity": CAPACITY, "sampling": sampling, **ADMISSIONS[admission], "half_life": "5m"}
    with tempfile.TemporaryDirectory() as folder:
        build = _builder(schema, Path(folder), policies)
        whole, expected, steps = build({}), list[Any](), sum(length for length, _, _ in lives) + 10
        plan_ahead(whole, 0, SAMPLED)
        for step in range(steps):
            expected.append(take_step(whole, schema, step, rows))
        store = build(ARRANGEMENTS[0])
        plan_ahead(store, 0, SAMPLED)
        checkpoints, step = FakeCheckpoints(store), 0
        for number, (length, undone, arrangement) in enumerate(lives, start=1):
            for _ in range(length):
                assert take_step(store, schema, step, rows) == expected[step]
                step += 1
            contents = checkpoints.checkpoint(number)
            for ahead in range(step, step + undone):
                take_step(store, schema, ahead, 20)
            store.close()
            store = build(arrangement, contents)
            checkpoints = FakeCheckpoints(store, contents)
        for last in range(step, steps):
            assert take_step(store, schema, last, rows) == expected[last]
        assert store.lost == 0
        for each in (whole, store):
            each.close()


def _builder(schema, folder, policies):
    def build(arrangement, contents=None):
        chosen = ReplaySettings.model_validate({**policies, **arrangement})
        return build_store(chosen, schema, torch.device("cpu"), 0, folder, contents)

    return build


@pytest.fixture
def build(schema, tmp_path):
    """`build(arrangement, contents=None, **policies)`: stores in one folder."""
    stores: list[Store] = []

    def make(arrangement, contents=None, **policies):
        chosen = {"capacity": CAPACITY, "half_life": "5m", **policies}
        stores.append(_builder(schema, tmp_path, chosen)(arrangement, contents))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=["device", "disk", "small disk"])
@pytest.mark.parametrize("before", ADMISSIONS)
@pytest.mark.parametrize("after", ADMISSIONS)
def test_under_another_policy_events_compete_as_if_it_had_been_that_one(schema, build, before, after, arrangement):
    """Of what the old one had kept and what came later, the new one holds what one to which these were added holds."""
    store, other = build(arrangement, **ADMISSIONS[before]), build({}, **ADMISSIONS[after])
    for step in range(20):
        add_now(store, block(schema, step, 100), PARTITIONS)
    plan_ahead(store, 0, SAMPLED)
    checkpoints = FakeCheckpoints(store)
    first = checkpoints.checkpoint(1)
    kept = np.sort(first.index["offset"])
    for step in range(20):
        columns = block(schema, step, 100)
        mine = np.isin(columns["offset"], kept)
        if mine.any():
            add_now(other, {name: column[mine] for name, column in columns.items()}, PARTITIONS)
    store = build(arrangement, first, **ADMISSIONS[after])
    assert sorted(store.event_table.copy()["offset"].tolist()) == kept.tolist()
    for step in range(20, 50):
        for each in (store, other):
            add_now(each, block(schema, step, 100), PARTITIONS)
    names = ["offset", "group", "priority"]
    assert (
        np.array_equal(np.sort(store.event_table.copy()[names]), np.sort(other.event_table.copy()[names]))
        or before == after
    )
    # The next checkpoint has the new priorities, not those of the previous one.
    again = build(arrangement, FakeCheckpoints(store, first).checkpoint(2), **ADMISSIONS[after])
    assert np.array_equal(again.event_table.copy()[names], store.event_table.copy()[names])
    assert len(again.planner.sample(0, SAMPLED)) == SAMPLED
    assert store.lost == again.lost == 0
