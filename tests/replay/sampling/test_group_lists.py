"""Lists of slots by group, against plain lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.replay.sampling.balanced import GroupLists


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
