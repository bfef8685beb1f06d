"""The store against a plain model of it: events come, are planned, sampled, evicted, erased; checkpoints fail, are
resumed.

In random order, over every arrangement of tiers and from each to each, under every policy of admission.
"""

import contextlib
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from anabranch.ingest.events.identity import identity_hash, keyed_hash, partition_base, partition_name
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.replay.build import build_store
from anabranch.replay.checkpoint import CapturedStore
from anabranch.replay.erasure.erased_events import ByKey, ByRange, ErasedEvents, Record
from anabranch.replay.sample_plan import AHEAD
from anabranch.replay.sampling.base import BY_POSITION
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.snapshot import StoreSnapshot
from anabranch.replay.tiers.disk_files import make_way
from anabranch.testing.stores import FakeCheckpoints, plan_ahead, sample_of

PARTITIONS = [TopicPartition("events", 0), TopicPartition("events", 1), TopicPartition("other", 0, incarnation=2)]
NAMES = [partition_name(name) for name in PARTITIONS]
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "disk": {"disk": {"bytes": "13kB"}},
    "disk with a small cache": {"disk": {"bytes": "13kB"}, "device_bytes": "1kB"},
    "disk alone": {"disk": {"bytes": "13kB"}, "device_bytes": 0},
    "redis": {"redis": {"bytes": "60kB"}, "device_bytes": 0},
    "redis with a small cache": {"redis": {"bytes": "60kB"}, "device_bytes": "1kB"},
    "disk with redis": {"disk": {"bytes": "13kB"}, "redis": {"bytes": "5kB"}, "device_bytes": 0},
    "all": {"disk": {"bytes": "13kB"}, "redis": {"bytes": "5kB"}, "device_bytes": "1kB"},
}
each_arrangement = pytest.mark.parametrize(
    "arrangement",
    [
        pytest.param(name, marks=pytest.mark.services if "redis" in options else ())
        for name, options in ARRANGEMENTS.items()
    ],
)
ADMISSIONS = ["reservoir", "class-balanced", "recent"]
SAMPLINGS = ["uniform", "class-balanced", "recent", "loss"]
HALF_LIFE = 600
Event = tuple[int, int, int]
"""Partition, offset and row."""


def columns_of(schema, events):
    """What an event is follows from its identity."""
    partition, offset, row = (np.array(column) for column in zip(*events, strict=True))
    number = partition * 7919 + offset * 31 + row
    columns = fake_columns(schema, offset.tolist())
    columns["partition"], columns["row"] = partition.astype(np.int32), row.astype(np.int32)
    columns["feature.x"] = np.stack([number, -number], axis=1).astype(np.float32)
    columns["feature.n"] = (number % 30_011).astype(np.int16)
    columns["label"] = (number * number % 11 % 6 - 1).clip(-1, 3)
    columns["labelled"] = columns["label"] >= 0
    columns["weight"] = np.array([0.0, 0.5, 1.0, 1.0, 1.0, 4.0], np.float32)[number % 6]
    columns["time_ms"] = offset * 20_000 + number % 7 * 1000
    columns["key_hash"] = (number % 40 + 1).astype(np.uint64)
    return columns


