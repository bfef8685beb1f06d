"""Tiers of the user, such as the one that docs/extend/tier.md shows, another order of ours, and tiers that are gone."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.replay.build import build_store, check_policies
from anabranch.replay.sample_plan import AHEAD
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.store import Store
from anabranch.replay.tiers import registry as kinds
from anabranch.replay.tiers.clock_cache import Budget
from anabranch.testing.stores import FakeCheckpoints, add_now, plan_ahead, sample_of
from tests.support.shelf import ShelfFactory

PARTITIONS = [TopicPartition("events", 0)]
HOST: dict[str, Any] = {"tiers": {"host": "10kB"}, "disk": {"bytes": "200kB"}, "device_bytes": "1kB"}
MEMORY: dict[str, Any] = {}
SHELF: dict[str, Any] = {"factory": "tests.support.shelf:ShelfFactory", "bytes": "200kB"}
ON_SHELF: dict[str, Any] = {"tiers": {"shelf": SHELF}, "device_bytes": "1kB"}


@pytest.fixture
def build(schema, tmp_path, host_tier):
    """`build(options, contents=None)`: stores in one folder, as restarts of one learner make them.

    A tier of `tiers` is a section, or only its bytes for the tier of the page.
    """
    stores: list[Store] = []

    def make(options, contents=None):
        tiers = {
            name: host_tier(each) if isinstance(each, str) else each for name, each in options.get("tiers", {}).items()
        }
        settings = ReplaySettings.model_validate({"capacity": 1000, **options, "tiers": tiers})
        stores.append(build_store(settings, schema, torch.device("cpu"), 0, tmp_path, contents, keys="test:rank-0"))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def fill(store, schema, begin, end):
    for offset in range(begin, end, 100):
        add_now(store, fake_columns(schema, range(offset, offset + 100)), PARTITIONS)


def sample_all(store):
    """Sample everything, wait for what is put back, and return how many events came."""
    came = len(sample_of(store, 0, len(store)))
    store.tiers.sync()
    return came


def share(store, cache):
    return int((store.event_table.slots < cache.slots).sum())


@pytest.mark.parametrize("before", [MEMORY, HOST], ids=["memory", "host"])
@pytest.mark.parametrize("after", [MEMORY, HOST], ids=["memory", "host"])
def test_with_a_tier_that_is_added_no_sample_is_another_also_after_a_restart(schema, build, before, after):
    store, undisturbed = build(before), build(MEMORY)
    for each in (store, undisturbed):
        fill(each, schema, 0, 5000)
        plan_ahead(each, 7, 20)
    moved = build(after, FakeCheckpoints(store).checkpoint(1))
    for each in (moved, undisturbed):
        fill(each, schema, 5000, 9000)
        plan_ahead(each, 8, 20)
    for step in range(8, 8 + AHEAD):
        mine, expected = moved.planner.sample(step, 20), undisturbed.planner.sample(step, 20)
        assert all(torch.equal(mine.columns[name], column) for name, column in expected.columns.items())
    assert moved.lost == 0


def test_a_cache_that_is_added_is_read_and_fills_again_after_a_restart(schema, build):
    store = build(HOST)
    fill(store, schema, 0, 1000)
    host, stats = store.tiers.slow[0], store.tiers.stats
    assert (host.name, store.tiers.rows(len(store))["host"]) == ("host", share(store, host))
    assert sample_all(store) == 1000
    assert 0 < stats.read["host"] <= share(store, host) < stats.read["disk"]
    again = build(HOST, FakeCheckpoints(store).checkpoint(1))
    host, stats = again.tiers.slow[0], again.tiers.stats
    assert sample_all(again) == 1000
    assert stats.missed["host"] == share(again, host) == again.tiers.rows(len(again))["host"]
    assert stats.read["host"] == 0
    assert sample_all(again) == 1000
    assert stats.missed["host"] == share(again, host)
    assert stats.read["host"] > 0


def test_each_cache_that_missed_a_row_has_it_afterwards_as_far_as_the_bound_goes(schema, build):
    options = {**HOST, "tiers": {"host": "10kB", "attic": "20kB"}, "device_bytes": "0"}
    store = build(options)
    fill(store, schema, 0, 1000)
    again = build(options, FakeCheckpoints(store).checkpoint(1))
    host, attic, disk = again.tiers.slow
    assert [host.name, attic.name, disk.name] == ["host", "attic", "disk"]
    shares = {tier.name: share(again, tier) for tier in (host, attic)}
    assert 0 < shares["host"] < shares["attic"] < 1000
    again.tiers._refill = Budget(0)
    assert sample_all(again) == 1000
    assert again.tiers.stats.missed == {"device": 0, **shares}
    assert again.tiers.stats.moved["host", "written"] == again.tiers.stats.moved["attic", "written"] == 0
    again.tiers._refill = Budget(1_000_000)
    sample_all(again)
    slots = again.event_table.slots.astype(np.int64)
    for tier in (host, attic):
        mine = slots[slots < tier.slots]
        assert tier.read(mine, again.event_table.identity(mine))[1].all()
    sample_all(again)
    assert again.tiers.stats.missed == {"device": 0, **{name: 2 * rows for name, rows in shares.items()}}
    assert again.tiers.stats.read == {
        "device": 0,
        "host": shares["host"],
        "attic": shares["attic"] - shares["host"],
        "disk": 3000 - shares["attic"],
    }


def test_a_tier_that_holds_nothing_for_a_restart_cannot_be_the_primary_tier(build):
    with pytest.raises(SettingsError, match=r"has to store everything; set replay.disk or replay.redis too"):
        build({"tiers": {"host": "1MB"}})


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(ON_SHELF, id="same"),
        pytest.param({**ON_SHELF, "tiers": {"shelf": {**SHELF, "bytes": "100kB"}}}, id="smaller"),
        pytest.param({**ON_SHELF, "disk": {"bytes": "200kB"}}, id="disk"),
    ],
)
def test_a_store_goes_on_from_a_checkpoint_whose_events_are_in_a_tier_of_the_user(schema, build, tmp_path, after):
    store = build(ON_SHELF)
    fill(store, schema, 0, 1000)
    before = sample_of(store, 7, 50)
    contents = FakeCheckpoints(store).checkpoint(1)
    store.close()
    again = build(after, contents)
    names = [tier.name for tier in again.tiers.all]
    assert names == ["device", "shelf", "disk"] if "disk" in after else ["device", "shelf"]
    moved = sample_of(again, 7, 50)
    assert all(torch.equal(moved.columns[name], column) for name, column in before.columns.items())
    assert (sample_all(again), again.lost) == (1000, 0)
    for number in (2, 3):
        again.begin_snapshot(number)
        again.end_snapshot(number)
    assert len([*(tmp_path / "shelf").iterdir()]) == 1


def test_a_checkpoint_whose_tier_of_the_user_is_gone_is_refused(schema, build, tmp_path):
    store = build(ON_SHELF)
    fill(store, schema, 0, 500)
    contents = FakeCheckpoints(store).checkpoint(1)
    with pytest.raises(
        SettingsError, match=r"in a tier of an unknown kind, shelf; put its section of \[replay\.tiers\]"
    ):
        build({"disk": {"bytes": "200kB"}}, contents)
    store.close()
    for path in (tmp_path / "shelf").iterdir():
        path.unlink()
    with pytest.raises(SettingsError, match="is gone; put it back"):
        build(ON_SHELF, contents)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"rows": 3}, "replay.tiers.shelf: tests.support.shelf:ShelfFactory has no 'rows'; it takes most"),
        ({"most": "many"}, "refuses most = 'many': it has to be a whole number of at least 1"),
    ],
)
def test_arguments_that_a_factory_refuses_are_one_sentence(schema, build, section, sentence):
    settings = {"tiers": {"shelf": SHELF | section}}
    with pytest.raises(SettingsError, match=sentence):
        build(settings)
    with pytest.raises(SettingsError, match=sentence):
        check_policies(ReplaySettings.model_validate(settings), schema, None)


def test_bytes_of_a_tier_of_the_user_that_are_too_few_are_named(build):
    with pytest.raises(SettingsError, match=r"replay.tiers.shelf.bytes = 200000 is too small: an event has \d+ bytes"):
        build({"tiers": {"shelf": {**SHELF, "most": 10}}})


@pytest.mark.parametrize("method", ["open_primary", "cache"])
def test_a_factory_that_cannot_be_where_it_is_set_is_one_sentence(build, monkeypatch, method):
    monkeypatch.delattr(ShelfFactory, method)
    sentence = {"open_primary": "stores nothing for a restart", "cache": "is no cache"}[method]
    with pytest.raises(SettingsError, match=sentence):
        build({**ON_SHELF, **({"disk": {"bytes": "200kB"}} if method == "cache" else {})})


@pytest.mark.parametrize(("error", "kind"), [(KeyError("shelf"), SettingsError), (OSError("away"), DependencyError)])
@pytest.mark.parametrize("method", ["connect", "open_primary", "cache", "cleanup_actions"])
def test_what_a_tier_of_the_user_raises_when_it_is_opened_is_one_sentence(build, monkeypatch, method, error, kind):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(ShelfFactory, method, fail)
    with pytest.raises(
        kind, match=r"replay\.tiers\.shelf cannot be opened: \w+Error: .*(shelf|away).* \(.*, line \d+\)"
    ):
        build({**ON_SHELF, **({"disk": {"bytes": "200kB"}} if method == "cache" else {})})


def test_a_tier_of_the_user_that_finds_no_memory_is_tried_again_as_others_are(build, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ShelfFactory, "open_primary", fail)
    with pytest.raises(torch.OutOfMemoryError):
        build(ON_SHELF)


def test_a_primary_tier_without_a_reference_is_refused(build, monkeypatch):
    def open_primary(factory, slots, source):
        tier = factory.cache(slots, source)
        del tier.file
        return tier

    monkeypatch.setattr(ShelfFactory, "open_primary", open_primary)
    with pytest.raises(SettingsError, match=r"replay\.tiers\.shelf: its primary tier has no file, .* a TierRef"):
        build(ON_SHELF)


def test_a_checkpoint_whose_rows_are_in_a_tier_of_an_unknown_kind_is_refused(schema, build):
    store = build({"disk": {"bytes": "200kB"}})
    fill(store, schema, 0, 500)
    contents = FakeCheckpoints(store).checkpoint(1)
    assert contents.state.file is not None
    file = dataclasses.replace(contents.state.file, name="tape")
    other = dataclasses.replace(contents, state=dataclasses.replace(contents.state, file=file))
    with pytest.raises(
        SettingsError, match=r"in a tier of an unknown kind, tape; put its section of \[replay.tiers\] back"
    ):
        build({}, other)


def test_the_order_of_the_dict_says_which_tier_is_primary(schema, build, shared_redis, monkeypatch, tmp_path):
    monkeypatch.setattr(kinds, "TIERS", dict(reversed(kinds.TIERS.items())))
    redis = {"url": shared_redis.url, "bytes": "1MB"}
    options = {"disk": {"bytes": "20kB"}, "redis": redis, "device_bytes": 0}
    store = build(options)
    fill(store, schema, 0, 1000)
    disk, primary = store.tiers.slow
    assert (disk.name, primary.name, store.tiers.file) == ("disk", "redis", primary.file)
    assert sample_all(store) == 1000
    assert store.tiers.stats.read == {"device": 0, "disk": share(store, disk), "redis": 1000 - share(store, disk)}
    again = build(options, FakeCheckpoints(store).checkpoint(1))
    assert again.tiers.file == primary.file
    assert sample_all(again) == 1000
    assert again.tiers.stats.missed["disk"] == share(again, disk) > 0
    assert sorted(path.name for path in tmp_path.glob("*.rows")) == ["1.rows", "2.rows"]
    for number in (2, 3):
        again.begin_snapshot(number)
        again.end_snapshot(number)
    assert [path.name for path in tmp_path.glob("*.rows")] == ["2.rows"]
