"""What the store holds and what it samples."""

import dataclasses
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.identity import identity_hash, keyed_hash, partition_base
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.replay.build import build_store
from anabranch.replay.erasure.erased_events import ByRange, ErasedEvents
from anabranch.replay.metrics import StoreFigures
from anabranch.replay.reservoir.admission import exponentials
from anabranch.replay.reservoir.reservoir import MAX_PENDING, MAX_PENDING_BYTES
from anabranch.replay.sample_plan import AHEAD, BLOCK
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.tiers import registry as kinds
from anabranch.replay.tiers.redis_tier import RedisTier
from anabranch.testing.stores import FakeCheckpoints, add_now, plan_ahead, plan_of, sample_of

PARTITIONS = [TopicPartition("events", 0), TopicPartition("events", 1)]


def held(store):
    """Return (partition, offset) of what is held, read back from a sample of everything through the index."""
    index = store.event_table.copy()
    return set(zip(index["partition"].tolist(), index["offset"].tolist(), strict=True))


def everything(store):
    return dict(sample_of(store, 0, len(store)).columns)


def k_smallest(schema, events, k, seed):
    """The plain definition: the k events with the smallest priorities of all that were ever added."""
    unique = sorted(set(events))
    partition, offset = (np.array(column) for column in zip(*unique, strict=True))
    bases = np.array([partition_base(name) for name in PARTITIONS], np.uint64)[partition]
    identity = keyed_hash(identity_hash(bases, offset.astype(np.int64), np.zeros(len(offset), np.int32)), seed)
    order = np.argsort(exponentials(identity), kind="stable")
    return {unique[index] for index in order[:k]}


def test_a_sampled_event_is_the_event_that_was_added(schema, make_store):
    store = make_store(100)
    columns = fake_columns(schema, range(50), label=[0, 1, 2, 3])
    add_now(store, columns, PARTITIONS)
    sampled = everything(store)
    order = sampled["feature.n"].argsort()
    for name in ("feature.x", "feature.n", "label", "labelled", "weight"):
        assert sampled[name][order].numpy().tolist() == columns[name].tolist()
        assert sampled[name].numpy().dtype == columns[name].dtype


def test_a_label_with_a_class_at_each_position_is_what_it_was():
    label = {"name": "y", "classes": 4, "length": 3}
    schema = Schema(SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": label}))
    store = build_store(ReplaySettings(capacity=20), schema, torch.device("cpu"), 0)
    columns = fake_columns(schema, range(20), label=[0, 3, 1, -100, 2])
    add_now(store, columns, PARTITIONS)
    plan = plan_of(store, 0, 20)
    sampled = store.planner.fetch(plan).columns["label"].numpy()[plan.records["offset"].argsort()]
    assert sampled.tolist() == columns["label"].tolist()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_label_of_a_regression_is_what_it_was(dtype):
    label = {"name": "y", "dtype": dtype}
    fields = {"features": {"x": {"dtype": "float32"}}, "label": label}
    schema = Schema(SchemaSettings.model_validate(fields))
    store = build_store(ReplaySettings(capacity=20), schema, torch.device("cpu"), 0)
    columns = fake_columns(schema, range(20))
    columns["label"] = np.linspace(-3, 3, 20).astype(dtype)
    columns["label"][7], columns["labelled"][7] = np.nan, False
    add_now(store, columns, PARTITIONS)
    plan = plan_of(store, 0, 20)
    sampled = store.planner.fetch(plan).columns["label"].numpy()[plan.records["offset"].argsort()]
    assert sampled.tobytes() == columns["label"].tobytes()


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float64"]
)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype):
    schema = Schema(
        SchemaSettings.model_validate(
            {
                "features": {"a": {"dtype": dtype, "shape": [3, 5]}, "b": {"dtype": "bool"}, "c": {"dtype": dtype}},
                "label": {"name": "y", "dtype": "float32"},
            }
        )
    )
    store = build_store(ReplaySettings(capacity=20), schema, torch.device("cpu"), 0)
    columns = fake_columns(schema, range(20))
    raw = np.random.default_rng(0).integers(0, 2, columns["feature.a"].shape) * 100
    columns["feature.a"][:] = raw.astype(dtype)
    add_now(store, columns, PARTITIONS)
    plan = plan_of(store, 0, 20)
    order = plan.records["offset"].argsort()
    sampled = store.planner.fetch(plan).columns
    for name in ("feature.a", "feature.b", "feature.c", "label"):
        assert sampled[name].numpy()[order].tobytes() == columns[name].tobytes()