def kept(schema, admission, added, k):
    """The definition: of each group the q smallest, q being the largest number with which no more than k are kept."""
    if not added:
        return set()
    events = sorted(added)
    columns = columns_of(schema, events)
    bases = np.array([partition_base(name) for name in PARTITIONS], np.uint64)[columns["partition"]]
    identity = keyed_hash(identity_hash(bases, columns["offset"], columns["row"]), 0).tolist()
    groups: dict[int, list[tuple[float, Event]]] = {}
    for index, event in enumerate(events):
        weight = float(columns["weight"][index])
        if not weight:
            continue
        priority = -math.log((identity[index] + 0.5) / 2**64) / weight
        if admission == "recent":
            priority = math.log(priority) - math.log(2) / HALF_LIFE * (int(columns["time_ms"][index]) // 1000)
        group = int(columns["label"][index]) if admission == "class-balanced" else 0
        groups.setdefault(group, []).append((priority, event))
    sizes = [len(members) for members in groups.values()]
    most = max(q for q in range(k + 1) if sum(min(size, q) for size in sizes) <= k) if sum(sizes) > k else k
    return {event for members in groups.values() for _, event in sorted(members)[:most]}


def names_of(records):
    return list(zip(*(records[name].tolist() for name in ("partition", "offset", "row")), strict=True))


def held(store):
    return names_of(store.event_table.copy())


def expect_payload(schema, sample):
    """Fail unless each event of a sample has its own payload, bit for bit."""
    events = names_of(sample.records)
    if not events:
        return
    expected = columns_of(schema, events)
    for name, column in sample.columns.items():
        assert column.numpy().tobytes() == np.ascontiguousarray(expected[name], column.numpy().dtype).tobytes(), name


def expect_no_slot_leaked(store):
    """Fail unless each slot is free, used or retired, and only one of these."""
    retired = [slots for _, slots in store.slots._retired]
    everything = np.concatenate([store.event_table.slots, store.slots._free, *retired])
    assert sorted(everything.tolist()) == list(range(store.tiers.slots))


def is_erased(record, event):
    """The plain definition."""
    partition, offset, row = event
    if isinstance(record, ByRange):
        return record.partition == NAMES[partition] and record.first <= offset <= record.last
    key = (partition * 7919 + offset * 31 + row) % 40 + 1
    return int(record.key_hash, 16) == key and offset < record.up_to.get(NAMES[partition], 0)


def remembered(contents, records):
    """Return a checkpoint without what is erased, and without the plans from the first on that names such an
    event."""
    erases = lambda events: any(is_erased(record, event) for record in records for event in events)  # noqa: E731
    stays = np.array([not erases([event]) for event in names_of(contents.index)], np.bool_)
    plans = list(itertools.takewhile(lambda plan: not erases(names_of(plan.events)), contents.state.plans))
    sampler = dict(contents.state.sampler)
    sampler |= {name: sampler[name][stays] for name in BY_POSITION & sampler.keys()}
    return StoreSnapshot(
        replace(contents.state, plans=plans, sampler=sampler),
        contents.index[stays],
        None if contents.payload is None else contents.payload[torch.from_numpy(stays)],
    )


@contextlib.contextmanager
def stores(schema, folder, url, k=40):
    """`open(arrangement, contents=None, **settings)`: the store of one learner, closing the one before."""
    with contextlib.ExitStack() as stack:

        def open_(arrangement, contents=None, **options):
            stack.pop_all().close()
            chosen = {"capacity": k, "half_life": f"{HALF_LIFE}s", **ARRANGEMENTS[arrangement], **options}
            if "redis" in chosen:
                chosen["redis"] = {"url": url, **chosen["redis"]}
            if contents is None:
                make_way(folder)
            validated, cpu = ReplaySettings.model_validate(chosen), torch.device("cpu")
            store = build_store(
                validated, schema, cpu, 0, folder, contents, keys="model:rank-0", first=contents is None
            )
            stack.callback(store.close)
            return store

        yield open_


@dataclass
class Moment:
    """What a checkpoint must bring back."""

    held: list[Event]
    added: set[Event]
    plans: dict[int, list[Event]]
    step: int
    thresholds: list[float]
    contents: StoreSnapshot | None = None


@dataclass
class Model:
    """All that is known of the store from outside."""

    added: set[Event] = field(default_factory=set)
    plans: dict[int, list[Event]] = field(default_factory=dict)
    step: int = 0
    taken_in: set[Event] = field(default_factory=set)
    """The added events that are not pending."""

    def moment(self, store):
        plans = {step: list(plan) for step, plan in self.plans.items()}
        return Moment(held(store), set(self.added), plans, self.step, store.reservoir.quotas.thresholds.tolist())


class StoreMachine(RuleBasedStateMachine):
    """One learner's store through several lives."""

    def __init__(self, schema, open_, arrangements, admission, k=40):
        super().__init__()
        self.schema, self.open, self.arrangements = schema, open_, arrangements
        self.admission, self.k = admission, k
        self.model, self.checkpoints = Model(), dict[int, Moment]()
        self.number, self.pending = 0, None
        self.erased = list[Record]()
        self.fates = dict[Event, bool]()
        self.dice = np.random.default_rng(0)

    @initialize(sampling=st.one_of(st.just("uniform"), st.sampled_from(SAMPLINGS)))
    def begin(self, sampling):
        self.options = {"admission": self.admission, "sampling": sampling}
        self.store = self.open(self.arrangements[0], **self.options)
        self.fakes = FakeCheckpoints(self.store)

    @rule(
        partition=st.integers(0, 2),
        begin=st.integers(0, 400),
        count=st.integers(1, 60),
        order=st.sampled_from(["rising", "falling", "mixed", "twice", "rows"]),
    )
    def add(self, partition, begin, count, order):
        events = [(partition, offset, 0) for offset in range(begin, begin + count)]
        if order == "falling":
            events.reverse()
        elif order == "mixed":
            events = [(self.dice.integers(0, 3).item(), event[1], event[2]) for event in events]
        elif order == "twice":
            events += events[: count // 2]
        elif order == "rows":
            events = [(partition, begin + index // 3, index % 3) for index in range(count)]
        events = [event for event in events if not self.is_erased(event)]
        if not events:
            return
        if not self.has_room(len(events)):
            self._finish(written=True, keep=1)
            self._hold()
            self._finish(written=True, keep=1)
            assert self.has_room(len(events)), "a checkpoint has not freed the slots that no checkpoint names"
        self.store.add(columns_of(self.schema, events), PARTITIONS)
        self.model.added |= set(events)

    def has_room(self, n):
        """Whether slots are free for what waits and n events more."""
        return self.store.slots.free >= len(self.store._pending) + n

    @rule(n=st.integers(0, 30))
    def plan(self, n):
        plan_ahead(self.store, self.model.step, n)
        before = held(self.store)
        assert [plan.step for plan in self.store.planner.plans][:AHEAD] == [
            *range(self.model.step, self.model.step + AHEAD)
        ]
        for plan in self.store.planner.plans:
            if plan.step not in self.model.plans:
                events = names_of(plan.records)
                assert len(events) == len(set(events)) == min(n, len(before))
                assert set(events) <= set(before)
                self.model.plans[plan.step] = events

    @precondition(lambda self: self.model.step in self.model.plans)
    @rule(n=st.integers(0, 30), updates=st.booleans())
    def sample(self, n, updates):
        expected = self.model.plans.pop(self.model.step)[:n]
        sample = self.store.planner.sample(self.model.step, n)
        self.model.step += 1
        assert names_of(sample.records) == expected
        expect_payload(self.schema, sample)
        assert bool((sample.importance > 0).all())
        if updates:
            self.store.update_priorities(sample, self.dice.exponential(size=len(sample)).astype(np.float32))

    @rule(partition=st.integers(0, 2), first=st.integers(0, 450), length=st.integers(0, 20), by_key=st.booleans())
    def erase(self, partition, first, length, by_key):
        """While no checkpoint is written, as in the learner; steps whose plans have erased events are planned again."""
        self._finish(written=True, keep=2)
        record: Record = ByRange(time=0, by="command", partition=NAMES[partition], first=first, last=first + length)
        if by_key:
            record = ByKey(time=0, by="command", key_hash=f"{length + 1:016x}", up_to=dict.fromkeys(NAMES, first))
        self.erased.append(record)
        self.fates.clear()
        gone = [event for event in held(self.store) if is_erased(record, event)]
        waits, count = len(self.store._pending), self.store.erase(ErasedEvents([record]))
        assert count == len(gone) or (waits and count <= len(gone) + waits), "others are erased than were held"
        for plan in self.store.planner.plans:
            events, before = names_of(plan.records), self.model.plans[plan.step]
            if any(is_erased(record, event) for event in before):
                assert len(events) == len(set(events)) == min(len(before), len(self.store))
                self.model.plans[plan.step] = events
            else:
                assert events == before

    def is_erased(self, event):
        if event not in self.fates:
            self.fates[event] = any(is_erased(record, event) for record in self.erased)
        return self.fates[event]

    @precondition(lambda self: self.pending is None)
    @rule()
    def hold(self):
        self._hold()

    @precondition(lambda self: self.pending is not None)
    @rule(written=st.sampled_from([True, True, False]), keep=st.integers(1, 3))
    def finish(self, written, keep):
        self._finish(written=written, keep=keep)

    @rule(keep=st.integers(2, 3))
    def checkpoint(self, keep):
        self._finish(written=True, keep=keep)
        self._hold()
        self._finish(written=True, keep=keep)

    @rule(data=st.data(), newest_is_broken=st.sampled_from([False, False, True]))
    def crash(self, data, newest_is_broken):
        """Go on from a checkpoint, with the tiers as they are; what was not written is erased."""
        arrangement = data.draw(st.sampled_from(self.arrangements))
        self.pending = None
        if newest_is_broken and len(self.checkpoints) > 1:
            del self.checkpoints[max(self.checkpoints)]
        if not self.checkpoints:
            self.store, self.model = self.open(arrangement, **self.options), Model()
            self.fakes = FakeCheckpoints(self.store)
            return
        moment = self.checkpoints[max(self.checkpoints)]
        assert moment.contents is not None
        contents = remembered(moment.contents, self.erased)
        self.store = self.open(arrangement, contents, **self.options)
        self.fakes = FakeCheckpoints(self.store, contents)
        plans = {plan.step: moment.plans[plan.step] for plan in contents.state.plans}
        self.model = Model(set(moment.added), plans, moment.step)
        expected = [event for event in moment.held if not self.is_erased(event)]
        assert held(self.store) == expected, "others are held after a restart, or in another order"
        assert self.store.reservoir.quotas.thresholds.tolist() == moment.thresholds
        assert [plan.step for plan in self.store.planner.plans] == sorted(plans)

    @invariant()
    def what_is_held_is_what_the_definition_says(self):
        if not hasattr(self, "store"):
            return
        events = held(self.store)
        if not len(self.store._pending):
            self.model.taken_in = set(self.model.added)
        assert len(events) == len(set(events)) == len(self.store), "an event is held twice"
        assert len(events) <= self.store.reservoir.quotas.limit
        remembered_ = {event for event in self.model.taken_in if not self.is_erased(event)}
        assert set(events) <= remembered_
        assert self.store.lost == 0
        # Erased events are missing: thresholds do not rise.
        assert kept(self.schema, self.admission, self.model.taken_in, self.k) & remembered_ <= set(events)

    @invariant()
    def no_slot_is_leaked_or_used_twice(self):
        if hasattr(self, "store"):
            expect_no_slot_leaked(self.store)

    @invariant()
    def every_event_has_its_own_payload(self):
        if hasattr(self, "store") and not len(self.store._pending):  # to plan is to take in what waits
            sample = sample_of(self.store, 0, len(self.store))
            assert len(sample) == len(self.store), "a row was written over"
            expect_payload(self.schema, sample)

    def _hold(self):
        self.number += 1
        self.pending: tuple[CapturedStore, Moment] | None = (
            self.store.begin_snapshot(self.number),
            self.model.moment(self.store),
        )
        self.model.taken_in = set(self.model.added)

    def _finish(self, *, written, keep):
        if self.pending is None:
            return
        held_, moment = self.pending
        if written:
            moment.contents = self.fakes.finish(held_)
            self.checkpoints[self.number] = moment
            for number in sorted(self.checkpoints)[:-keep]:
                del self.checkpoints[number]
        self.pending = None
        self.store.end_snapshot(min(self.checkpoints, default=None), written=written)


def run(schema, folder, url, arrangements, admission, examples):
    with stores(schema, folder, url) as open_:
        run_state_machine_as_test(
            lambda: StoreMachine(schema, open_, arrangements, admission),
            settings=settings(
                max_examples=examples,
                stateful_step_count=40,
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.slow
@pytest.mark.parametrize("admission", ADMISSIONS)
@each_arrangement
def test_the_store_is_its_model(schema, tmp_path, arrangement, admission, request):
    url = request.getfixturevalue("shared_redis").url if "redis" in ARRANGEMENTS[arrangement] else ""
    run(schema, tmp_path, url, [arrangement], admission, examples=6)


@pytest.mark.slow
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_the_store_is_its_model_when_every_life_has_other_tiers(schema, tmp_path, admission):
    run(schema, tmp_path, "", ["device", "disk", "disk with a small cache"], admission, examples=10)


@pytest.mark.services
def test_the_store_is_its_model_when_every_life_has_other_tiers_with_redis(schema, tmp_path, shared_redis):
    """Redis cannot be left out in the life after one in which it alone held all."""
    run(schema, tmp_path, shared_redis.url, ["redis", "all"], "class-balanced", examples=6)
