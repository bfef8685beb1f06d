"""Policies that compare events: the store with a real index process."""

import os
import signal

import numpy as np
import pytest
import torch

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.identity import partition_name
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.replay.build import build_store
from anabranch.replay.embedding_index import client as neighbours
from anabranch.replay.embedding_index.embedding_tracker import LAG, UNKNOWN
from anabranch.replay.erasure.erased_events import ByRange, ErasedEvents
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.store import Store
from anabranch.testing.stores import FakeCheckpoints, add_now, plan_ahead, plan_of, sample_of
from tests.support.waiting import wait_until

PARTITIONS = [TopicPartition("events", 0)]
DIM = 4
CENTRES = 10 * np.eye(DIM, dtype=np.float32)

pytestmark = pytest.mark.process


def embed(offsets):
    """Most events are at the first centre; one in 16 at each of the others."""
    near = np.where(offsets % 16 >= DIM, 0, offsets % 16)
    jitter = np.random.default_rng(0).standard_normal((len(offsets), DIM))
    return (CENTRES[near] + 0.1 * jitter).astype(np.float32)


@pytest.fixture
def build(schema, monkeypatch):
    monkeypatch.setattr(neighbours, "_REPORT_SECONDS", 0.01)
    stores: list[Store] = []

    def make(capacity=9000, **options):
        contents = options.pop("contents", None)
        settings = ReplaySettings.model_validate({"capacity": capacity, **options})
        stores.append(build_store(settings, schema, torch.device("cpu"), 0, None, contents, dim=DIM))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def fill(store, schema, begin, end):
    """Add events as fast as the index takes them, and wait until it has all that are held."""
    for first in range(begin, end, 256):
        offsets = np.arange(first, min(end, first + 256))
        add_now(store, fake_columns(schema, offsets.tolist()), PARTITIONS, embed(offsets))
        wait_until(lambda: store.embeddings.neighbours.stats().waiting < 20)
        store.embeddings.poll()  # as at each step: events that are added before have no cluster of a new training
    wait_until(lambda: store.embeddings.neighbours.stats().process.rows == len(store))


def seek(store, step, near):
    """Look for what is near to events of such offsets, and wait for the answer."""
    store.embeddings.query(step, embed(near))
    wait_until(lambda: (store.embeddings.poll(), step in store.embeddings._answers)[1])


@pytest.mark.parametrize("policy", ["similar", "diverse"])
def test_without_an_embedding_they_are_refused(schema, policy):
    with pytest.raises(SettingsError, match=rf'replay.sampling = "{policy}" needs model.embedding'):
        build_store(ReplaySettings(sampling=policy), schema, torch.device("cpu"), 0)


def test_similar_samples_what_is_near_to_new_events(schema, build):
    store = build(sampling="similar")
    fill(store, schema, 0, 3200)
    uniform = plan_of(store, 0, 40).records["offset"] % 16
    assert (uniform != 3).any(), "nothing was asked for yet"
    seek(store, 1, np.full(8, 3))
    assert (plan_of(store, 1 + LAG, 8).records["offset"] % 16 == 3).all()
    assert (plan_of(store, 1 + LAG, 40).records["offset"] % 16 != 3).any(), "an answer is for one sample"


def test_similar_samples_what_is_near_to_the_new_events_of_a_fixed_number_of_steps_before(schema, build):
    """Uniformly where the answer to those is late, instead of the same events again."""
    store = build(sampling="similar")
    fill(store, schema, 0, 3200)
    for step in (3, 1, 2):
        seek(store, step, np.full(8, step))
    for step in (1, 2, 3):
        assert (plan_of(store, step + LAG, 8).records["offset"] % 16 == step).all()
    seek(store, 4, np.full(8, 1))
    plan_of(store, 6 + LAG, 8)
    assert not store.embeddings._answers, "an answer that arrives too late is dropped"
    sampled = [tuple(plan_of(store, step + LAG, 8).slots.tolist()) for step in range(7, 40)]
    assert len({slot for each in sampled for slot in each}) > 150


def test_an_event_that_has_left_is_not_found(schema, build):
    store = build(capacity=100, sampling="similar")
    fill(store, schema, 0, 3200)
    store.embeddings.query(1, embed(np.full(8, 3)))
    wait_until(lambda: store.embeddings.neighbours.stats().answer_seconds)
    for step in range(20):
        plan = plan_of(store, step, 100)
        assert len(set(plan.slots.tolist())) == len(plan) == len(store)
        assert store.event_table.still_at(plan.slots, plan.records).all()


def test_diverse_samples_as_many_of_each_cluster(schema, build):
    store = build(sampling="diverse")
    fill(store, schema, 0, 9000)
    wait_until(store.embeddings.poll)
    rare = np.isin(plan_of(store, 0, 400).records["offset"] % 16, np.arange(1, DIM)).mean()
    assert rare > 2 * (DIM - 1) / 16