def test_further_columns_are_kept_with_those_of_the_schema(schema, tmp_path):
    """Such as the logits of the step that learned an event."""
    settings = ReplaySettings.model_validate({"capacity": 100, "device_bytes": "1kB", "disk": {"bytes": "1MB"}})
    extra = {"logits": (np.dtype(np.float32), (4,))}
    store = build_store(settings, schema, torch.device("cpu"), 0, tmp_path, extra=extra)
    columns = fake_columns(schema, range(60))
    columns["logits"] = np.random.default_rng(0).standard_normal((60, 4), np.float32)
    add_now(store, columns, PARTITIONS)
    plan = plan_of(store, 0, 60)
    sampled = store.planner.fetch(plan).columns
    assert torch.equal(sampled["logits"], torch.from_numpy(columns["logits"][plan.records["offset"]]))
    store.close()


def test_no_more_is_held_than_capacity_and_a_little(schema, make_store):
    store = make_store(320)
    for begin in range(0, 20_000, 500):
        add_now(store, fake_columns(schema, range(begin, begin + 500)), PARTITIONS)
        assert len(store) <= 330
    assert len(store) >= 320
    assert max(store.tiers.rows(len(store)).values()) == len(store)
    size = store._layout.row_bytes
    row_bytes = {"device": size, "host": size + 9, "disk": size + 8, "redis": RedisTier.bytes_of(size)}
    assert StoreFigures.of(store).bytes == {
        tier: rows * row_bytes[tier] for tier, rows in store.tiers.rows(len(store)).items()
    }


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 400), st.integers(1, 120), st.booleans(), st.booleans()),
        min_size=1,
        max_size=25,
    ),
    st.integers(1, 60),
    st.integers(0, 3),
)
def test_the_k_smallest_of_all_added_events_are_held(schema, batches, k, seed):
    """In any order, with any repetition, within and across batches."""
    store = build_store(ReplaySettings(capacity=k), schema, torch.device("cpu"), seed)
    added: list[tuple[int, int]] = []
    for partition, begin, count, backwards, twice in batches:
        offsets = [*range(begin, begin + count), *([begin] if twice else [])]
        add_now(store, fake_columns(schema, offsets[::-1] if backwards else offsets, partition=partition), PARTITIONS)
        added += [(partition, offset) for offset in offsets]
        contents = held(store)
        assert k_smallest(schema, added, k, seed) <= contents <= set(added)
        assert len(contents) == len(store), "an event is held twice"
    sampled = everything(store)
    assert sorted(sampled["feature.n"].tolist()) == sorted(offset % 100 for _, offset in held(store))


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 300), st.integers(1, 90), st.booleans(), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 120),
    st.sampled_from(["reservoir", "class-balanced"]),
)
def test_events_that_waited_leave_the_store_as_those_that_were_taken_in_at_once(schema, batches, k, admission):
    """Whenever a checkpoint is made, and whether or not some have to leave; else a run that was killed would sample
    others."""
    options = ReplaySettings.model_validate({"capacity": max(k, 5), "admission": admission})
    at_once, waited = (build_store(options, schema, torch.device("cpu"), 0) for _ in range(2))
    checkpoints = FakeCheckpoints(waited)
    for step, (partition, begin, count, backwards, is_checkpointed) in enumerate(batches):
        offsets = list(range(begin, begin + count))[:: -1 if backwards else 1]
        label = [(0, 0, 0, 1, 2)[offset % 5] for offset in offsets]
        columns = fake_columns(schema, offsets, partition=partition, label=label)
        add_now(at_once, columns, PARTITIONS)
        waited.add(columns, PARTITIONS)
        if is_checkpointed:
            checkpoints.checkpoint(step + 1)
        sampled = []
        for store in (at_once, waited):
            plan_ahead(store, step, 7)
            sampled.append(store.planner.sample(step, 7))
        assert sampled[0].records.tobytes() == sampled[1].records.tobytes()
        assert all(torch.equal(sampled[0].columns[name], sampled[1].columns[name]) for name in sampled[0].columns)
    waited.flush_pending()
    index, other = at_once.event_table.copy(), waited.event_table.copy()
    assert all(np.array_equal(index[name], other[name]) for name in index.dtype.names if name != "slot")
    assert at_once.reservoir.quotas.thresholds.tobytes() == waited.reservoir.quotas.thresholds.tobytes()


