"""Who is kept, against plain definitions: a pure function of the added events, in any order and with any repetition."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import SettingsError
from anabranch.replay.policies import ADMISSIONS, AdmissionContext
from anabranch.replay.reservoir.admission import (
    Admission,
    Candidates,
    ClassBalancedAdmission,
    ClassFloor,
    RecencyAdmission,
    exponentials,
)
from anabranch.replay.reservoir.quotas import Quotas, level

HOUR = timedelta(hours=1)
CLASSES = 4
POLICIES: dict[str, Callable[[], Admission]] = {
    "reservoir": Admission,
    "class-balanced": lambda: ClassBalancedAdmission(CLASSES),
    "recent": lambda: RecencyAdmission(HOUR),
    "floor": lambda: Admission(ClassFloor(CLASSES, 0.5)),
    "whole floor": lambda: Admission(ClassFloor(CLASSES, 1.0)),
    "recent floor": lambda: RecencyAdmission(HOUR, ClassFloor(CLASSES, 0.25)),
}
FLOORS = {"floor": 0.5, "whole floor": 1.0, "recent floor": 0.25}
each_policy = pytest.mark.parametrize("policy", POLICIES)


@dataclass(frozen=True)
class Event:
    """What a policy may know."""

    name: int
    identity: int
    label: int
    weight: float
    hours: int


def an_event(name):
    """An event's properties follow from its name; classes and weights are uneven."""
    dice = np.random.default_rng(name)
    identity, label = int(dice.integers(2**64, dtype=np.uint64)), int(dice.choice([-1, 0, 0, 0, 0, 1, 1, 2, 3]))
    return Event(name, identity, label, float(dice.choice([0.0, 0.5, 1.0, 1.0, 1.0, 4.0])), name // 50)


EVENTS = [an_event(name) for name in range(600)]


def priority(policy, event):
    """The definition, in plain numbers."""
    if not event.weight:
        return math.inf
    exponential = -math.log((event.identity + 0.5) / 2**64) / event.weight
    return exponential if not policy.startswith("recent") else math.log(exponential) - math.log(2) * event.hours


def kept(policy, added, k):
    """Of each group the q smallest, q being the largest number with which no more than k are kept.

    With a floor, the smallest of each class up to it, and then the smallest of all others.
    """
    ordered = sorted((each for each in added if each.weight), key=lambda each: priority(policy, each))
    if policy in FLOORS:
        least = int(FLOORS[policy] * k / CLASSES)
        first = {each for label in range(CLASSES) for each in [e for e in ordered if e.label == label][:least]}
        return first | set([each for each in ordered if each not in first][: k - len(first)])
    groups: dict[int, list[Event]] = {}
    for event in ordered:
        groups.setdefault(event.label if policy == "class-balanced" else 0, []).append(event)
    sizes = [len(members) for members in groups.values()]
    most = max(q for q in range(k + 1) if sum(min(size, q) for size in sizes) <= k) if sum(sizes) > k else k
    return {event for members in groups.values() for event in members[:most]}


class Kept:
    """What is held, with nothing around it that a store has."""

    def __init__(self, policy, k):
        self.policy = POLICIES[policy]()
        self.quotas = Quotas(k, self.policy.groups, self.policy.floors(k))
        self.names = np.empty(0, np.int64)
        self.priorities = np.empty(0, np.float64)
        self.groups = np.empty(0, np.int16)

    def add(self, events):
        candidates = Candidates(
            np.array([event.identity for event in events], np.uint64),
            np.array([event.weight for event in events], np.float32),
            np.array([event.hours * 3600 for event in events], np.uint32),
        )
        priorities = self.policy.priorities(candidates)
        groups = self.policy.group(np.array([event.label for event in events]), np.zeros(len(events), np.int16))
        admitted = self.quotas.admits(priorities, groups)
        for index in np.flatnonzero(admitted).tolist():
            if events[index].name not in self.names:
                self.names = np.append(self.names, events[index].name)
                self.priorities = np.append(self.priorities, priorities[index])
                self.groups = np.append(self.groups, groups[index])
        if len(self.names) > self.quotas.limit:
            self._keep(self.quotas.lower(self.priorities, self.groups))

    def _keep(self, stays):
        self.names, self.priorities, self.groups = self.names[stays], self.priorities[stays], self.groups[stays]

    def is_below(self, policy, event):
        """Whether an event is smaller than its group's threshold; the one that made it is not."""
        group = self.policy.group(np.array([event.label]), np.zeros(1, np.int16))[0]
        mine, threshold = priority(policy, event), float(self.quotas.thresholds[group])
        return mine < threshold and not math.isclose(mine, threshold, rel_tol=1e-12)

    @property
    def events(self):
        return {EVENTS[name] for name in self.names.tolist()}


batches = st.lists(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=60), min_size=1, max_size=20)


