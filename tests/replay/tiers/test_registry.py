"""Kinds of tiers are in a dict: one that docs/extend/tier.md adds, another order, and none that is missing."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import torch

from anabranch.core.errors import SettingsError
from ingest.events.partition import TopicPartition
from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from replay.build import build_store
from replay.config import ReplaySettings, TierSettings
from replay.fake import FakeCheckpoints, add_now, plan_ahead
from replay.payload.clock_cache import Budget
from replay.sample_planner import AHEAD
from replay.snapshot import StoreSnapshot
from replay.store import Store
from replay.tiers import registry as kinds
from replay.tiers.tier import SlowTier

PARTITIONS = [TopicPartition("events", 0)]
HOST: dict[str, Any] = {"host": {"bytes": "10kB"}, "disk": {"bytes": "200kB"}, "device_bytes": "1kB"}
MEMORY: dict[str, Any] = {}
Build = Callable[..., Store]


@pytest.fixture
def build(schema: Schema, tmp_path: Path, with_host: type[ReplaySettings]) -> Iterator[Build]:
    """`build(options, contents=None, section=...)`: stores in one folder, as restarts of one learner make them."""
    stores: list[Store] = []

    def make(
        options: dict[str, Any], contents: StoreSnapshot | None = None, section: type[ReplaySettings] = with_host
    ) -> Store:
        settings = section.model_validate({"capacity": 1000, **options})
        stores.append(build_store(settings, schema, torch.device("cpu"), 0, tmp_path, contents, keys="test:rank-0"))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def fill(store: Store, schema: Schema, begin: int, end: int) -> None:
    for offset in range(begin, end, 100):
        add_now(store, fake_columns(schema, range(offset, offset + 100)), PARTITIONS)


def sample_all(store: Store) -> int:
    """Sample everything, wait for what is put back, and return how many events came."""
    came = len(store.fetch(store.plan(0, len(store))))
    store.tiers.sync()
    return came


def share(store: Store, cache: SlowTier) -> int:
    return int((store.event_table.slots < cache.slots).sum())


def test_every_section_has_a_kind_that_opens_it() -> None:
    types = {name: get_args(field.annotation) for name, field in ReplaySettings.model_fields.items()}
    is_section = lambda kind: isinstance(kind, type) and issubclass(kind, TierSettings)  # noqa: E731
    assert {name for name, alternatives in types.items() if any(map(is_section, alternatives))} == set(kinds.TIERS)


@pytest.mark.parametrize("before", [MEMORY, HOST], ids=["memory", "host"])
@pytest.mark.parametrize("after", [MEMORY, HOST], ids=["memory", "host"])
def test_with_a_tier_that_is_added_no_sample_is_another_also_after_a_restart(
    schema: Schema, build: Build, before: dict[str, Any], after: dict[str, Any]
) -> None:
    store, undisturbed = build(before), build(MEMORY)
    for each in (store, undisturbed):
        fill(each, schema, 0, 5000)
        plan_ahead(each, 7, 20)
    moved = build(after, FakeCheckpoints(store).checkpoint(1))
    for each in (moved, undisturbed):
        fill(each, schema, 5000, 9000)
        plan_ahead(each, 8, 20)
    for step in range(8, 8 + AHEAD):
        mine, expected = moved.sample(step, 20), undisturbed.sample(step, 20)
        assert all(torch.equal(mine.columns[name], column) for name, column in expected.columns.items())
    assert moved.lost == 0


def test_a_cache_that_is_added_is_read_and_fills_again_after_a_restart(schema: Schema, build: Build) -> None:
    store = build(HOST)
    fill(store, schema, 0, 1000)
    host, stats = store.tiers.slow[0], store.tiers.stats
    assert (host.name, store.rows["host"]) == ("host", share(store, host))
    assert sample_all(store) == 1000
    assert 0 < stats.read["host"] <= share(store, host) < stats.read["disk"]
    again = build(HOST, FakeCheckpoints(store).checkpoint(1))
    host, stats = again.tiers.slow[0], again.tiers.stats
    assert sample_all(again) == 1000
    assert stats.missed["host"] == share(again, host) == again.rows["host"]
    assert stats.read["host"] == 0
    assert sample_all(again) == 1000
    assert stats.missed["host"] == share(again, host)
    assert stats.read["host"] > 0


@pytest.fixture
def with_attic(
    with_host: type[ReplaySettings], added: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> type[ReplaySettings]:
    """`[replay]` with a second tier of the same kind below `host`."""
    page = added("replay.host")

    class AtticKind(page.HostTierFactory):  # type: ignore[misc, name-defined]
        def cache(self, slots: int, primary: SlowTier) -> SlowTier:
            tier: SlowTier = super().cache(slots, primary)
            tier.name = "attic"
            return tier

    class WithAttic(with_host):  # type: ignore[misc, valid-type]
        attic: TierSettings | None = None

    host, *rest = kinds.TIERS.items()
    monkeypatch.setattr(kinds, "TIERS", dict([host, ("attic", AtticKind), *rest]))
    return WithAttic


def test_each_cache_that_missed_a_row_has_it_afterwards_as_far_as_the_bound_goes(
    schema: Schema, build: Build, with_attic: type[ReplaySettings]
) -> None:
    options = {**HOST, "attic": {"bytes": "20kB"}, "device_bytes": "0"}
    store = build(options, section=with_attic)
    fill(store, schema, 0, 1000)
    again = build(options, FakeCheckpoints(store).checkpoint(1), section=with_attic)
    host, attic, disk = again.tiers.slow
    assert [host.name, attic.name, disk.name] == ["host", "attic", "disk"]
    shares = {tier.name: share(again, tier) for tier in (host, attic)}
    assert 0 < shares["host"] < shares["attic"] < 1000
    again.tiers._reads.refill = Budget(0)
    assert sample_all(again) == 1000
    assert again.tiers.stats.missed == {"device": 0, **shares}
    assert again.tiers.stats.moved["host", "written"] == again.tiers.stats.moved["attic", "written"] == 0
    again.tiers._reads.refill = Budget(1_000_000)
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


def test_a_tier_that_holds_nothing_for_a_restart_cannot_be_the_primary_tier(build: Build) -> None:
    with pytest.raises(SettingsError, match=r"has to store everything; set replay.disk or replay.redis too"):
        build({"host": {"bytes": "1MB"}})


def test_a_checkpoint_whose_rows_are_in_a_tier_of_an_unknown_kind_is_refused(schema: Schema, build: Build) -> None:
    store = build({"disk": {"bytes": "200kB"}})
    fill(store, schema, 0, 500)
    contents = FakeCheckpoints(store).checkpoint(1)
    assert contents.state.file is not None
    file = dataclasses.replace(contents.state.file, name="tape")
    other = dataclasses.replace(contents, state=dataclasses.replace(contents.state, file=file))
    with pytest.raises(SettingsError, match="contents of checkpoint 1 are in a tier of an unknown kind, tape"):
        build({}, other)


def test_the_order_of_the_dict_says_which_tier_is_primary(
    schema: Schema, build: Build, shared_redis: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.rows", "2.rows"]
    for number in (2, 3):
        again.begin_snapshot(number)
        again.end_snapshot(number)
    assert [path.name for path in tmp_path.iterdir()] == ["2.rows"]