def test_events_are_added_together_except_when_a_sampler_chooses_for_each_step(schema):
    for sampling, waits in (("uniform", [10, 20, 30, 40, 50, 60, 70, 0]), ("recent", [0] * BLOCK)):
        store = build_store(ReplaySettings(capacity=100, sampling=sampling), schema, torch.device("cpu"), 0)
        seen = []
        for turn in range(BLOCK):
            store.add(fake_columns(schema, range(10 * turn, 10 * turn + 10)), PARTITIONS)
            seen.append(10 * (turn + 1) - len(store))
        assert seen == waits
        assert len(store) == 10 * BLOCK


@pytest.mark.parametrize("access", ["checkpoint", "plan", "erase"])
def test_each_access_to_the_store_adds_pending_events(schema, access):
    store = build_store(ReplaySettings(capacity=100), schema, torch.device("cpu"), 0)
    store.add(fake_columns(schema, range(10)), PARTITIONS)
    found = {
        "checkpoint": lambda: len(FakeCheckpoints(store).checkpoint(1).index),
        "plan": lambda: len(plan_of(store, 0, 20)),
        "erase": lambda: store.erase(
            ErasedEvents([ByRange(time=0, by="command", partition="events#0[0]", first=0, last=9)])
        ),
    }[access]()
    assert found == 10


def test_slots_that_events_wait_for_are_not_free(schema):
    store = build_store(ReplaySettings(capacity=2000), schema, torch.device("cpu"), 0)
    store.begin_snapshot(1)
    store.burst = store.slots.free - 300
    store.add(fake_columns(schema, range(300)), PARTITIONS)
    assert store.has_room()
    assert not len(store)
    store.add(fake_columns(schema, [300]), PARTITIONS)
    assert not store.has_room()
    assert len(store) == 301, "what waits was not taken in"


def test_where_slots_are_free_as_soon_as_events_leave_there_is_room_for_any_number(schema):
    """Though more events wait than there are slots."""
    store = build_store(ReplaySettings(capacity=50), schema, torch.device("cpu"), 0)
    for begin in range(0, 4000, 200):
        assert store.has_room()
        store.add(fake_columns(schema, range(begin, begin + 200)), PARTITIONS)
    store.flush_pending()
    assert held(store) >= k_smallest(schema, ((0, offset) for offset in range(4000)), 50, 0)
    assert store.lost == 0


def test_while_a_disk_is_slow_no_more_is_kept_in_memory_than_what_it_is_to_write(schema, tmp_path):
    options = ReplaySettings.model_validate({"capacity": 100, "disk": {"bytes": "1MB"}, "device_bytes": 0})
    store = build_store(options, schema, torch.device("cpu"), 0, tmp_path / "replay")
    add_now(store, fake_columns(schema, range(10_000)), PARTITIONS)  # few are admitted from now on
    slow = threading.Event()
    store.tiers._io_thread.submit(slow.wait)
    columns, admitted, begin = {}, 0, 10_000
    while not admitted:
        columns = fake_columns(schema, range(begin, begin + 50))
        admitted, begin = add_now(store, columns, PARTITIONS), begin + 50
    block = weakref.ref(columns.pop("feature.x"))
    columns.clear()
    assert block() is None
    slow.set()
    store.tiers.sync()
    assert len(everything(store)["label"]) == len(store)
    store.close()


def test_no_more_events_wait_than_are_taken_in_soon(schema):
    store = build_store(ReplaySettings(capacity=2000), schema, torch.device("cpu"), 0)
    store.add(fake_columns(schema, range(MAX_PENDING)), PARTITIONS)
    assert len(store) == MAX_PENDING


