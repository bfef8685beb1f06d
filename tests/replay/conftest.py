"""A schema and stores for the tests of replay, and the modules that docs/extend/ shows."""

import sys
from typing import Any

import pytest
import torch

from anabranch.replay.build import build_store
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.store import Store
from anabranch.testing.policies import SCHEMA
from tests.support.extend_pages import follow


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """`followed("sampler")`: the name of the module that the page of docs/extend/ shows, which can be imported."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return lambda page: follow(page, tmp_path)


@pytest.fixture
def host_tier(followed):
    """`host_tier("10kB")`: the section of `[replay.tiers]` with the tier that docs/extend/tier.md shows."""
    factory = f"{followed('tier')}:HostTierFactory"
    return lambda size: {"factory": factory, "bytes": size}


@pytest.fixture(scope="session")
def schema():
    return SCHEMA


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "disk": {"disk": {"bytes": "20MB"}},
    "disk with a small cache": {"disk": {"bytes": "20MB"}, "device_bytes": "1kB"},
    "disk alone": {"disk": {"bytes": "20MB"}, "device_bytes": "0"},
    "redis": {"redis": {"bytes": "20MB"}, "device_bytes": "0"},
    "redis with a small cache": {"redis": {"bytes": "20MB"}, "device_bytes": "1kB"},
    "disk with redis": {"disk": {"bytes": "20MB"}, "redis": {"bytes": "30kB"}, "device_bytes": "0"},
    "all": {"disk": {"bytes": "20MB"}, "redis": {"bytes": "30kB"}, "device_bytes": "1kB"},
    "the page's": {"disk": {"bytes": "20MB"}, "tiers": {"host": "10kB"}, "device_bytes": "1kB"},
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.services if "redis" in ARRANGEMENTS[name] else ()) for name in ARRANGEMENTS
    ]
)
def make_store(schema, tmp_path, request):
    """`make_store(capacity, seed=0, contents=None)` on the CPU, once for each arrangement of tiers."""
    stores: list[Store] = []
    keys: dict[str, str] = {}

    def make(capacity, seed=0, contents=None):
        options = dict(ARRANGEMENTS[request.param])
        if "redis" in options:
            options["redis"] = {"url": request.getfixturevalue("shared_redis").url, **options["redis"]}
        if "tiers" in options:
            host_tier = request.getfixturevalue("host_tier")
            options["tiers"] = {name: host_tier(size) for name, size in options["tiers"].items()}
        settings = ReplaySettings.model_validate({"capacity": capacity, **options})
        file = contents.state.file if contents is not None else None
        mine = keys[file.id] if file is not None and file.id in keys else f"store-{len(stores)}:rank-0"
        # One folder for all: files of the disk tier never get in each other's way.
        cpu, folder = torch.device("cpu"), tmp_path / "replay"
        stores.append(build_store(settings, schema, cpu, seed, folder, contents, keys=mine))
        if (primary := stores[-1].tiers.file) is not None:
            keys[primary.id] = mine
        return stores[-1]

    yield make
    for store in stores:
        store.close()
