"""What every tier promises, whatever it is made of: also the one that docs/extend/tier.md adds."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from replay.tiers.disk import DiskTier
from replay.tiers.memory import MemoryTier
from replay.tiers.redis_tier import RedisTier
from replay.tiers.tier import SlowTier, Tier

ROW_BYTES = 40
SLOTS = 3000
Open = Callable[..., Tier]
REDIS = pytest.param("redis", marks=pytest.mark.services)


def opened(kind: str, path: Path, request: pytest.FixtureRequest) -> Iterator[Open]:
    """`open(row_bytes=ROW_BYTES, slots=SLOTS)`: a tier; the second call opens the same tier again."""
    tiers: list[Tier] = []

    def make(row_bytes: int = ROW_BYTES, slots: int = SLOTS) -> Tier:
        if kind in ("device", "device on the host"):
            tiers.append(MemoryTier(row_bytes, slots, torch.device("cpu"), on_host=kind != "device"))
        elif kind == "host":
            tiers.append(request.getfixturevalue("added")("replay.host").HostTier(row_bytes, slots))
        elif kind == "disk":
            file = path / f"{row_bytes}.rows"
            tiers.append(DiskTier.open(file) if file.exists() else DiskTier.create(file, row_bytes, slots))
        else:
            from replay.tiers.redis_server import RedisServer  # whose client a GPU machine may lack

            server = RedisServer(request.getfixturevalue("shared_redis").url, "anabranch:test:rank-0:")
            server.open(needed=True)
            tiers.append(RedisTier(server, f"g{row_bytes}", row_bytes, slots))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture(params=["device", "device on the host", "host", "disk", REDIS])
def open_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    yield from opened(request.param, tmp_path, request)


@pytest.fixture(params=["host", "disk", REDIS])
def open_slow(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., SlowTier]]:
    yield from opened(request.param, tmp_path, request)  # type: ignore[misc]


@pytest.fixture(params=["disk", REDIS])
def open_primary(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., SlowTier]]:
    yield from opened(request.param, tmp_path, request)  # type: ignore[misc]


def rows(n: int, row_bytes: int = ROW_BYTES, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (n, row_bytes), np.uint8)


def names(n: int, seed: int = 0) -> NDArray[np.uint64]:
    return np.random.default_rng((7, seed)).integers(0, 2**64, n, np.uint64)


def some(n: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).choice(SLOTS, n, replace=False)


@pytest.mark.parametrize("n", [1, 2, 255, 2500])
def test_rows_come_back_as_they_were_written_in_the_order_asked_for(open_tier: Open, n: int) -> None:
    tier = open_tier()
    slots, identity, written = some(n), names(n), rows(n)
    tier.write(slots, identity, written)
    order = np.random.default_rng(1).permutation(n)
    read, whole = tier.read(slots[order], identity[order])
    assert whole.all()
    assert read.dtype == torch.uint8
    assert np.array_equal(read.numpy(), written[order])


def test_rows_longer_than_one_command_may_carry_come_back(open_tier: Open) -> None:
    tier = open_tier(120_000, 40)
    slots, identity, written = np.arange(40)[::2], names(20), rows(20, 120_000)
    tier.write(slots, identity, written)
    read, whole = tier.read(slots, identity)
    assert whole.all()
    assert np.array_equal(read.numpy(), written)


def test_a_call_of_no_rows_does_nothing(open_tier: Open) -> None:
    tier = open_tier()
    tier.write(some(0), names(0), rows(0))
    read, whole = tier.read(some(0), names(0))
    assert read.shape == (0, ROW_BYTES)
    assert whole.shape == (0,)


def test_what_is_written_last_is_what_a_slot_holds(open_tier: Open) -> None:
    tier = open_tier()
    slots = some(50)
    for seed in range(3):
        tier.write(slots, names(50, seed), rows(50, seed=seed))
    tier.write(slots[:10], names(10, 9), rows(10, seed=9))
    read, whole = tier.read(slots, np.concatenate([names(10, 9), names(50, 2)[10:]]))
    assert whole.all()
    assert np.array_equal(read.numpy(), np.concatenate([rows(10, seed=9), rows(50, seed=2)[10:]]))


def test_a_tier_says_what_it_takes(open_tier: Open) -> None:
    tier = open_tier()
    assert tier.slots == SLOTS
    assert ROW_BYTES <= tier.slot_bytes <= ROW_BYTES + 256


def test_another_events_row_and_one_that_was_never_written_are_not_whole(open_slow: Callable[..., SlowTier]) -> None:
    tier = open_slow()
    slots, identity = np.arange(60), names(60)
    tier.write(slots[:40], identity[:40], rows(40))
    tier.write(slots[:10], names(10, 5), rows(10, seed=5))
    _, whole = tier.read(slots, identity)
    assert whole.tolist() == [False] * 10 + [True] * 30 + [False] * 20


def test_rows_are_read_into_their_positions_and_no_others(open_slow: Callable[..., SlowTier]) -> None:
    tier = open_slow()
    slots, identity, written = some(30), names(30), rows(30)
    tier.write(slots, identity, written)
    into = torch.full((100, ROW_BYTES), 7, dtype=torch.uint8)
    positions = np.random.default_rng(3).choice(100, 30, replace=False)
    assert tier.read_into(into, positions, slots, identity).all()
    assert np.array_equal(into.numpy()[positions], written)
    assert (np.delete(into.numpy(), positions, axis=0) == 7).all()


def test_a_primary_tier_that_is_opened_again_has_its_rows(open_primary: Callable[..., SlowTier]) -> None:
    tier = open_primary()
    slots, identity, written = some(700), names(700), rows(700)
    tier.write(slots, identity, written)
    tier.sync()
    again = open_primary()
    assert again.file == tier.file
    read, whole = again.read(slots, identity)
    assert whole.all()
    assert np.array_equal(read.numpy(), written)


def test_what_is_erased_is_no_events_row_and_the_others_stay(open_slow: Callable[..., SlowTier]) -> None:
    tier = open_slow()
    slots, identity, written = some(50), names(50), rows(50)
    tier.write(slots, identity, written)
    tier.erase(np.concatenate([slots[:20], slots[:5], np.setdiff1d(np.arange(SLOTS), slots)[:10]]))
    read, whole = tier.read(slots, identity)
    assert whole.tolist() == [False] * 20 + [True] * 30
    assert np.array_equal(read.numpy()[20:], written[20:])
    tier.write(slots[:1], identity[:1], written[:1])
    assert tier.read(slots[:1], identity[:1])[1].all()


@pytest.mark.parametrize("row_bytes", [8, 1016, 1024, 3160, 3200])
def test_memory_gives_back_rows_of_any_length(row_bytes: int) -> None:
    tier = MemoryTier(row_bytes, 40, torch.device("cpu"))
    slots = np.random.default_rng(0).permutation(40)[:30]
    written = np.random.default_rng(1).integers(0, 256, (30, row_bytes), np.uint8)
    tier.write(slots, names(30), written)
    asked = np.array([29, 0, 3, 3])
    for found in (tier.gather(slots[asked]), tier.read(slots[asked], names(4))[0], tier.stage(slots[asked]).rows()):
        assert np.array_equal(np.asarray(found), written[asked])
    staged = tier.stage(slots[:2])
    staged.materialize()
    tier.erase(slots[:2])
    assert np.array_equal(np.asarray(staged.rows(1)), written[:1]), "what was settled keeps its rows"
    staged.clear()
    assert not np.asarray(staged.rows()).any()


@pytest.mark.gpu
@pytest.mark.parametrize("on_host", [False, True])
def test_memory_copies_rows_to_the_gpu_from_any_device(on_host: bool) -> None:
    gpu = torch.device("cuda")
    tier = MemoryTier(ROW_BYTES, SLOTS, gpu, on_host=on_host)
    slots, identity, written = some(700), names(700), rows(700)
    before = torch.cuda.memory_allocated()
    tier.write(slots[:300], identity[:300], written[:300])
    tier.put(slots[300:], torch.from_numpy(written[300:]).to(gpu))
    assert tier._words.is_pinned() == on_host
    gathered = tier.gather(slots[::-1].copy())
    assert gathered.is_cuda
    assert np.array_equal(gathered.cpu().numpy(), written[::-1])
    read, _ = tier.read(slots, identity)
    assert read.is_cpu
    assert np.array_equal(read.numpy(), written)
    tier.erase(slots)
    assert not tier.gather(slots).any()
    del gathered, read
    assert torch.cuda.memory_allocated() <= before
    tier.close()


def test_the_memory_tier_has_zeros_in_erased_slots() -> None:
    tier = MemoryTier(ROW_BYTES, 10, torch.device("cpu"))
    tier.write(np.arange(10), names(10), rows(10))
    tier.erase(np.array([3, 7]))
    read, _ = tier.read(np.arange(10), names(10))
    assert read.any(dim=1).tolist() == [index not in (3, 7) for index in range(10)]