@pytest.mark.slow
def test_no_more_bytes_wait_than_are_taken_in_soon():
    features = {"x": {"dtype": "uint8", "shape": [MAX_PENDING_BYTES // 10]}}
    large = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 4}}))
    store = build_store(ReplaySettings(capacity=20), large, torch.device("cpu"), 0)
    store.add(fake_columns(large, range(5)), PARTITIONS)
    assert not len(store)
    store.add(fake_columns(large, range(5, 10)), PARTITIONS)
    assert len(store) == 10


def test_adding_again_changes_nothing(schema, make_store):
    store = make_store(50)
    for begin in range(0, 2000, 100):
        add_now(store, fake_columns(schema, range(begin, begin + 100)), PARTITIONS)
    before = held(store)
    for begin in range(1500, 2000, 100):
        assert add_now(store, fake_columns(schema, range(begin, begin + 100)), PARTITIONS) == 0
    assert held(store) == before


def test_adding_again_changes_no_importance_either(schema):
    """However additions are grouped, and whether the event is held."""
    sampled = []
    for again in (0, 100, 700):
        store = build_store(ReplaySettings(capacity=50), schema, torch.device("cpu"), 0)
        for begin in range(0, 3000, 100):
            for first in {begin, max(0, begin - again)}:
                columns = fake_columns(schema, range(first, begin + 100))
                columns["weight"] = (1 + columns["offset"] % 3).astype(np.float32)
                store.add(columns, PARTITIONS)
        sample = sample_of(store, 0, 50)
        sampled.append((sample.records["offset"].tolist(), sample.importance.tolist()))
    assert sampled[0] == sampled[1] == sampled[2]


def test_labels_with_a_class_at_each_position_are_held():
    features = {"x": {"dtype": "float32", "shape": [3]}}
    label = {"name": "y", "classes": 5, "length": 4}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": label}))
    store = build_store(ReplaySettings(capacity=50), schema, torch.device("cpu"), 0)
    columns = fake_columns(schema, range(20))
    columns["label"] = np.arange(80).reshape(20, 4) % 5
    add_now(store, columns, PARTITIONS)
    sample = sample_of(store, 0, 20)
    assert sample.columns["label"].tolist() == columns["label"][sample.records["offset"]].tolist()


def test_events_out_of_order_have_an_importance_though_none_of_weight_was_counted(schema):
    store = build_store(ReplaySettings(capacity=50, admission="recent"), schema, torch.device("cpu"), 0)
    columns = fake_columns(schema, range(10)[::-1])
    columns["weight"][:] = [0.0, *[1.0] * 9]
    add_now(store, columns, PARTITIONS)
    sample = sample_of(store, 0, 50)
    assert sample.importance.tolist() == [1.0] * 9


@pytest.mark.parametrize("admission", ["reservoir", "class-balanced", "recent"])
def test_events_that_waited_are_held_and_counted_as_if_they_came_in_order(schema, admission):
    """Labels come in another order than their events, and some events of a block did not wait."""
    found = []
    for shuffled in (False, True):
        store = build_store(ReplaySettings(capacity=50, admission=admission), schema, torch.device("cpu"), 0)
        order = np.random.default_rng(0).permutation(3000) if shuffled else np.arange(3000)
        for begin in range(0, 3000, 100):
            columns = fake_columns(schema, order[begin : begin + 100].tolist())
            columns["label"] = columns["offset"] % 4
            columns["weight"] = (1 + columns["offset"] % 3).astype(np.float32)
            if shuffled:
                columns["waited"] = np.ones(100, np.bool_)
            store.add(columns, PARTITIONS)
        store.flush_pending()
        index, (_, state) = store.event_table.copy(), store.reservoir.begin_snapshot(1)
        first = np.lexsort((index["priority"], index["group"]))
        firsts = [index["offset"][first][index["group"][first] == group][:5].tolist() for group in range(5)]
        found.append((firsts, state["added"].tolist(), state["weight"]))
    assert found[0] == found[1]
    assert sum(found[0][1]) == 3000


def test_blocks_with_and_without_events_that_waited_are_added_together(schema, make_store):
    store = make_store(100)
    store.add(fake_columns(schema, range(10, 20)), PARTITIONS)
    store.add({**fake_columns(schema, range(5)), "waited": np.ones(5, np.bool_)}, PARTITIONS)
    store.add(fake_columns(schema, range(15, 25)), PARTITIONS)
    store.flush_pending()
    assert held(store) == {(0, offset) for offset in (*range(5), *range(10, 25))}
    assert len(store) == 20


