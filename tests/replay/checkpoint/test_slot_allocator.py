"""Slots are written again only when nothing names them that may still be read."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anabranch.replay.tiers.slot_allocator import SlotAllocator

COUNT = 40


@dataclass
class Checkpoint:
    """The slots that a checkpoint names, and what it has of `SlotAllocator`."""

    used: set[int]
    retired: np.ndarray


@dataclass
class Model:
    """The plain definition: who uses what."""

    used: set[int] = field(default_factory=set)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)

    @property
    def named(self):
        """Slots that may not be written."""
        return self.used.union(*(checkpoint.used for checkpoint in self.checkpoints.values()))


class SlotsMachine(RuleBasedStateMachine):
    """A store, its checkpoints, failures and crashes, in any order."""

    def __init__(self):
        super().__init__()
        self.slots = SlotAllocator(COUNT, durable=True)
        self.model = Model()
        self.number = 0
        self.pending: Checkpoint | None = None
        self.once_named: set[int] = set()

    @rule(n=st.integers(0, 12))
    def fill(self, n):
        n = min(n, self.slots.free)
        named = self.model.named | (self.pending.used if self.pending else set())
        taken = set(self.slots.take(n).tolist())
        assert len(taken) == n
        assert not taken & named, "a slot was given that is named"
        self.model.used |= taken

    @rule(data=st.data())
    def remove(self, data):
        leaving = data.draw(st.sets(st.sampled_from(sorted(self.model.used)))) if self.model.used else set()
        self.slots.release(np.array(sorted(leaving), np.int32))
        self.model.used -= leaving

    @precondition(lambda self: self.pending is None)
    @rule()
    def hold(self):
        self.number += 1
        self.pending = Checkpoint(set(self.model.used), self.slots.begin_snapshot(self.number))
        self.once_named |= self.model.used

    @precondition(lambda self: self.pending is not None)
    @rule(written=st.booleans(), keep=st.integers(1, 3))
    def end_snapshot(self, written, keep):
        assert self.pending is not None
        if written:
            self.model.checkpoints[self.number] = self.pending
            for number in sorted(self.model.checkpoints)[:-keep]:
                del self.model.checkpoints[number]
        self.pending = None
        self.slots.end_snapshot(min(self.model.checkpoints, default=None))

    @precondition(lambda self: self.model.checkpoints)
    @rule(newest_is_broken=st.booleans())
    def crash(self, newest_is_broken):
        numbers = sorted(self.model.checkpoints)
        if newest_is_broken and len(numbers) > 1:
            del self.model.checkpoints[numbers.pop()]
        checkpoint = self.model.checkpoints[numbers[-1]]
        self.pending = None
        self.number = max(self.number, numbers[-1])
        self.slots = SlotAllocator(COUNT, durable=True)
        self.slots.restore(np.array(sorted(checkpoint.used), np.int32), checkpoint.retired, numbers[-1])
        self.model.used = set(checkpoint.used)

    @invariant()
    def no_slot_waits_that_no_checkpoint_has_named(self):
        assert self.slots.free >= COUNT - len(self.model.used | self.once_named)

    @invariant()
    def no_slot_is_lost(self):
        if self.pending is None and len(self.model.checkpoints) == 0 and self.number == 0:
            assert self.slots.free == COUNT - len(self.model.used)


TestSlots = pytest.mark.slow(SlotsMachine.TestCase)
TestSlots.settings = settings(max_examples=150, stateful_step_count=40)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30))
def test_all_slots_come_back_when_checkpoints_go_on(leaving):
    slots = SlotAllocator(COUNT, durable=True)
    used = slots.take(20)
    for number, n in enumerate(leaving, start=1):
        n = min(n, len(used))
        slots.begin_snapshot(number)
        slots.release(used[:n])
        used = used[n:]
        slots.end_snapshot(max(1, number - 2))
    for number in range(len(leaving) + 1, len(leaving) + 5):
        slots.begin_snapshot(number)
        slots.end_snapshot(number - 2)
    assert slots.free == COUNT - len(used)
    assert slots.waiting == 0


def test_after_a_crash_the_slots_of_older_checkpoints_still_wait_for_them():
    """The newest checkpoint may be found to be broken later, and an older one be resumed."""
    slots = SlotAllocator(COUNT, durable=True)
    used = slots.take(30)
    slots.begin_snapshot(1)
    slots.end_snapshot(1)
    slots.release(used[:20])
    retired = slots.begin_snapshot(2)
    assert retired.tolist() == [[1, slot] for slot in used[:20].tolist()]
    resumed = SlotAllocator(COUNT, durable=True)
    resumed.restore(used[20:], retired, 2)
    assert resumed.free == COUNT - 30
    assert not set(resumed.take(10).tolist()) & set(used.tolist())
    resumed.begin_snapshot(3)
    resumed.end_snapshot(1)
    assert resumed.free == 0
    resumed.end_snapshot(2)
    assert resumed.free == 20


def test_where_checkpoints_have_the_payload_a_slot_waits_for_the_checkpoint_that_is_being_written_alone():
    slots = SlotAllocator(4, durable=False)
    used = slots.take(2)
    slots.begin_snapshot(1)
    slots.release(used)
    assert slots.free == 2
    slots.end_snapshot(1)
    assert slots.free == 4
    slots.release(slots.take(3))
    assert slots.free == 4


def test_a_second_hold_or_an_old_number_is_a_bug():
    slots = SlotAllocator(4, durable=True)
    slots.begin_snapshot(5)
    with pytest.raises(AssertionError):
        slots.begin_snapshot(6)
    slots.end_snapshot(5)
    with pytest.raises(AssertionError):
        slots.begin_snapshot(5)
