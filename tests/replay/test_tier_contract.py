"""What every tier promises, whatever it is made of: also the one that docs/extend/tier.md shows."""

import importlib

import numpy as np
import pytest
import torch

from anabranch.replay.tiers.disk import DiskTier
from anabranch.replay.tiers.memory import MemoryTier
from anabranch.replay.tiers.redis_tier import RedisTier
from anabranch.replay.tiers.tier import Tier
from anabranch.testing.checks import NotPromisedError, name_of
from anabranch.testing.tiers import (
    CHECKS,
    ROW_BYTES,
    SLOTS,
    has_its_rows_when_it_is_opened_again,
    names,
    rows,
    some,
)

REDIS = pytest.param("redis", marks=pytest.mark.services)


def opened(kind, path, request):
    """`open(row_bytes, slots)`: a tier; the second call opens the same tier again."""
    tiers: list[Tier] = []

    def make(row_bytes, slots):
        if kind in ("device", "device on the host"):
            tiers.append(MemoryTier(row_bytes, slots, torch.device("cpu"), on_host=kind != "device"))
        elif kind == "host":
            module = importlib.import_module(request.getfixturevalue("followed")("tier"))
            tiers.append(module.HostTier(row_bytes, slots))
        elif kind == "disk":
            file = path / f"{row_bytes}.rows"
            tiers.append(DiskTier.open(file) if file.exists() else DiskTier.create(file, row_bytes, slots))
        else:
            from anabranch.replay.tiers.redis_server import RedisServer  # whose client a GPU machine may lack

            server = RedisServer(request.getfixturevalue("shared_redis").url, "anabranch:test:rank-0:")
            server.open(needed=True)
            tiers.append(RedisTier(server, f"g{row_bytes}", row_bytes, slots))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture(params=["device", "device on the host", "host", "disk", REDIS])
def open_tier(request, tmp_path):
    yield from opened(request.param, tmp_path, request)


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_a_tier_keeps_what_all_promise(open_tier, check, request):
    try:
        check(open_tier)
    except NotPromisedError:
        kind = request.node.callspec.params["open_tier"]
        assert kind.startswith("device") or (kind, check) == ("host", has_its_rows_when_it_is_opened_again)


@pytest.mark.parametrize("row_bytes", [8, 1016, 1024, 3160, 3200])
def test_memory_gives_back_rows_of_any_length(row_bytes):
    tier = MemoryTier(row_bytes, 40, torch.device("cpu"))
    slots = np.random.default_rng(0).permutation(40)[:30]
    written = np.random.default_rng(1).integers(0, 256, (30, row_bytes), np.uint8)
    tier.write(slots, names(30), written)
    asked = np.array([29, 0, 3, 3])
    for found in (
        tier.copy(slots[asked]).rows(),
        tier.read(slots[asked], names(4))[0],
        tier.stage(slots[asked]).rows(),
    ):
        assert np.array_equal(np.asarray(found), written[asked])
    staged = tier.stage(slots[:2])
    staged.materialize()
    tier.erase(slots[:2])
    assert np.array_equal(np.asarray(staged.rows(1)), written[:1]), "what was settled keeps its rows"
    staged.clear()
    assert not np.asarray(staged.rows()).any()


@pytest.mark.gpu
@pytest.mark.parametrize("on_host", [False, True])
def test_memory_copies_rows_to_the_gpu_from_any_device(on_host):
    gpu = torch.device("cuda")
    tier = MemoryTier(ROW_BYTES, SLOTS, gpu, on_host=on_host)
    slots, identity, written = some(700), names(700), rows(700)
    before = torch.cuda.memory_allocated()
    tier.write(slots[:300], identity[:300], written[:300])
    tier.put(slots[300:], torch.from_numpy(written[300:]).to(gpu))
    assert tier._words.is_pinned() == on_host
    gathered = tier.copy(slots[::-1].copy()).rows()
    assert gathered.is_cuda
    assert np.array_equal(gathered.cpu().numpy(), written[::-1])
    read, _ = tier.read(slots, identity)
    assert read.is_cpu
    assert np.array_equal(read.numpy(), written)
    tier.erase(slots)
    assert not tier.copy(slots).rows().any()
    del gathered, read
    assert torch.cuda.memory_allocated() <= before
    tier.close()


def test_the_memory_tier_has_zeros_in_erased_slots():
    tier = MemoryTier(ROW_BYTES, 10, torch.device("cpu"))
    tier.write(np.arange(10), names(10), rows(10))
    tier.erase(np.array([3, 7]))
    read, _ = tier.read(np.arange(10), names(10))
    assert read.any(dim=1).tolist() == [index not in (3, 7) for index in range(10)]
