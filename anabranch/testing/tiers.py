"""What every slower tier promises. The subject of a check is a function that opens one: `open(row_bytes, slots)`.

A second call with the same sizes opens the same tier again, where that is a primary tier. Who opens tiers closes them.
The subject of a check of a factory is its section of `[replay.tiers]`.
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.replay.settings import TIER, ReplaySettings
from anabranch.replay.tiers.disk import DiskTierFactory
from anabranch.replay.tiers.registry import kinds_of
from anabranch.replay.tiers.tier import SlowTier, Tier, TierContext, TierFactory
from anabranch.testing.checks import Check, NotPromisedError, expect
from anabranch.testing.policies import fill, stores
from anabranch.testing.stores import FakeCheckpoints, sample_of

ROW_BYTES = 40
SLOTS = 3000
Open = Callable[[int, int], Tier]
TierSection = Mapping[str, Any]


def rows(n: int, row_bytes: int = ROW_BYTES, seed: int = 0) -> NDArray[np.uint8]:
    """Return n random rows."""
    return np.random.default_rng(seed).integers(0, 256, (n, row_bytes), np.uint8)


def names(n: int, seed: int = 0) -> NDArray[np.uint64]:
    """Return the identities of n events."""
    return np.random.default_rng((7, seed)).integers(0, 2**64, n, np.uint64)


def some(n: int, seed: int = 0) -> NDArray[np.int64]:
    """Return n different slots."""
    return np.random.default_rng(seed).choice(SLOTS, n, replace=False)


def _slow(open_tier: Open) -> SlowTier:
    tier = open_tier(ROW_BYTES, SLOTS)
    if not isinstance(tier, SlowTier):
        raise NotPromisedError("it is the memory tier, whose slots are valid where the store says so")
    return tier


def returns_rows_as_they_were_written(open_tier: Open) -> None:
    """In the order of the slots that are asked for."""
    tier = open_tier(ROW_BYTES, SLOTS)
    for n in (1, 2, 255, 2500):
        slots, identity, written = some(n), names(n), rows(n)
        tier.write(slots, identity, written)
        order = np.random.default_rng(1).permutation(n)
        read, valid = tier.read(slots[order], identity[order])
        expect(valid.all(), f"{int((~valid).sum())} of {n} rows that were written are not valid")
        expect(read.dtype == torch.uint8, f"rows are {read.dtype}, not torch.uint8")
        expect(np.array_equal(read.numpy(), written[order]), f"{n} rows are not those that were written")


def returns_long_rows(open_tier: Open) -> None:
    """Rows longer than one command of a server may carry."""
    tier = open_tier(120_000, 40)
    slots, identity, written = np.arange(40)[::2], names(20), rows(20, 120_000)
    tier.write(slots, identity, written)
    read, valid = tier.read(slots, identity)
    alike = valid.all() and np.array_equal(read.numpy(), written)
    expect(alike, "rows of 120,000 bytes are not those that were written")


def does_nothing_for_no_rows(open_tier: Open) -> None:
    """Calls may have no rows."""
    tier = open_tier(ROW_BYTES, SLOTS)
    tier.write(some(0), names(0), rows(0))
    read, valid = tier.read(some(0), names(0))
    expect(read.shape == (0, ROW_BYTES) and valid.shape == (0,), f"a read of no rows has {tuple(read.shape)}")


def holds_what_was_written_last(open_tier: Open) -> None:
    """A slot is written again."""
    tier = open_tier(ROW_BYTES, SLOTS)
    slots = some(50)
    for seed in range(3):
        tier.write(slots, names(50, seed), rows(50, seed=seed))
    tier.write(slots[:10], names(10, 9), rows(10, seed=9))
    read, valid = tier.read(slots, np.concatenate([names(10, 9), names(50, 2)[10:]]))
    last = np.concatenate([rows(10, seed=9), rows(50, seed=2)[10:]])
    expect(valid.all() and np.array_equal(read.numpy(), last), "a slot has another row than the last that was written")


def says_its_size(open_tier: Open) -> None:
    """`slots` and `slot_bytes`."""
    tier = open_tier(ROW_BYTES, SLOTS)
    expect(tier.slots == SLOTS, f"slots is {tier.slots}, and it was opened with {SLOTS}")
    fits = ROW_BYTES <= tier.slot_bytes <= ROW_BYTES + 256
    expect(fits, f"slot_bytes is {tier.slot_bytes}, and a row has {ROW_BYTES}")


def distinguishes_rows_of_other_events(open_tier: Open) -> None:
    """A slot may have the row of another event, or none."""
    tier = _slow(open_tier)
    slots, identity = np.arange(60), names(60)
    tier.write(slots[:40], identity[:40], rows(40))
    tier.write(slots[:10], names(10, 5), rows(10, seed=5))
    _, valid = tier.read(slots, identity)
    expected = [False] * 10 + [True] * 30 + [False] * 20
    expect(valid.tolist() == expected, "rows of other events, or never written, are valid, or others are not")


def reads_into_its_positions_and_no_others(open_tier: Open) -> None:
    """`read_into` fills some rows of an array."""
    tier = _slow(open_tier)
    slots, identity, written = some(30), names(30), rows(30)
    tier.write(slots, identity, written)
    into = torch.full((100, ROW_BYTES), 7, dtype=torch.uint8)
    positions = np.random.default_rng(3).choice(100, 30, replace=False)
    expect(tier.read_into(into, positions, slots, identity).all(), "rows that were written are not valid")
    expect(np.array_equal(into.numpy()[positions], written), "rows are not in their positions")
    expect((np.delete(into.numpy(), positions, axis=0) == 7).all(), "it wrote to other positions")


def has_no_row_of_an_erased_event(open_tier: Open) -> None:
    """Erased slots are not valid, others are, and an erased one is written again; some were never written."""
    tier = _slow(open_tier)
    slots, identity, written = some(50), names(50), rows(50)
    tier.write(slots, identity, written)
    tier.erase(np.concatenate([slots[:20], slots[:5], np.setdiff1d(np.arange(SLOTS), slots)[:10]]))
    read, valid = tier.read(slots, identity)
    expect(valid.tolist() == [False] * 20 + [True] * 30, "erased rows are valid, or others are not")
    expect(np.array_equal(read.numpy()[20:], written[20:]), "rows that were not erased have changed")
    tier.write(slots[:1], identity[:1], written[:1])
    expect(tier.read(slots[:1], identity[:1])[1].all(), "a slot that was erased and written again is not valid")


def has_its_rows_when_it_is_opened_again(open_tier: Open) -> None:
    """Only for a primary tier, which has a `file`."""
    tier = _slow(open_tier)
    if tier.file is None:
        raise NotPromisedError("it is a cache, whose rows end with the process")
    slots, identity, written = some(700), names(700), rows(700)
    tier.write(slots, identity, written)
    tier.sync()
    again = _slow(open_tier)
    expect(again.file == tier.file, f"it is {again.file} when it is opened again, and was {tier.file}")
    read, valid = again.read(slots, identity)
    expect(valid.all() and np.array_equal(read.numpy(), written), "rows are gone when it is opened again")


CHECKS: Sequence[Check] = (
    says_its_size,
    returns_rows_as_they_were_written,
    returns_long_rows,
    does_nothing_for_no_rows,
    holds_what_was_written_last,
    distinguishes_rows_of_other_events,
    reads_into_its_positions_and_no_others,
    has_no_row_of_an_erased_event,
    has_its_rows_when_it_is_opened_again,
)


def _has_own(section: TierSection, method: str) -> bool:
    """Return whether a factory has a method that it could inherit."""
    return getattr(TIER.find(section["factory"]), method) is not getattr(TierFactory, method)


def a_store_with_it_as_a_cache_has_the_same_samples(section: TierSection) -> None:
    """Which tier has a row changes no sample, and the cache is read."""
    if not _has_own(section, "cache"):
        raise NotPromisedError("it is no cache (cache)")
    with stores() as opened:
        with_it = opened.open(500, {"tiers": {"checked": section}, "device_bytes": 0})
        alone = opened.open(500, {"device_bytes": 0})
        for store in (with_it, alone):
            fill(store, range(20))
        for step in range(5):
            one, two = (sample_of(store, step, 100).columns for store in (with_it, alone))
            expect(all(torch.equal(one[name], two[name]) for name in two), "a sample has other values than without it")
        expect(with_it.tiers.stats.read["checked"] > 0, "no row was read from it")


def a_store_with_it_as_the_primary_tier_goes_on_from_a_checkpoint(section: TierSection) -> None:
    """The factory `owns` the reference of a checkpoint, and opens its rows again."""
    if not _has_own(section, "open_primary"):
        raise NotPromisedError("it is a cache, whose rows end with the process (open_primary)")
    alone = {"disk": None, "tiers": {"checked": section}, "device_bytes": 0}
    with stores() as opened:
        store = opened.open(500, alone)
        fill(store, range(20))
        contents = FakeCheckpoints(store).checkpoint(1)
        before = sample_of(store, 9, 100)
        opened.close()
        again = opened.open(500, alone, contents)
        after = sample_of(again, 9, 100)
        alike = all(torch.equal(after.columns[name], column) for name, column in before.columns.items())
        expect(alike and again.lost == 0, f"events are others after a restart, and {again.lost} are lost")
        fill(again, range(20, 22))
        expect(len(sample_of(again, 10, 100)) == 100, "events cannot be read that were added after a restart")


def _by_factory(check: Check) -> Check:
    """Return the check of a tier as one of its factory."""

    @functools.wraps(check)
    def checked(section: TierSection) -> None:
        settings = ReplaySettings.model_validate({"tiers": {"checked": section}})
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:

            def open_tier(row_bytes: int, slots: int) -> Tier:
                context = TierContext(Path(folder, str(row_bytes)), "anabranch-testing", row_bytes)
                kind = kinds_of(settings, context)["tiers.checked"]
                kind.connect(opened, needed=True)
                if _has_own(section, "open_primary"):
                    tier = kind.open_primary(slots, None)
                else:
                    primary = DiskTierFactory(None, context).open_primary(slots, None)
                    opened.callback(primary.close)
                    tier = kind.cache(slots, primary)
                opened.callback(tier.close)
                return tier

            check(open_tier)

    return checked


FACTORY_CHECKS: Sequence[Check] = (
    *(_by_factory(check) for check in CHECKS if check is not has_its_rows_when_it_is_opened_again),
    a_store_with_it_as_a_cache_has_the_same_samples,
    a_store_with_it_as_the_primary_tier_goes_on_from_a_checkpoint,
)