@each_policy
@settings(max_examples=60)
@given(batches, st.integers(CLASSES + 1, 80))
def test_those_of_the_definition_are_held_after_every_addition(policy, additions, k):
    """In any order, with any repetition; the other events are below the thresholds, all of which have fallen."""
    store, added = Kept(policy, k), set[Event]()
    for addition in additions:
        before = store.quotas.thresholds.copy()
        store.add(addition)
        added |= set(addition)
        assert (store.quotas.thresholds <= before).all(), "a threshold rose"
        assert kept(policy, added, k) <= store.events <= added
        assert len(store.names) <= store.quotas.limit
        assert store.events == {event for event in added if store.is_below(policy, event)}


@pytest.mark.slow
@each_policy
@settings(max_examples=60)
@given(st.permutations(EVENTS), st.integers(1, 5), st.integers(CLASSES + 1, 80))
def test_what_parts_of_the_stream_keep_makes_what_the_whole_keeps(policy, stream, parts, k):
    """Whoever is among the kept of the whole is among the kept of the part that met it; so two ranks merge.

    With groups the union may have room for more than the whole, which leaves a part of k that cannot be shared.
    """
    union = set[Event]()
    for part in range(parts):
        store = Kept(policy, k)
        mine = stream[part::parts]
        for begin in range(0, len(mine), 40):
            store.add(mine[begin : begin + 40])
        union |= store.events
    assert kept(policy, set(stream), k) <= kept(policy, union, k)
    assert len(kept(policy, union, k)) == k or policy == "class-balanced"


def test_classes_share_the_room_evenly_and_small_ones_have_all_that_they_are():
    store = Kept("class-balanced", 100)
    store.add(EVENTS)
    counts = dict.fromkeys(range(-1, CLASSES), 0)
    for event in store.events:
        counts[event.label] += 1
    added = {label: sum(event.label == label and event.weight > 0 for event in EVENTS) for label in counts}
    most = max(counts.values())
    assert all(counts[label] in (most, added[label]) for label in counts)
    assert 95 < sum(counts.values()) <= 100


def test_recent_keeps_half_as_many_for_each_half_life_that_they_are_older():
    """20 seeds of 4,000 events an hour: the exact expectation is 1 - exp(-weight * rate) of each."""
    hours, counts = 12, np.zeros(12)
    for seed in range(20):
        identity = np.random.default_rng(seed).integers(2**64, size=4000 * hours, dtype=np.uint64)
        time_s = np.repeat(np.arange(hours, dtype=np.uint32) * 3600, 4000)
        policy, quotas = RecencyAdmission(HOUR), Quotas(400)
        weights = np.ones(len(identity), np.float32)
        stays = quotas.lower(
            policy.priorities(Candidates(identity, weights, time_s)), np.zeros(len(identity), np.int16)
        )
        assert stays.sum() == 400
        counts += np.bincount(time_s[stays] // 3600, minlength=hours)
    expected = 2.0 ** np.arange(hours)
    expected *= counts.sum() / expected.sum()
    newest = slice(hours - 5, None)  # there are too few older ones to measure
    assert (abs(counts[newest] / expected[newest] - 1) < [0.2, 0.14, 0.1, 0.08, 0.06]).all()


@pytest.mark.parametrize("policy", ["reservoir", "recent"])
def test_rates_give_the_probability_with_which_an_event_is_held(policy):
    """1 - exp(-weight * rate), over 20,000 identities for each weight; the error is that of a mean of so many."""
    context = POLICIES[policy]()
    threshold = {"reservoir": 0.7, "recent": -3.0}[policy]
    for weight in (0.3, 1.0, 2.5):
        identity = np.random.default_rng(int(weight * 10)).integers(2**64, size=20_000, dtype=np.uint64)
        time_s = np.full(len(identity), 4 * 3600, np.uint32)
        found = context.priorities(Candidates(identity, np.full(len(identity), weight, np.float32), time_s)) < threshold
        rate, _ = context.rates(np.array([threshold]), time_s[:1], np.ones(1), 1.0)
        assert abs(found.mean() - (1 - math.exp(-weight * float(rate[0])))) < 0.015


def test_priorities_are_the_definition():
    """To the last bits, also where u is almost 1, which gives the smallest."""
    identity = np.array([0, 1, 2**63, 2**64 - 1, 2**64 - 2**20], np.uint64)
    found = exponentials(identity)
    for value, name in zip(found.tolist(), identity.tolist(), strict=True):
        u = (name + 0.5) / 2**64
        exact = -math.log(u) if u < 0.5 else -math.log1p(-(2**64 - name - 0.5) / 2**64)
        assert value == pytest.approx(exact, rel=1e-9) or (value > 36 and exact > 36)
    assert (found > 0).all()
    assert np.isfinite(found).all()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 200))
def test_the_level_is_the_largest_number_that_fits(counts, k):
    if sum(counts) > k:
        plain = max(q for q in range(k + 1) if sum(min(count, q) for count in counts) <= k)
        assert level(np.array(counts), k) == plain


