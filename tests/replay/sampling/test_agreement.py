"""Policies that compare events with recent ones: wrong labels are sampled seldom, repetitions are held once."""

import numpy as np
import pytest
import torch

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.identity import partition_name
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.replay.build import build_store
from anabranch.replay.erasure.erased_events import ByRange, ErasedEvents
from anabranch.replay.reservoir.embeddings import RecentEmbeddings
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.store import Store
from anabranch.testing.stores import FakeCheckpoints, add_now, plan_of, sample_of

PARTITIONS = [TopicPartition("events", 0)]
DIM = 8
CENTRES = 10 * np.eye(4, DIM, dtype=np.float32)


def embed(numbers, spread=0.5):
    """Return embeddings around one centre for each class 0 to 3; the same number has the same one."""
    around = [np.random.default_rng(number).standard_normal(DIM) for number in numbers.tolist()]
    return (CENTRES[numbers % 4] + spread * np.array(around)).astype(np.float32)


def wrong(offsets):
    """Return which events have a wrong label: one in four, and one in sixteen from 8,000 on."""
    return offsets // 4 % np.where(offsets < 8000, 4, 16) == 0


@pytest.fixture
def build(schema):
    stores: list[Store] = []

    def make(capacity=400, contents=None, **options):
        settings = ReplaySettings.model_validate({"capacity": capacity, **options})
        stores.append(build_store(settings, schema, torch.device("cpu"), 0, None, contents, dim=DIM))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def fill(store, schema, offsets, embedding=None):
    """Add events, whose class is that of their number, but for the wrong ones."""
    label = (offsets + wrong(offsets)) % 4
    columns = fake_columns(schema, offsets.tolist(), label=label.tolist())
    add_now(store, columns, PARTITIONS, embed(offsets) if embedding is None else embedding)


def replay(store, steps, n=40):
    """Replay some steps, and return which fraction of the events has a wrong label."""
    fractions = []
    for step in steps:
        sample = sample_of(store, step, n)
        offsets = sample.records["offset"]
        fractions.append(wrong(offsets).mean())
        store.update_priorities(sample, np.zeros(len(offsets), np.float32), embed(offsets))
    return float(np.mean(fractions))


@pytest.mark.parametrize("policy", [{"sampling": "agreement"}, {"admission": "distinct"}])
def test_without_an_embedding_they_are_refused(schema, policy):
    with pytest.raises(SettingsError, match=r"needs model\.embedding"):
        build_store(ReplaySettings(**policy), schema, torch.device("cpu"), 0)


def test_they_start_no_index_process(build):
    assert not build(sampling="agreement", admission="distinct").embeddings.in_index


def test_events_that_disagree_with_their_neighbours_are_sampled_seldom(schema, build):
    store = build(sampling="agreement")
    fill(store, schema, np.arange(400))
    assert replay(store, range(5)) == pytest.approx(1 / 4, abs=0.08), "nothing is known yet"
    replay(store, range(5, 40))
    assert 0 < replay(store, range(40, 60)) < 1 / 10


def test_where_few_disagree_samples_stay_uniform(schema, build):
    store = build(sampling="agreement")
    fill(store, schema, np.arange(8000, 8400))
    replay(store, range(40))
    assert replay(store, range(40, 80)) == pytest.approx(1 / 16, abs=0.015)


def test_a_restart_goes_on_with_what_was_known(schema, build):
    store = build(sampling="agreement")
    fill(store, schema, np.arange(400))
    replay(store, range(40))
    again = build(sampling="agreement", contents=FakeCheckpoints(store).checkpoint(1))
    for step in (40, 41):
        assert (
            plan_of(again, step, 30).records["offset"].tolist() == plan_of(store, step, 30).records["offset"].tolist()
        )


def test_unknown_embeddings_and_removed_events_are_compared_with_nothing(schema, build):
    store = build(sampling="agreement", admission="distinct")
    fill(store, schema, np.arange(400), np.full((400, DIM), np.nan, np.float32))
    assert len(store) == 400
    sample = sample_of(store, 0, 300)
    store.update_priorities(sample, np.zeros(300, np.float32), np.full((300, DIM), np.inf, np.float32))
    replay(store, range(1, 10))
    store.erase(
        ErasedEvents([ByRange(time=0, by="command", partition=partition_name(PARTITIONS[0]), first=0, last=390)])
    )
    assert replay(store, range(10, 20)) >= 0
    assert sorted(plan_of(store, 20, 40).records["offset"].tolist()) == list(range(391, 400))


def test_a_burst_of_near_duplicates_is_held_once_and_what_only_resembles_it_is_kept(schema, build):
    store = build(capacity=1000, admission="distinct")
    fill(store, schema, np.arange(200))
    for begin in range(1000, 3000, 100):
        # Ten repetitions of one event with a little noise, then ten others of its class.
        noise = np.random.default_rng(begin).normal(0, 0.02, (10, DIM))
        repeated = begin + 4 * np.arange(10)
        fill(store, schema, repeated, (embed(np.full(10, begin)) + noise).astype(np.float32))
        fill(store, schema, repeated + 40)
    offsets = store.event_table.copy()["offset"]
    burst = offsets[offsets >= 1000] % 100 < 40
    assert np.count_nonzero(burst) <= 2 * 20, "one of the right label, and perhaps one of the wrong one"
    assert np.count_nonzero(~burst) >= 180


