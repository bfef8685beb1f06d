"""The memory tier as a cache: what it finds, what makes way, and what it never mixes up."""

import numpy as np
import pytest
import torch

from anabranch.replay.tiers.clock_cache import Budget, ClockCache
from anabranch.replay.tiers.memory import MemoryTier

ROW = 8
CPU = torch.device("cpu")


class Model:
    """A cache whose rows hold the number of their event, and a plain account of which slot has which event."""

    def __init__(self, slots, positions, *, promote):
        self.memory = MemoryTier(ROW, positions, CPU)
        self.cache = ClockCache(self.memory, slots, Budget(10**12) if promote else None)
        self.events = np.zeros(slots, np.int64)
        self.next = 1

    def put(self, slots):
        self.events[slots] = np.arange(self.next, self.next + len(slots))
        self.next += len(slots)
        self.keep(slots)

    def keep(self, slots):
        rows = torch.from_numpy(self.events[slots].view(np.uint8).reshape(len(slots), ROW))
        self.cache.keep(slots, lambda n: rows[:n])

    def found(self, slots):
        """Return which slots are there; what is there is what was put."""
        positions = self.cache.find(slots)
        there = positions >= 0
        rows = self.memory.copy(positions[there]).rows().view(torch.int64).reshape(-1).numpy()
        assert rows.tolist() == self.events[slots[there]].tolist()
        return there


@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("positions", [0, 1, 7, 50])
def test_a_row_that_is_found_is_the_row_of_its_slot(positions, promote):
    model, rng = Model(60, positions, promote=promote), np.random.default_rng(0)
    held = np.zeros(60, np.bool_)
    for _ in range(500):
        some = rng.choice(60, rng.integers(1, 20), replace=False)
        new, old = some[~held[some]], some[held[some]]
        if rng.random() < 0.3:
            model.cache.free(old)
            held[old] = False
        else:
            model.put(new)
            held[new] = True
            missing = old[~model.found(old)]
            model.keep(missing)
        assert len(model.cache) <= positions
        there = model.found(np.flatnonzero(held))
        assert there.sum() == len(model.cache)
        assert not model.found(np.flatnonzero(~held)).any()
    if positions == 50 and promote:
        assert model.cache.demoted > 0


def test_without_promotion_what_is_there_stays():
    model = Model(20, 5, promote=False)
    model.put(np.arange(20))
    assert np.flatnonzero(model.found(np.arange(20))).tolist() == [0, 1, 2, 3, 4]
    model.keep(np.arange(10, 15))
    assert np.flatnonzero(model.found(np.arange(20))).tolist() == [0, 1, 2, 3, 4]
    assert model.cache.demoted == 0


def test_rows_that_are_sampled_often_end_up_in_memory():
    model, rng = Model(1000, 100, promote=True), np.random.default_rng(0)
    model.put(np.arange(1000))
    often = rng.choice(1000, 60, replace=False)
    for _ in range(200):
        slots = np.unique(np.concatenate([rng.choice(often, 20), rng.choice(1000, 5)]))
        model.keep(slots[~model.found(slots)])
    assert model.found(often).mean() > 0.9


@pytest.mark.parametrize("promote", [False, True])
def test_a_row_on_its_way_is_found_once_it_came_and_only_if_its_event_is_the_same_and_not_there_yet(promote):
    model = Model(40, 8, promote=promote)
    cache, slots = model.cache, np.arange(8, 16)
    model.put(np.arange(8))
    if not promote:
        assert len(cache.reserve(8)) == 0
        cache.free(np.arange(8))
    generation, first, second = cache.generation(slots), cache.reserve(4), cache.reserve(8)
    assert sorted([*first, *second]) == list(range(8)), "no position is reserved twice"
    assert len(cache.reserve(8)) == 0
    model.put(slots[2:])
    assert not model.found(np.arange(40)).any(), "what is reserved is nobody's"
    cache.free(slots[[1]])
    events = torch.from_numpy(model.events[slots[:4]].view(np.uint8).reshape(4, ROW))
    model.memory.put(first, events)
    came = np.array([True, True, True, False])
    assert cache.fill(slots[:4], generation[:4], first, came).tolist() == [True, False, True, False]
    cache.erase(np.arange(0))
    assert not model.memory.copy(first[[1]]).rows().any(), "what has left may be erased"
    model.memory.put(second, events)
    assert cache.fill(slots[:4], cache.generation(slots[:4]), second, ~came).tolist() == [False, False, False, True]
    assert np.flatnonzero(model.found(np.arange(40))).tolist() == slots[[0, 2, 3]].tolist()
    assert len(cache) == 3


def test_a_budget_is_spent_once_and_comes_back(monkeypatch):
    now = 100.0
    monkeypatch.setattr("anabranch.replay.tiers.clock_cache.time.monotonic", lambda: now)
    budget = Budget(1000)
    assert budget.take(7, 100) == 7
    assert budget.take(7, 100) == 3
    assert budget.take(7, 100) == 0
    now += 0.2
    assert budget.take(7, 100) == 2
    now += 60
    assert budget.take(50, 100) == 10


def test_six_bytes_are_kept_for_each_slot():
    cache = ClockCache(MemoryTier(ROW, 0, CPU), 1000)
    assert sum(each.nbytes for each in vars(cache).values() if isinstance(each, np.ndarray)) == 6 * 1000