def shaped(kind, size, dice):
    """Priorities whose order or distribution may make a sample of them misleading."""
    values = dice.exponential(size=size)
    if kind in ("rising", "falling"):
        return np.sort(values)[:: 1 if kind == "rising" else -1].copy()
    if kind == "few values":
        return np.floor(values)
    if kind == "waves":
        return np.where(np.arange(size) % 8 == 0, values + 100, values)
    return values


@settings(max_examples=120)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["exponential", "rising", "falling", "few values", "waves"]),
    st.sampled_from(["one", "alike", "uneven", "in turn", "one after the other", "many"]),
    st.data(),
)
def test_the_smallest_of_each_group_stay_below_its_threshold(seed, kind, grouped, data):
    """Whatever a sample of the priorities says, and on both sides of the size from which on there is one."""
    size = data.draw(st.one_of(st.integers(1, 300), st.integers(32_700, 70_000)))
    k = data.draw(st.one_of(st.integers(0, size - 1), st.integers(size - 1 - size // 33, size - 1)))
    dice = np.random.default_rng(seed)
    held, groups = shaped(kind, size, dice), {"one": 1, "many": 2000}.get(grouped, 8)
    group = {
        "uneven": np.minimum(dice.geometric(0.5, size) - 1, 7),
        "in turn": np.arange(size) % groups,
        "one after the other": np.arange(size) * groups // size,
    }.get(grouped, dice.integers(0, groups, size))
    quotas = Quotas(k, groups)
    counts = np.bincount(group, minlength=groups)
    stays = quotas.lower(held, group.astype(np.int16), data.draw(st.sampled_from([counts, None])))
    most = level(counts, k)
    thresholds = [np.sort(held[group == each])[most] if counts[each] > most else math.inf for each in range(groups)]
    assert quotas.thresholds.tolist() == thresholds
    assert np.array_equal(stays, held < np.array(thresholds)[group])


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["exponential", "rising", "falling", "waves"]),
    st.integers(1, 300),
    st.floats(0, 1),
    st.data(),
)
def test_groups_have_as_many_as_their_floors_and_the_rest_is_the_smallest(seed, kind, size, share, data):
    """Also where thresholds have fallen before, and some groups are empty."""
    dice, k, groups = np.random.default_rng(seed), data.draw(st.integers(0, size)), 6
    held, group = shaped(kind, size, dice), np.minimum(dice.geometric(0.5, size) - 1, groups - 1).astype(np.int16)
    floors = np.full(groups, int(share * k / groups))
    quotas = Quotas(k, groups, floors)
    stays = quotas.lower(held, group)
    order = np.argsort(held)
    first = np.concatenate([order[group[order] == each][: floors[each]] for each in range(groups)])
    rest = order[~np.isin(order, first)][: k - len(first)]
    assert set(np.flatnonzero(stays)) == {*first, *rest}
    assert np.array_equal(quotas.admits(held, group), stays)
    again = Quotas(k, groups, floors)
    again.thresholds[:] = quotas.thresholds
    erased = stays & (dice.random(size) < 0.8)
    assert again.lower(held[erased], group[erased]).all(), "nothing is evicted where events are missing"
    assert again.thresholds.tolist() == quotas.thresholds.tolist()


@pytest.mark.parametrize(
    ("policy", "context", "message"),
    [
        ("reservoir", AdmissionContext(None, HOUR, None, 0.25), "class_floor = 0.25 needs schema.label.classes"),
        ("distinct", AdmissionContext(40_000, HOUR, 8, 0.25), "fewer than 32767"),
        ("class-balanced", AdmissionContext(None, HOUR, None), "needs schema.label.classes"),
        ("class-balanced", AdmissionContext(40_000, HOUR, None), "fewer than 32767"),
        ("distinct", AdmissionContext(4, HOUR, None), "needs model.embedding"),
        ("diverse", AdmissionContext(4, HOUR, None), "needs model.embedding"),
    ],
)
def test_a_policy_that_lacks_what_it_needs_is_refused(policy, context, message):
    with pytest.raises(SettingsError, match=message):
        ADMISSIONS[policy](context)


def test_the_name_of_a_policy_differs_with_each_setting():
    """It distinguishes a checkpoint's priorities from those of other settings."""
    policies = [
        *(ADMISSIONS[name](AdmissionContext(4, HOUR, 8)) for name in ADMISSIONS),
        *(ADMISSIONS[name](AdmissionContext(5, 2 * HOUR, 9)) for name in ("class-balanced", "recent", "diverse")),
        *(ADMISSIONS[name](AdmissionContext(4, HOUR, 8, 0.5)) for name in ("reservoir", "recent", "distinct")),
        Admission(ClassFloor(5, 0.5)),
        Admission(ClassFloor(5, 0.25)),
    ]
    assert len({policy.name for policy in policies}) == len(policies) == 13