def test_a_removed_event_may_be_added_with_another_label(schema, make_store):
    store = make_store(100)
    store.remove(fake_columns(schema, [3]), partitions=PARTITIONS)
    store.add(fake_columns(schema, range(10)), PARTITIONS)
    again = {**fake_columns(schema, [3, 70], label=[1]), "waited": np.ones(2, np.bool_)}
    store.remove(again, partitions=PARTITIONS)
    store.flush_pending()
    assert held(store) == {(0, offset) for offset in range(10) if offset != 3}
    add_now(store, again, PARTITIONS)
    sample = sample_of(store, 0, 100)
    labels = dict(zip(sample.records["offset"].tolist(), sample.columns["label"].tolist(), strict=True))
    assert labels == {**dict.fromkeys(range(10), 0), 3: 1, 70: 1}


def test_a_burst_larger_than_the_room_for_it_is_taken_in_pieces(schema, make_store):
    store = make_store(10)
    total = 3 * store.burst + 7
    add_now(store, fake_columns(schema, range(total)), PARTITIONS)
    assert held(store) >= k_smallest(schema, [(0, offset) for offset in range(total)], 10, 0)
    assert len(store) == 10


def test_two_reservoirs_merge_to_the_one_of_the_whole_stream(schema, make_store):
    whole, left, right = make_store(64), make_store(64), make_store(64)
    for begin in range(0, 4000, 200):
        columns = fake_columns(schema, range(begin, begin + 200))
        add_now(whole, columns, PARTITIONS)
        add_now(left if begin % 400 else right, columns, PARTITIONS)
    union = held(left) | held(right)
    assert k_smallest(schema, union, 64, 0) == k_smallest(schema, [(0, o) for o in range(4000)], 64, 0) <= held(whole)


def test_heavy_events_are_kept_in_proportion_and_weightless_ones_never(schema):
    kept = np.zeros(3)
    weights = np.array([0.0, 1.0, 3.0], np.float32)
    for seed in range(60):
        store = build_store(ReplaySettings(capacity=50), schema, torch.device("cpu"), seed)
        columns = fake_columns(schema, range(5000), label=[0, 1, 2])
        columns["weight"] = weights[columns["label"]]
        add_now(store, columns, PARTITIONS)
        kept += np.bincount(everything(store)["label"].numpy(), minlength=3)
    assert kept[0] == 0
    assert 2.6 < kept[2] / kept[1] < 3.4


@pytest.mark.parametrize("capacity", [10_000, 500, 50])
def test_the_importance_of_a_sample_makes_it_represent_the_weighted_stream(schema, capacity):
    """A weighted mean over the store estimates that over the stream, however much of it is held."""
    weights = np.array([0.1, 1.0, 3.0], np.float32)
    estimates = []
    for seed in range(30):
        store = build_store(ReplaySettings(capacity=capacity), schema, torch.device("cpu"), seed)
        columns = fake_columns(schema, range(3000), label=[0, 1, 2])
        columns["weight"] = weights[columns["label"]]
        add_now(store, columns, PARTITIONS)
        sample = sample_of(store, 0, len(store))
        estimates.append(float((sample.importance * sample.columns["label"]).sum() / sample.importance.sum()))
        assert 0.7 < float(sample.importance.mean()) / weights.mean() < 1.5 or capacity == 50
    expected = float((weights * [0, 1, 2]).sum() / weights.sum())
    assert abs(np.mean(estimates) - expected) < 0.03