def test_events_without_a_label_are_sampled_as_often_and_make_no_other_one_suspect(schema, build):
    store = build(sampling="agreement")
    offsets = np.arange(8001, 8401)
    unlabelled = offsets % 3 == 0
    columns = fake_columns(schema, offsets.tolist(), label=np.where(unlabelled, -1, offsets % 4).tolist())
    add_now(store, columns, PARTITIONS, embed(offsets))
    replay(store, range(60))
    later = np.concatenate([plan_of(store, step, 40).records["label"] < 0 for step in range(60, 100)])
    assert later.mean() == pytest.approx(1 / 3, abs=0.05)


def test_in_a_small_store_one_wrong_label_makes_no_right_one_near_it_suspect(schema, build):
    """The last replayed events are the same ones several times: each counts once."""
    store = build(capacity=80, sampling="agreement")
    fill(store, schema, np.arange(80))
    replay(store, range(200), n=10)
    counts = np.bincount(np.concatenate([plan_of(store, step, 10).records["offset"] for step in range(200, 320)]))
    right = ~wrong(np.arange(80))
    assert counts[~right].mean() < counts[right].mean() / 2
    assert counts[right].min() > counts[right].mean() / 3


def test_the_weight_of_a_held_event_does_not_fall_with_the_near_duplicates_that_are_left_out(schema, build):
    store = build(capacity=100, admission="distinct")
    fill(store, schema, np.arange(200))
    for begin in range(1000, 5000, 100):
        repeated = begin + 4 * np.arange(90)
        fill(store, schema, repeated, embed(np.full(90, begin)))
    fill(store, schema, np.arange(200, 400))
    assert sample_of(store, 0, 100).importance.mean() == pytest.approx(1.0, abs=0.05)


def test_events_that_are_added_together_are_compared_as_if_each_block_was_added_at_once(schema, build):
    held = []
    for together in (1, 4):
        store = build(capacity=150, admission="distinct")
        for begin in range(0, 1200, 20):
            offsets = np.arange(begin, begin + 20)
            columns = fake_columns(schema, offsets.tolist(), label=(offsets % 4).tolist())
            # None: the model has not seen these events.
            store.add(columns, PARTITIONS, None if begin % 300 == 0 else embed(offsets % 97 + 4))
            if begin // 20 % together == 0:
                store.flush_pending()
        store.flush_pending()
        held.append(sorted(store.event_table.copy()["offset"].tolist()))
    assert held[0] == held[1]


def test_most_events_that_are_dense_in_few_dimensions_are_kept_and_most_repetitions_among_them_are_not():
    recent, label, random = RecentEmbeddings(DIM, 512), np.zeros(10, np.int64), np.random.default_rng(0)
    left_out, repeated = 0, 0
    for step in range(300):
        dense = np.tile(CENTRES[0], (10, 1))
        dense[:, 1:5] += random.uniform(-4, 4, (10, 4))
        left_out += np.count_nonzero(recent.near_duplicates(dense, label))
        if step >= 100:
            repeated += np.count_nonzero(recent.near_duplicates(dense + random.normal(0, 0.01, (10, DIM)), label))
    assert left_out < 1500, "of 3,000 different events"
    assert repeated > 1000, "of 2,000 repetitions"


@pytest.mark.parametrize("label", [{"name": "y", "dtype": "float32"}, {"name": "y", "classes": 4, "length": 3}])
@pytest.mark.parametrize("policy", [{"sampling": "agreement"}, {"admission": "distinct"}])
def test_labels_that_are_not_one_class_are_refused(policy, label):
    features = {"x": {"dtype": "float32", "shape": [3]}}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": label}))
    with pytest.raises(SettingsError, match="one an event"):
        build_store(ReplaySettings(**policy), schema, torch.device("cpu"), 0, dim=DIM)


def test_a_stream_that_changes_slowly_is_held_at_all_of_its_stages():
    """An event is compared with those that are held, not with the last one that was left out."""
    recent, label = RecentEmbeddings(DIM, 512), np.zeros(10, np.int64)
    around = np.random.default_rng(0).standard_normal((200, DIM)).astype(np.float32)
    for begin in range(0, 200, 10):
        recent.near_duplicates(CENTRES[0] + 3 * around[begin : begin + 10], label)
    held = np.empty(0)
    for begin in range(0, 1500, 10):
        angle = 0.003 * np.arange(begin, begin + 10)
        repeats = recent.near_duplicates(np.cos(angle[:, None] - np.arange(DIM)).astype(np.float32), label)
        held = np.concatenate([held, angle[~repeats]])
    assert 5 < len(held) < 150
    assert np.diff(held).max() < 1
