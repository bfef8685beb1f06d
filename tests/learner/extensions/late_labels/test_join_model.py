"""The join against a join in plain Python, with restarts from any checkpoint at any point."""

import copy
import itertools
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.learner.extensions.late_labels.joins import (
    WAIT,
    JoinBench,
    drain,
    events,
    labels,
    oldest_open,
    options,
    predictions,
    rows_of,
)

SMALL = 2**14
"""Bytes of a file whose extents have one slot, so that slots are used again soon."""
KEYS = st.integers(0, 6)
TIMES = st.integers(0, 4 * WAIT)
EVENTS = st.lists(st.tuples(KEYS, TIMES), min_size=1, max_size=6)
LABELS = st.lists(st.tuples(KEYS, st.integers(0, 2), TIMES), min_size=1, max_size=6)


class PlainJoin:
    """Events and labels in lists, which are searched from the first on."""

    def __init__(self, *, early, take_back):
        self.early, self.take_back = early, take_back
        self.events: list[dict[str, object]] = []
        self.labels: list[tuple[int, int, int]] = []
        self.decided: list[tuple[dict[str, object], str, int, int]] = []
        self.watermark = -1

    def fits(self, event, key, time):
        after = 2 * WAIT if event["kept"] else WAIT
        return key == event["key"] != 0 and -WAIT <= time - event["time"] <= after

    def find(self, event):
        for key, value, time in self.labels:
            if event in self.events and self.fits(event, key, time):
                self.decide(event, value, time)

    def decide(self, event, value, time):
        self.events.remove(event)
        name = "CORRECTED" if event["early"] or event["kept"] else "LABELLED"
        self.decided.append((event, name, value, time - event["time"]))

    def add_event(self, offset, key, time):
        event = {"offset": offset, "key": key, "time": time, "early": False, "kept": False}
        self.events.append(event)
        self.find(event)
        event["early"] = self.early and event in self.events

    def add_labels(self, added):
        for key, value, time in added:
            for event in sorted(self.events, key=lambda event: (event["time"], event["offset"])):
                if self.fits(event, key, time):
                    self.decide(event, value, time)
        self.labels += added

    def advance(self, watermark):
        self.watermark = watermark
        for event in sorted(self.events, key=lambda event: (event["time"], event["offset"])):
            if event["kept"] and event["time"] + 2 * WAIT < self.watermark:
                self.events.remove(event)
            elif not event["kept"] and event["time"] + WAIT < self.watermark:
                self.events.remove(event)
                self.decided.append((event, "TIMED_OUT", -1, min(WAIT, self.watermark - event["time"])))
        # A label is kept for events that come, and for those that are settled as negatives and may be taken back.
        undecided = [event["time"] for event, name, *_ in self.decided if name == "TIMED_OUT" and self.take_back]
        needed = min([watermark, *undecided]) - WAIT
        self.labels = [label for label in self.labels if label[2] >= needed]

    def rows(self, most):
        return [(event["offset"], *rest) for event, *rest in self.decided[:most]]

    def settle(self, most):
        settled, self.decided = self.decided[:most], self.decided[most:]
        for event, name, *_ in settled:
            if name == "TIMED_OUT" and self.take_back:
                event["kept"] = True
                self.events.append(event)
                self.find(event)

    def oldest(self):
        waiting = [event for event in self.events if not event["kept"]]
        waiting += [event for event, *_ in self.decided if not event["kept"]]
        return {0: min(event["offset"] for event in waiting)} if waiting else {}


class JoinMachine(RuleBasedStateMachine):
    """All that a learner does with a join, in any order."""

    @initialize(early=st.booleans(), take_back=st.booleans())
    def begin(self, early, take_back):
        self.folder = Path(tempfile.mkdtemp())
        self.bench = JoinBench(self.folder, options(early=early, take_back=take_back, bytes=SMALL), keep=3)
        self.plain = PlainJoin(early=early, take_back=take_back)
        self.saved = {0: copy.deepcopy(self.plain)}
        self.offsets = itertools.count()

    @rule(added=EVENTS)
    def add_events(self, added):
        if len(self.plain.events) + len(self.plain.decided) + len(added) > 40:
            return
        offsets = [next(self.offsets) for _ in added]
        keys, times = zip(*added, strict=True)
        self.bench.join.add_events(events(offsets, keys, times), predictions(offsets))
        for offset, key, time in zip(offsets, keys, times, strict=True):
            self.plain.add_event(offset, key, time)

    @rule(added=LABELS)
    def add_labels(self, added):
        self.bench.join.add_labels(labels(*zip(*added, strict=True)))
        self.plain.add_labels(added)

    @rule(by=st.integers(1, WAIT))
    def advance(self, by):
        watermark = self.plain.watermark + by
        self.bench.join.advance(watermark)
        self.plain.advance(watermark)

    @rule(most=st.integers(1, 4), put_back=st.booleans())
    def take(self, most, put_back):
        assert rows_of(self.bench.join.take(most)) == self.plain.rows(most)
        if put_back:
            self.bench.join.put_back()
        else:
            self.bench.join.settle()
            self.plain.settle(most)

    @rule(added=EVENTS, found=LABELS, by=st.integers(1, WAIT), saves=st.booleans())
    def step(self, added, found, by, saves):
        self.add_events(added)
        self.add_labels(found)
        self.advance(by)
        self.take(6, put_back=False)
        if saves:
            self.checkpoint(added)

    @rule(during=EVENTS)
    def checkpoint(self, during):
        captured = self.bench.capture()
        self.saved[self.bench.number] = copy.deepcopy(self.plain)
        self.add_events(during)  # while it is being written
        self.take(3, put_back=False)
        self.bench.write(captured)

    @rule()
    def fail_checkpoint(self):
        self.bench.fail_checkpoint()

    @rule(older=st.integers(0, 2))
    def kill(self, older):
        for number in self.bench.checkpoints.numbers()[::-1][:older]:
            self.bench.checkpoints.storage.set_aside(number)
        self.bench.restart()
        self.plain = copy.deepcopy(self.saved[max(self.bench.checkpoints.numbers(), default=0)])

    @invariant()
    def counts_are_equal(self):
        if hasattr(self, "plain"):
            join, plain = self.bench.join, self.plain
            assert oldest_open(join, 0) == plain.oldest()
            assert (join.ready, len(join.labels)) == (len(plain.decided), sum(key != 0 for key, *_ in plain.labels))

    def teardown(self):
        if hasattr(self, "plain"):
            assert drain(self.bench.join, 3)[: len(self.plain.decided)] == self.plain.rows(len(self.plain.decided))
            self.bench.join.payload.tier.close()
            shutil.rmtree(self.folder)


TestJoin = pytest.mark.slow(JoinMachine.TestCase)
TestJoin.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
