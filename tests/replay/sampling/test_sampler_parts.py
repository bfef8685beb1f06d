"""What samplers consist of, against plain lists: a tree of sums, positions, groups, and the numbers of a step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.replay.sample_plan import StepRng
from anabranch.replay.sampling.balanced import GroupLists
from anabranch.replay.sampling.weighted import StablePositions, SumTree

sizes = st.sampled_from([1, 2, 63, 64, 65, 300, 64 * 64, 64 * 64 + 1, 5000])


@settings(max_examples=60)
@given(sizes, st.integers(0, 2**32), st.integers(1, 6))
def test_a_point_falls_on_the_leaf_that_a_scan_finds(leaves, seed, turns):
    """With whole weights, so that sums are exact however they are made; a leaf of weight 0 is never found."""
    rng, tree, plain = np.random.default_rng(seed), SumTree(leaves), np.zeros(leaves)
    for _ in range(turns):
        some = np.unique(rng.integers(0, leaves, rng.integers(1, 50)))
        plain[some] = rng.integers(0, 4, len(some))
        tree.set(some, plain[some])
        assert tree.total == plain.sum()
        assert (tree[np.arange(leaves)] == plain).all()
        if not tree.total:
            continue
        mass = rng.integers(0, int(tree.total), 40).astype(np.float64)
        found = tree.find(mass)
        assert (found == np.searchsorted(np.cumsum(plain), mass, side="right")).all()
        assert (plain[found] > 0).all()


@settings(max_examples=40)
@given(sizes, st.integers(0, 2**32))
def test_sums_depend_on_the_weights_alone(leaves, seed):
    """Bit for bit: one by one, in another order, by way of other weights, all at once."""
    rng = np.random.default_rng(seed)
    weights = rng.exponential(size=leaves) * 10.0 ** rng.integers(-200, 200, leaves)
    at_once, piecemeal = SumTree(leaves), SumTree(leaves)
    at_once.set(np.arange(leaves), weights)
    piecemeal.set(np.arange(leaves), 3.0)
    for some in np.array_split(rng.permutation(leaves), min(leaves, 30)):
        piecemeal.set(some, weights[some])
    assert piecemeal.total == at_once.total
    mass = rng.random(50) * at_once.total
    assert (piecemeal.find(mass) == at_once.find(mass)).all()


@pytest.mark.parametrize("leaves", [1, 64, 70, 5000])
def test_the_very_end_falls_on_the_last_leaf_with_a_weight(leaves):
    """Rounding may make a point as large as the total."""
    tree = SumTree(leaves)
    tree.set(np.arange(leaves), 0.1)
    tree.set(np.array([leaves - 1]), 0.0 if leaves > 1 else 0.1)
    assert tree.find(np.array([tree.total]))[0] == max(0, leaves - 2)
    assert tree.find(np.array([0.0]))[0] == 0


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_positions_depend_on_added_and_removed_events_and_not_on_slots(seed, turns):
    """The lowest free ones are taken, also after a restart in which events are in other slots."""
    rng = np.random.default_rng(seed)
    positions, slots, position_of = StablePositions(100, 60), {}, {}
    for turn in range(turns):
        n = int(rng.integers(0, 60 - len(position_of) + 1))
        new = rng.permutation(sorted(set(range(100)) - set(slots.values())))[:n].astype(np.int32)
        names = [(turn, each) for each in range(n)]
        lowest = sorted(set(range(60)) - set(position_of.values()))[:n]
        assert positions.take(new).tolist() == lowest
        slots |= zip(names, new.tolist(), strict=True)
        position_of |= zip(names, lowest, strict=True)
        gone = [name for name in slots if rng.random() < 0.3]
        left = positions.release(np.array([slots.pop(name) for name in gone], np.int32))
        assert left.tolist() == [position_of.pop(name) for name in gone]
        if rng.random() < 0.3:
            slots = dict(zip(slots, rng.permutation(100)[: len(slots)].tolist(), strict=True))
            positions = StablePositions(100, 60)
            positions.take(np.array(list(slots.values()), np.int32))
            positions.restore(np.array(list(slots.values()), np.int32), np.array(list(position_of.values()), np.int32))
        held = np.array([slots[name] for name in slots], np.int32)
        assert positions.of(held).tolist() == [position_of[name] for name in slots]
        assert positions.slots(positions.of(held).astype(np.int64)).tolist() == held.tolist()


@given(st.integers(0, 2**32), st.integers(1, 10), st.integers(1, 8))
def test_a_choice_is_as_even_as_the_groups_allow(seed, turns, groups):
    """While events come and go, groups grow beyond their first room and become empty."""
    dice, lists, plain, free = np.random.default_rng(seed), GroupLists(), {}, list(range(3000))
    dice.shuffle(free)
    for _ in range(turns):
        slots = np.array([free.pop() for _ in range(dice.integers(0, 200))], np.int32)
        where = dice.integers(0, dice.integers(1, groups + 1), len(slots))
        lists.add(where, slots)
        plain |= zip(slots.tolist(), where.tolist(), strict=True)
        gone = [slot for slot in plain if dice.random() < 0.4]
        lists.discard(np.array(gone, np.int32))
        for slot in gone:
            free.append(slot)
            del plain[slot]
        sizes = np.bincount(list(plain.values()), minlength=len(lists.sizes)).astype(int)
        assert lists.sizes.tolist() == sizes.tolist()
        n = int(dice.integers(0, len(plain) + 1))
        chosen = lists.sample(n, dice).tolist()
        assert len(chosen) == len(set(chosen)) == n
        assert set(chosen) <= set(plain)
        counts = np.bincount([plain[slot] for slot in chosen], minlength=len(sizes))
        short = counts < sizes
        assert not short.any() or counts.max() <= counts[short].min() + 1


def test_within_a_large_group_all_come_alike():
    """By trial, where few of many are chosen: chi-square, 199 degrees of freedom, 280 once in 7,000 fair trials."""
    lists, dice, counts = GroupLists(), np.random.default_rng(0), np.zeros(200)
    lists.add(np.zeros(200, np.int64), np.arange(200, dtype=np.int32))
    for _ in range(3000):
        counts += np.bincount(lists.sample(10, dice), minlength=200)
    assert ((counts - 150) ** 2 / 150).sum() < 280


def test_what_was_never_added_may_be_discarded():
    lists = GroupLists()
    lists.discard(np.array([3], np.int32))
    lists.add(np.array([2]), np.array([5], np.int32))
    lists.discard(np.array([3, 9], np.int32))
    assert lists.sizes.tolist() == [0, 0, 1]


def numbers(seed, step):
    return StepRng(seed).for_step(step).integers(0, 2**62, 8).tolist()


def test_numbers_are_a_function_of_seed_and_step():
    chance = StepRng(7)
    for step in (3, 0, 3, 10**12):
        assert chance.for_step(step).integers(0, 2**62, 8).tolist() == numbers(7, step)


def test_another_seed_or_step_has_other_numbers():
    seeds = (0, 1, 2, -1, 2**63, 12345)
    assert len({tuple(numbers(seed, step)) for seed in seeds for step in range(5)}) == len(seeds) * 5


def test_numbers_of_neighbouring_seeds_and_steps_have_nothing_to_do_with_each_other():
    samples = np.array([StepRng(seed).for_step(step).random(200) for seed in range(4) for step in range(4)])
    correlation = np.corrcoef(samples) - np.eye(len(samples))
    assert np.abs(correlation).max() < 5 / np.sqrt(200)