class TestSamples:
    def test_an_event_comes_once_in_a_sample(self, schema, make_store):
        store = make_store(100)
        add_now(store, fake_columns(schema, range(80)), PARTITIONS)
        for step in range(50):
            slots = plan_of(store, step, 60).slots
            assert len(set(slots.tolist())) == 60

    def test_a_sample_is_no_larger_than_the_store(self, schema, make_store):
        store = make_store(100)
        assert len(sample_of(store, 0, 10)) == 0
        add_now(store, fake_columns(schema, range(7)), PARTITIONS)
        assert len(sample_of(store, 0, 10)) == 7

    def test_plans_that_nobody_samples_do_not_pile_up(self, schema, make_store):
        store = make_store(100)
        add_now(store, fake_columns(schema, range(80)), PARTITIONS)
        for step in range(50):
            plan_ahead(store, step, 1)
            assert AHEAD <= len(store.begin_snapshot(step + 1).plans) < AHEAD + BLOCK
            store.end_snapshot(None)

    def test_a_checkpoint_has_a_plan_as_it_was_whatever_becomes_of_its_sample(self, schema, make_store):
        store = make_store(100)
        add_now(store, fake_columns(schema, range(80)), PARTITIONS)
        checkpoints = FakeCheckpoints(store)
        plan_ahead(store, 0, 30)
        untouched = [plan.rows.clone() for plan in checkpoints.checkpoint(1).state.plans]
        held = store.begin_snapshot(2)
        for step in range(len(held.plans)):
            for column in store.planner.sample(step, 30).columns.values():
                column.zero_()
        plans = checkpoints.finish(held).state.plans
        assert [plan.step for plan in plans] == [*range(len(held.plans))]
        assert all(torch.equal(plan.rows, rows) for plan, rows in zip(plans, untouched, strict=True))
        store.end_snapshot(None)

    def test_steps_that_are_planned_together_each_get_their_number_of_events(self, schema, make_store):
        store = make_store(100)
        add_now(store, fake_columns(schema, range(80)), PARTITIONS)
        plan_ahead(store, 0, lambda step: 30 if step % 4 == 2 else step)
        assert [store.planner.planned(step) for step in range(4)] == [0, 1, 30, 3]
        for step in range(4):
            sample = store.planner.sample(step, 100)
            assert len(set(sample.records["offset"].tolist())) == len(sample)

    def test_the_same_step_over_the_same_contents_is_the_same_sample(self, schema, make_store):
        one, two = make_store(100), make_store(100)
        for store in (one, two):
            add_now(store, fake_columns(schema, range(80)), PARTITIONS)
        plan_of(two, 3, 20)
        assert plan_of(one, 9, 20).records["offset"].tolist() == plan_of(two, 9, 20).records["offset"].tolist()
        assert plan_of(one, 9, 20).records["offset"].tolist() != plan_of(one, 10, 20).records["offset"].tolist()

    @pytest.mark.slow
    def test_uniform_means_uniform(self, schema):
        """Chi-square over 64 events: the statistic of 63 degrees of freedom exceeds 110 once in 5,000 fair trials."""
        store = build_store(ReplaySettings(capacity=64), schema, torch.device("cpu"), 0)
        add_now(store, fake_columns(schema, range(64)), PARTITIONS)
        alone, ahead, first = np.zeros(64), np.zeros(64), np.zeros(64)
        for step in range(4000):
            alone += np.bincount(plan_of(store, step, 8).records["offset"], minlength=64)
            plan_ahead(store, step, 8)
            sampled = store.planner.sample(step, 8).records["offset"]
            ahead += np.bincount(sampled, minlength=64)
            first += np.bincount(sampled[:1], minlength=64)
        for counts in (alone, ahead, first):
            expected = counts.sum() / 64
            assert ((counts - expected) ** 2 / expected).sum() < 110

    @pytest.mark.slow
    def test_what_is_held_is_a_uniform_sample_of_the_stream(self, schema):
        """Each tenth of the stream has the same share, over many seeds: 9 degrees of freedom, 33 once in 8,000."""
        counts = np.zeros(10)
        for seed in range(40):
            store = build_store(ReplaySettings(capacity=100), schema, torch.device("cpu"), seed)
            for begin in range(0, 4000, 250):
                add_now(store, fake_columns(schema, range(begin, begin + 250)), PARTITIONS)
            counts += np.bincount(store.event_table.copy()["offset"] // 400, minlength=10)
        expected = counts.sum() / 10
        assert ((counts - expected) ** 2 / expected).sum() < 33

    @pytest.mark.parametrize("seed", [0, 1])
    def test_no_tier_changes_what_is_held_or_sampled(self, schema, make_store, monkeypatch, seed):
        """So what is uniform in memory is so in every tier: the same events at the same places of every sample."""
        store = make_store(64, seed)
        with monkeypatch.context() as patch:
            patch.setattr(kinds, "TIERS", {})
            memory = build_store(ReplaySettings(capacity=64), schema, torch.device("cpu"), seed)
        for step in range(64):
            sampled = []
            for each in (memory, store):
                add_now(each, fake_columns(schema, range(50 * step, 50 * step + 50)), PARTITIONS)
                alone = plan_of(each, step, 8).records["offset"].tolist()
                plan_ahead(each, step, 8)
                sampled.append((alone, each.planner.sample(step, 8).records["offset"].tolist()))
            assert sampled[0] == sampled[1]
            assert store.event_table.copy()["offset"].tolist() == memory.event_table.copy()["offset"].tolist()


def test_bytes_decide_where_they_hold_less_than_the_capacity(schema, caplog):
    store = build_store(ReplaySettings(capacity=10**6, device_bytes="100kB"), schema, torch.device("cpu"), 0)
    assert store.tiers.slots * store._layout.row_bytes <= 100_000
    assert "not 1000000" in caplog.text


def test_bytes_that_hold_no_event_are_refused(schema):
    with pytest.raises(SettingsError, match=r"replay.device_bytes = 1000 is too small"):
        build_store(ReplaySettings(device_bytes="1kB"), schema, torch.device("cpu"), 0)


@pytest.mark.parametrize(
    ("device", "memory"),
    [("cpu", "host"), *(pytest.param("cuda", x, marks=pytest.mark.gpu) for x in ("device", "host"))],
)
@pytest.mark.parametrize("cached", [{}, {"disk": {"bytes": "1MB"}, "device_bytes": "2kB", "sampling": "recent"}])
def test_samples_do_not_depend_on_the_device_of_the_memory_tier(schema, tmp_path, device, memory, cached):
    plain, other = (
        build_store(
            ReplaySettings.model_validate({"capacity": 200, "device_memory": memory_of, **cached}),
            *(schema, torch.device(name), 0, tmp_path / name / memory_of),
        )
        for name, memory_of in (("cpu", "device"), (device, memory))
    )
    for store in (plain, other):
        add_now(store, fake_columns(schema, range(1000), label=[0, 1, 2, 3]), PARTITIONS)
    for step in range(20):
        expected = sample_of(plain, step, 32).columns
        sampled = sample_of(other, step, 32).columns
        assert all(sampled[name].device.type == device for name in expected)
        assert all(sampled[name].cpu().equal(value) for name, value in expected.items())
    expected, found = (FakeCheckpoints(store).checkpoint(1) for store in (plain, other))
    assert np.array_equal(expected.index, found.index)
    if expected.payload is not None:
        assert found.payload is not None
        assert expected.payload.equal(found.payload)
    for store in (plain, other):
        store.close()


class TestCheckpoints:
    """What a checkpoint holds of a store, and what becomes of it."""

    def test_contents_are_those_of_the_moment_however_much_is_added_meanwhile(self, schema, make_store):
        store, baseline = make_store(640), make_store(640)
        for begin in range(0, 4000, 200):
            for each in (store, baseline):
                add_now(each, fake_columns(schema, range(begin, begin + 200), label=[0, 1, 2, 3]), PARTITIONS)
        moment = store.begin_snapshot(1)
        begin = 4000
        while store.slots.free > store.burst and begin < 10_000:
            add_now(store, fake_columns(schema, range(begin, begin + 50), label=[3]), PARTITIONS)
            begin += 50
        contents = FakeCheckpoints(store).finish(moment)
        store.end_snapshot(1)
        assert begin > 4200, "a hold leaves too little room"
        restored = make_store(640, contents=contents)
        assert held(restored) == held(baseline)
        expected, found = everything(baseline), everything(restored)
        for name in expected:
            assert found[name][found["feature.n"].argsort(stable=True)].sum() == expected[name].sum()
        # It goes on as if nothing had been: the same events, the same samples.
        for each in (restored, baseline):
            add_now(each, fake_columns(schema, range(4000, 6000), label=[1]), PARTITIONS)
        assert held(restored) == held(baseline)
        assert (
            plan_of(restored, 7, 50).records["offset"].tolist() == plan_of(baseline, 7, 50).records["offset"].tolist()
        )
        assert everything(restored)["feature.n"].tolist() == everything(baseline)["feature.n"].tolist()

    def test_slots_that_were_freed_are_used_again_when_no_checkpoint_names_them(self, schema, make_store):
        store, number = make_store(64), 0
        for begin in range(0, 30_000, 100):
            if store.slots.free < store.burst or begin % 1000 == 0:
                if number:
                    store.end_snapshot(max(1, number - 1))
                number += 1
                store.begin_snapshot(number)
            add_now(store, fake_columns(schema, range(begin, begin + 100)), PARTITIONS)
        store.end_snapshot(None)
        assert not store.lost
        assert store.slots.free == store.tiers.slots - len(store)
        slots = store.event_table.slots
        assert len(set(slots.tolist())) == len(store)

    def test_a_smaller_store_restores_the_k_smallest(self, schema, make_store):
        large = make_store(500)
        add_now(large, fake_columns(schema, range(3000)), PARTITIONS)
        small = make_store(50, contents=FakeCheckpoints(large).checkpoint(1))
        assert held(small) == k_smallest(schema, [(0, offset) for offset in range(3000)], 50, 0)

    def test_an_empty_store_can_be_checkpointed(self, make_store):
        store = make_store(10)
        restored = make_store(10, contents=FakeCheckpoints(store).checkpoint(1))
        assert len(restored) == 0

    def test_contents_of_another_layout_are_refused(self, schema, make_store):
        store = make_store(10)
        add_now(store, fake_columns(schema, range(5)), PARTITIONS)
        plan_ahead(store, 0, 3)
        contents = FakeCheckpoints(store).checkpoint(1)
        torn = [dataclasses.replace(plan, rows=plan.rows[:, :8]) for plan in contents.state.plans]
        state = dataclasses.replace(contents.state, plans=torn)
        with pytest.raises(SettingsError, match="other columns"):
            make_store(10, contents=dataclasses.replace(contents, state=state))


@pytest.mark.parametrize("sampling", ["uniform", "class-balanced", "loss"])
def test_samples_of_some_steps_at_once_are_those_of_each_also_where_plans_are_of_a_checkpoint(schema, sampling):
    settings = ReplaySettings.model_validate({"capacity": 200, "sampling": sampling})
    first, *stores = (build_store(settings, schema, torch.device("cpu"), 0) for _ in range(3))
    add_now(first, fake_columns(schema, range(300), label=[0, 1, 2]), PARTITIONS)
    plan_ahead(first, 0, 6)
    contents = FakeCheckpoints(first).checkpoint(1)
    one_by_one, at_once = stores
    for store in stores:
        store.restore(contents)
        store.plan_blocks(0, store.planner.blocks(0, store.planner.planned_through, 6, 16))
    counts = [6, 5, 6, 1, *[6] * 8]
    assert len(first.planner.plans) < len(counts) <= len(at_once.planner.plans)
    expected = [one_by_one.planner.sample(step, n) for step, n in enumerate(counts)]
    everything = at_once.planner.sample(0, *counts)
    assert everything is not None
    assert everything.sizes == counts
    assert at_once.planner.plans[0].step == one_by_one.planner.plans[0].step == len(counts)
    for begin, n, step in zip(np.cumsum([0, *counts]), counts, expected, strict=False):
        part = everything.part(slice(begin, begin + n))
        assert all(torch.equal(part.columns[name], value) for name, value in step.columns.items())
        assert torch.equal(part.importance, step.importance)
        assert part.slots.tolist() == step.slots.tolist()
        assert part.records.tobytes() == step.records.tobytes()


def test_steps_whose_plans_have_fewer_events_are_not_sampled_at_once_and_keep_their_plans(schema):
    store = build_store(ReplaySettings(capacity=200), schema, torch.device("cpu"), 0)
    add_now(store, fake_columns(schema, range(5)), PARTITIONS)
    plan_ahead(store, 0, 8)
    assert store.planner.sample(0, 8, 8) is None
    assert store.planner.sample(0, *[5] * 40) is None, "not all are planned"
    assert [len(store.planner.sample(step, 8)) for step in range(2)] == [5, 5]