def test_diverse_samples_the_oldest_embeddings_first_and_clusters_as_evenly_as_ever(schema, build):
    """By chance alone one of the old ones would come in every fifth sample, and about 170 such samples had all of
    them."""
    store, n, offsets = build(sampling="diverse"), 64, np.arange(9000)
    fill(store, schema, 0, 9000)
    wait_until(store.embeddings.poll)
    old = store.event_table.slots[::225].copy()
    new = store.event_table.slots[~np.isin(store.event_table.slots, old)]
    store.embeddings._step = 20_000
    for part in np.array_split(new, 40):
        store.embeddings.update(part, embed(offsets)[store.event_table.column("offset", part)])
        wait_until(lambda: store.embeddings.neighbours.stats().waiting < 20)
    store.embeddings.query(20_000, embed(np.arange(1)))
    missing, samples = set(old.tolist()), 0

    def all_came():
        nonlocal samples
        plan = plan_of(store, 0, n)
        clusters, sizes = (store.embeddings.clusters(each) for each in (plan.slots, store.event_table.slots))
        sampled, there = (np.bincount(each, minlength=100) for each in (clusters, sizes))
        assert there[UNKNOWN] < len(store) / 10
        sampled, there = sampled[UNKNOWN + 1 :], there[UNKNOWN + 1 :]  # the unknown come as often as they are there
        assert (sampled >= np.minimum(there, sampled.max() - 1)).all()
        assert len(set(plan.slots.tolist())) == n
        assert store.event_table.still_at(plan.slots, plan.records).all()
        samples += not missing.isdisjoint(plan.slots.tolist())
        missing.difference_update(plan.slots.tolist())
        return not missing

    wait_until(all_came)
    assert samples <= 40


class TestErased:
    """An event that was erased is nobody's neighbour, whatever becomes of the index process."""

    @pytest.fixture(params=["similar", "diverse"])
    def store(self, schema, build, request):
        store = build(capacity=4000, sampling=request.param)
        fill(store, schema, 0, 3200)
        return store

    def test_it_leaves_the_index_the_clusters_and_the_plans(self, store):
        wait_until(lambda: store.embeddings.neighbours.stats().process.trained_rows and store.embeddings.poll())
        self._seek(store)
        plan_ahead(store, 1 + LAG, 64)
        ids = erase(store)
        wait_until(lambda: store.embeddings.neighbours.stats().process.rows == len(store))
        self._assert_none(store, ids)

    def test_it_does_not_come_back_when_the_process_is_killed(self, store):
        self._seek(store)
        plan_ahead(store, 1 + LAG, 64)
        sample = sample_of(store, 0, 400)
        assert store.embeddings.neighbours.pid is not None
        os.kill(store.embeddings.neighbours.pid, signal.SIGKILL)
        ids = erase(store)
        wait_until(lambda: store.embeddings.neighbours.stats().restarts == 1)
        wait_until(
            lambda: (
                store.embeddings.neighbours.stats()
                and store.embeddings.neighbours.problem is None
                and store.embeddings.neighbours.reports
            )
        )
        # A step that was under way then, and others: only what is held goes into the new process.
        for each in (sample, sample_of(store, 1, len(store))):
            store.update_priorities(each, np.zeros(len(each), np.float32), embed(each.records["offset"]))
        wait_until(lambda: store.embeddings.neighbours.stats().process.rows == len(store))
        self._assert_none(store, ids)

    @staticmethod
    def _seek(store):
        for step in range(1, 10):
            seek(store, step, np.full(8, 3))

    @staticmethod
    def _assert_none(store, ids):
        """Ask the process itself too, for all that is near to what was erased."""
        for step in range(1 + LAG, 5 + LAG):
            assert (store.planner.sample(step, 64).records["offset"] % 16 != 3).all()
        assert store.embeddings.neighbours is not None
        store.embeddings.neighbours.answers()
        wait_until(lambda: store.embeddings.neighbours.query(9, embed(np.full(8, 3)), 20))
        (answer,) = wait_until(store.embeddings.neighbours.answers)
        assert answer.ids.shape == (8, 20)
        assert not np.isin(answer.ids, ids).any()
        for step in range(5 + LAG, 30):
            assert (plan_of(store, step, 64).records["offset"] % 16 != 3).all()


def erase(store):
    """Erase the events of one centre, and return the ids that they had in the index."""
    offsets = [offset for offset in store.event_table.copy()["offset"].tolist() if offset % 16 == 3]
    gone = np.isin(store.event_table.column("offset", store.event_table.slots), offsets)
    ids = store.embeddings._ids[store.event_table.slots[gone]].copy()
    name = partition_name(PARTITIONS[0])
    records = [ByRange(time=0, by="command", partition=name, first=offset, last=offset) for offset in offsets]
    assert store.erase(ErasedEvents(records)) == len(offsets) == 200
    return ids


def test_diverse_keeps_more_of_what_is_rare(schema, build):
    store = build(capacity=2000, admission="diverse")
    fill(store, schema, 0, 9000)
    wait_until(store.embeddings.poll)
    fill(store, schema, 9000, 40_000)
    offsets = store.event_table.copy()["offset"]
    assert np.isin(offsets % 16, np.arange(1, DIM)).mean() > 1.3 * (DIM - 1) / 16


