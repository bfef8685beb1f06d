"""Segments: whatever came and left between checkpoints, together they are the plain list of what is held."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anabranch.replay.segments import Segment, Tensors, advance, assemble, most_events
from anabranch.replay.snapshot import ENTRY, DeltaTracker, StoreDelta

R = 8


def index_of(names):
    index = np.zeros(len(names), ENTRY)
    index["offset"], index["slot"], index["priority"] = names, np.array(names) % 97, np.array(names) / 7
    return index


def rows_of(names):
    return torch.from_numpy(np.array(names, np.int64).view(np.uint8).reshape(len(names), R).copy())


@dataclass
class Log:
    """Checkpoints on a disk that is a dict; counts what is written."""

    payload: bool
    most: int = 10**9
    files: dict[str, Tensors] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    written: int = 0

    def checkpoint(self, number, change, *, fails=False):
        made = advance(self.segments, change, number, self.load, self.most)
        if fails:
            return
        assert list(made.new) == [each.name for each in made.segments if each.name not in self.files]
        again = sum(len(new.tensors["index"]) for new in made.new.values()) - len(change.index)
        assert again <= max(self.most, len(change.index)), "a checkpoint writes more than a segment again"
        for name, new in made.new.items():
            assert len(new.tensors["index"]) <= self.most
            self.files[name] = new.tensors
            self.written += len(new.tensors["index"])
        self.segments = list(made.segments)
        named = {segment.name for segment in self.segments}
        self.files = {name: file for name, file in self.files.items() if name in named}

    def load(self, segment):
        return self.files[segment.name]

    def assembled(self, without=None):
        index, payload, lost = assemble(
            self.segments, lambda segment: None if segment.name == without else self.load(segment)
        )
        names = index["offset"].tolist()
        assert (index == index_of(names)).all()
        return names, payload, lost


class SegmentsMachine(RuleBasedStateMachine):
    """A store of which only order counts: events come at the end, any may leave, checkpoints succeed and fail."""

    def __init__(self):
        super().__init__()
        self.log, self.held, self.at_checkpoint = Log(payload=True), list[int](), list[int]()
        self.changes, self.number, self.next = DeltaTracker(), 0, 0
        self.came = self.left = self.peak = 0

    @initialize(most=st.sampled_from([7, 50, 10**9]))
    def choose_size(self, most):
        self.log.most = most

    @rule(n=st.integers(0, 300))
    def add(self, n):
        self.held += range(self.next, self.next + n)
        self.next, self.came = self.next + n, self.came + n
        self.peak = max(self.peak, len(self.held))

    @rule(seed=st.integers(0, 2**32), share=st.sampled_from([0.01, 0.1, 0.5, 0.97, 1.0]), old=st.booleans())
    def remove(self, seed, share, old):
        stays = np.random.default_rng(seed).random(len(self.held)) >= share
        stays[len(stays) // 2 if old else len(stays) :] = True
        self.changes.keep(stays)
        self.left += int((~stays).sum())
        self.held = [name for name, stay in zip(self.held, stays.tolist(), strict=True) if stay]

    @rule(fails=st.sampled_from([False, False, False, True]), more=st.integers(0, 3))
    def checkpoint(self, fails, more):
        """Return the changes; events may be added while the checkpoint is written."""
        self.number += 1
        new = self.held[self.changes.old :]
        change = StoreDelta(self.changes.base, self.changes.alive, index_of(new), rows_of(new))
        self.changes.begin(self.number, len(self.held))
        now = list(self.held)
        self.add(more)
        full = change.base is None
        written = self.log.written
        self.log.checkpoint(self.number, change, fails=fails)
        if fails:
            self.changes.clear()
            return
        self.at_checkpoint = now
        if full:  # what a full checkpoint writes is no rewriting
            self.came += self.log.written - written

    @invariant()
    def the_last_checkpoint_has_what_was_held(self):
        names, payload, lost = self.log.assembled()
        assert names == self.at_checkpoint
        assert not lost
        assert not names or (payload is not None and torch.equal(payload, rows_of(names)))

    @invariant()
    def little_is_written_again(self):
        """Each time that an event is, its segment has grown by half, or as many had left."""
        assert self.log.written <= self.came * (1 + math.log(max(2, self.peak), 1.5)) + 3 * self.left

    @invariant()
    def there_are_few_segments(self):
        assert len(self.log.segments) <= 2 + math.log2(max(2, self.peak)) + 4 * self.peak / self.log.most
        assert sum(len(segment.live) for segment in self.log.segments) <= 2 * self.peak

    @precondition(lambda self: self.log.segments)
    @rule(data=st.data())
    def a_segment_that_is_lost_costs_its_events_alone(self, data):
        segment = data.draw(st.sampled_from(self.log.segments))
        names, payload, lost = self.log.assembled(without=segment.name)
        mine = self.log.load(segment)["index"].numpy().reshape(-1).view(ENTRY)["offset"][segment.live].tolist()
        assert lost == len(mine) == segment.held
        gone = set(mine)
        assert names == [name for name in self.at_checkpoint if name not in gone]
        assert not names or (payload is not None and torch.equal(payload, rows_of(names)))


TestSegments = pytest.mark.slow(SegmentsMachine.TestCase)
TestSegments.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(200, 1000))
def test_a_store_that_is_full_writes_what_changed_a_few_times_and_not_itself(seed, k):
    """200 checkpoints, in each of which a hundredth of the events is replaced."""
    dice, log, changes, held = np.random.default_rng(seed), Log(payload=False), DeltaTracker(), list(range(k))
    replaced, following = max(1, k // 100), k
    for number in range(1, 201):
        new = held[changes.old :]
        log.checkpoint(number, StoreDelta(changes.base, changes.alive, index_of(new), None))
        changes.begin(number, len(held))
        stays = np.ones(len(held), np.bool_)
        stays[dice.choice(len(held), replaced, replace=False)] = False
        changes.keep(stays)
        held = [name for name, stay in zip(held, stays.tolist(), strict=True) if stay]
        held += range(following, following + replaced)
        following += replaced
    assert log.assembled()[1] is None, "rows that a tier has are not in segments"
    fresh = 200 * replaced
    assert log.written < k + 12 * fresh < 200 * k / 4


@pytest.mark.parametrize("most", [20, 100, 300])
def test_a_full_store_in_pieces_takes_twice_its_space_and_writes_few_pieces_again(most):
    """300 checkpoints, in each of which 20 of 1000 events are replaced."""
    dice, log, changes, held = np.random.default_rng(0), Log(payload=True, most=most), DeltaTracker(), []
    following = 1000
    held += range(following)
    for number in range(1, 301):
        new = held[changes.old :]
        log.checkpoint(number, StoreDelta(changes.base, changes.alive, index_of(new), rows_of(new)))
        changes.begin(number, len(held))
        stays = dice.permutation(len(held)) >= 20
        changes.keep(stays)
        held = [name for name, stay in zip(held, stays.tolist(), strict=True) if stay]
        held += range(following, following + 20)
        following += 20
        assert sum(len(segment.live) for segment in log.segments) <= 2 * 1000 + 3 * most
        assert len(log.segments) <= 4 * 1000 / most + 10
    assert log.written <= 1000 + 6 * 300 * 20


def test_segments_have_as_many_events_as_fit_with_their_rows():
    assert most_events(0) == 2**28 // ENTRY.itemsize
    assert most_events(2**20) == 2**28 // (2**20 + ENTRY.itemsize)
    assert most_events(2**40) == 1


def test_more_new_events_than_fit_into_a_segment_are_divided():
    log, names = Log(payload=True, most=20), list(range(50))
    log.checkpoint(1, StoreDelta(None, np.ones(0, np.bool_), index_of(names), rows_of(names)))
    assert {name: len(file["index"]) for name, file in log.files.items()} == {"1": 20, "1-1": 20, "1-2": 10}
    assert log.assembled()[0] == names


def test_the_rows_of_new_events_are_written_from_where_they_were_read():
    names = list(range(50))
    rows = rows_of(names)
    made = advance([], StoreDelta(None, np.ones(0, np.bool_), index_of(names), rows), 1, Log(payload=True).load, 20)
    assert [new.tensors["payload"].data_ptr() for new in made.new.values()] == [
        rows[first].data_ptr() for first in (0, 20, 40)
    ]


def test_a_checkpoint_in_which_nothing_changed_writes_nothing():
    log, names = Log(payload=True), list(range(50))
    log.checkpoint(1, StoreDelta(None, np.ones(0, np.bool_), index_of(names), rows_of(names)))
    log.checkpoint(2, StoreDelta(1, np.ones(50, np.bool_), index_of([]), rows_of([])))
    assert log.written == 50
    assert [segment.name for segment in log.segments] == ["1"]
    assert log.assembled()[0] == names