def test_diverse_counts_no_event_twice_also_when_clusters_are_trained_again(schema, build):
    """What was evicted under the old clusters is not held because the new ones have room."""
    store = build(capacity=1000, admission="diverse")
    fill(store, schema, 0, 5000)
    wait_until(store.embeddings.poll)
    again = np.arange(4000, 5000)
    for changed in (False, True):
        if changed:
            trained = store.embeddings.poll()
            for _ in range(4):  # enough to train clusters again; with endless updates none would be sent completely
                wait_until(lambda: not store.embeddings.neighbours.stats().waiting)
                slots = store.event_table.slots
                store.embeddings.update(slots, -embed(store.event_table.column("offset", slots)))
            wait_until(lambda trained=trained: store.embeddings.poll() != trained)
        before = store.event_table.copy()["offset"].tolist()
        assert add_now(store, fake_columns(schema, again.tolist()), PARTITIONS, embed(again)) == 0
        assert store.event_table.copy()["offset"].tolist() == before


def test_a_store_that_goes_on_from_a_checkpoint_finds_its_events_again_as_they_are_sampled(schema, build):
    store = build(sampling="similar")
    fill(store, schema, 0, 1600)
    resumed = build(sampling="similar", contents=FakeCheckpoints(store).checkpoint(1))
    wait_until(lambda: resumed.embeddings.neighbours.stats() and resumed.embeddings.neighbours.reports)
    assert not resumed.embeddings.neighbours.stats().process.rows
    sample = sample_of(resumed, 0, 500)
    resumed.update_priorities(sample, np.zeros(len(sample), np.float32), embed(sample.records["offset"]))
    wait_until(lambda: resumed.embeddings.neighbours.stats().process.rows == 500)


@pytest.mark.parametrize("policy", ["similar", "diverse"])
def test_what_the_index_does_not_have_keeps_its_share_of_the_samples(schema, build, policy):
    """As after a restart, when only new events have embeddings: were they alone sampled, old ones never would."""
    store = build(sampling=policy)
    fill(store, schema, 0, 3200)
    resumed = build(sampling=policy, contents=FakeCheckpoints(store).checkpoint(1))
    for first in range(3200, 6400, 256):
        offsets = np.arange(first, min(6400, first + 256))
        add_now(resumed, fake_columns(schema, offsets.tolist()), PARTITIONS, embed(offsets))
        wait_until(lambda: resumed.embeddings.neighbours.stats().waiting < 20)
    wait_until(lambda: resumed.embeddings.neighbours.stats().process.rows == 3200)
    if policy == "diverse":
        wait_until(resumed.embeddings.poll)
    samples = []
    for step in range(50):
        seek(resumed, step, np.arange(64))
        samples.append(plan_of(resumed, step + LAG, 64))
    assert all(len(set(each.slots.tolist())) == 64 for each in samples)
    old = np.concatenate([each.records["offset"] for each in samples]) < 3200
    assert 0.4 < old.mean() < 0.6
    for each in samples:
        sample = resumed.planner.fetch(each)
        resumed.update_priorities(sample, np.zeros(64, np.float32), embed(sample.records["offset"]))
    assert resumed.embeddings.indexed[np.concatenate([each.slots for each in samples])].mean() > 0.9


def test_when_the_index_process_dies_what_it_had_keeps_its_share_too(schema, build):
    store = build(sampling="similar")
    fill(store, schema, 0, 3200)
    assert store.embeddings.indexed[store.event_table.slots].all()
    assert store.embeddings.neighbours.pid is not None
    os.kill(store.embeddings.neighbours.pid, signal.SIGKILL)
    wait_until(lambda: store.embeddings.neighbours.stats().restarts == 1)
    plan_of(store, 1, 8)
    assert not store.embeddings.indexed[store.event_table.slots].any()


def test_events_that_came_without_an_embedding_get_one_when_they_are_sampled(schema, build):
    store = build(sampling="similar")
    add_now(store, fake_columns(schema, range(200)), PARTITIONS)
    wait_until(lambda: store.embeddings.neighbours.stats() and store.embeddings.neighbours.reports)
    sample = sample_of(store, 0, 200)
    store.update_priorities(sample, np.zeros(200, np.float32), embed(sample.records["offset"]))
    wait_until(lambda: store.embeddings.neighbours.stats().process.rows == 200)


def test_under_diverse_admission_events_of_one_weight_count_alike_whenever_clusters_are_found(schema, build):
    store = build(capacity=4000, admission="diverse")
    for end in (9000, 20_000):
        for first in range(end - 9000, end, 256):
            offsets = np.arange(first, min(end, first + 256))
            columns = fake_columns(schema, offsets.tolist())
            columns["weight"][:] = 1.0
            add_now(store, columns, PARTITIONS, embed(offsets))
            wait_until(lambda: store.embeddings.neighbours.stats().waiting < 20)
        trained = wait_until(store.embeddings.poll)
        importance = sample_of(store, trained, 1000).importance
        assert importance.min() > 0.5
        assert importance.max() < 2.0
