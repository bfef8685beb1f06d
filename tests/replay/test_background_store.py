"""The background store: updates in the background have the same results as updates between the steps."""

import contextlib
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.replay.background_store import BackgroundStore, StoreFailedError
from anabranch.replay.build import build_store
from anabranch.replay.erasure.erased_events import ByRange, ErasedEvents
from anabranch.replay.reservoir.reservoir import MAX_PENDING
from anabranch.replay.sample_plan import Sample
from anabranch.replay.settings import ReplaySettings
from anabranch.testing.stores import plan_ahead
from tests.support.waiting import PATIENCE_SECONDS

PARTITIONS = [TopicPartition("events", 0)]
SAMPLED, HELD = 12, 300
KINDS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "class-balanced and loss": {"admission": "class-balanced", "sampling": "loss"},
    "disk": {"disk": {"bytes": "60kB"}, "device_bytes": "1kB"},
}


def open_store(schema, folder=None, **options):
    chosen = ReplaySettings.model_validate({"capacity": HELD, **options})
    return build_store(chosen, schema, torch.device("cpu"), 0, folder)


@pytest.fixture
def open_background_store(schema, tmp_path):
    """`open_background_store(**options)`: one of a store with such settings."""
    opened: list[BackgroundStore] = []

    def make(**options):
        opened.append(BackgroundStore(open_store(schema, tmp_path, **options)))
        return opened[-1]

    yield make
    for background_store in opened:
        background_store.close()


class Life:
    """What a learner does with a store or with a background store; its samples are compared."""

    def __init__(self, keeper, schema):
        self._keeper, self._schema = keeper, schema
        self._step = self._added = 0
        self._plan_ahead(0)

    def _plan_ahead(self, step):
        if isinstance(self._keeper, BackgroundStore):
            self._keeper.plan_ahead(step, SAMPLED)
        else:
            plan_ahead(self._keeper, step, SAMPLED)

    @property
    def store(self):
        return self._keeper.flush() if isinstance(self._keeper, BackgroundStore) else self._keeper

    def add(self, n, again=0):
        """Add n events, of which the first `again` were added already."""
        begin = max(0, self._added - again)
        columns = fake_columns(self._schema, range(begin, begin + n), label=[0, 1, 1, 2, 3])
        columns["weight"] = (1 + columns["offset"] % 3).astype(np.float32)
        self._added = max(self._added, begin + n)
        self._keeper.add(columns, PARTITIONS)

    def erase(self, first, last):
        record = ByRange(time=0.0, by="test", partition="events#0[0]", first=first, last=last)
        return self.store.erase(ErasedEvents([record]))

    def step(self, n):
        """Return the events that a step samples, after which n new ones come."""
        sampled: list[float] = []
        planner = self._keeper if isinstance(self._keeper, BackgroundStore) else self._keeper.planner
        if planner.planned(self._step):
            sample = planner.sample(self._step, SAMPLED)
            sampled = [*sample.records["offset"].tolist(), *sample.importance.tolist()]
            sampled += sample.columns["feature.x"].flatten().tolist()
            if self.listens:
                self._keeper.update_priorities(sample, (sample.records["offset"] % 17).astype(np.float32))
        self.add(n)
        self._step += 1
        self._plan_ahead(self._step)
        return sampled

    @property
    def listens(self):
        return self._keeper.listens

    def seen(self):
        """Return who is held, in order, and what is planned."""
        self.store.flush_pending()
        plans = [tuple(plan.records["offset"].tolist()) for plan in self.store.planner.plans if plan.step >= self._step]
        return [tuple(self.store.event_table.copy()["offset"].tolist()), *plans]


acts = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "add", "again", "see", "flush", "room", "erase"]),
        st.integers(1, 90),
    ),
    min_size=5,
    max_size=60,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(acts)
def test_timing_does_not_influence_what_is_held_or_sampled(schema, kind, asked):
    """Whatever is asked for between the steps, and however far the thread has come by then."""
    with contextlib.ExitStack() as stack:
        plain, kept = (
            open_store(schema, Path(stack.enter_context(tempfile.TemporaryDirectory())), **KINDS[kind])
            for _ in range(2)
        )
        background_store = BackgroundStore(kept)
        stack.callback(background_store.close)
        stack.callback(plain.close)
        one, other = Life(plain, schema), Life(background_store, schema)
        for act, n in asked:
            if act == "step":
                assert one.step(n) == other.step(n)
            elif act == "add":
                one.add(n)
                other.add(n)
            elif act == "again":
                one.add(n, n // 2)
                other.add(n, n // 2)
            elif act == "erase":
                assert one.erase(n, n + n // 3) == other.erase(n, n + n // 3)
            elif act == "see":
                assert one.seen() == other.seen()
            elif act == "flush":
                other.store.flush_pending()
            else:
                background_store.has_room()
        assert one.seen() == other.seen()


def hold_up(store, monkeypatch):
    """Let the store take in nothing until the second event is set; the first says that it has begun to."""
    begun, opened = threading.Event(), threading.Event()
    take_in = store.flush_pending

    def held_up():
        begun.set()
        assert opened.wait(PATIENCE_SECONDS)
        return take_in()

    monkeypatch.setattr(store, "flush_pending", held_up)
    return begun, opened


def test_a_step_goes_on_while_the_store_takes_in_and_the_next_one_waits(open_background_store, schema, monkeypatch):
    background_store = open_background_store()
    for step in range(5):
        background_store.add(fake_columns(schema, range(step * 40, step * 40 + 40)), PARTITIONS)
        background_store.plan_ahead(step, SAMPLED)
    assert background_store.planned(7) == SAMPLED
    assert background_store.planned(8) == 0
    stalled = background_store.flush().tiers.stats.stall_seconds
    begun, opened = hold_up(background_store.flush(), monkeypatch)
    background_store.add(fake_columns(schema, range(200, 240)), PARTITIONS)
    background_store.plan_ahead(5, SAMPLED)
    assert not begun.is_set(), "nothing is begun between two steps"
    assert len(background_store.sample(5, SAMPLED)) == SAMPLED
    assert begun.wait(PATIENCE_SECONDS), "a step that has its sample lets it begin"
    background_store.add(fake_columns(schema, range(240, 280)), PARTITIONS)
    sampled: list[Sample] = []
    waiting, wait = threading.Event(), background_store._thread.wait
    monkeypatch.setattr(background_store._thread, "wait", lambda *some: (waiting.set(), wait(*some))[1])
    thread = threading.Thread(target=lambda: sampled.append(background_store.sample(6, SAMPLED)))
    thread.start()
    assert waiting.wait(PATIENCE_SECONDS)
    assert not sampled
    opened.set()
    thread.join(PATIENCE_SECONDS)
    assert len(sampled[0]) == SAMPLED
    assert background_store.flush().tiers.stats.stall_seconds > stalled, "the wait of a step is counted"


def test_events_are_added_where_no_step_samples(open_background_store, schema):
    background_store, most = open_background_store(capacity=100_000), 0
    for begin in range(0, 20 * MAX_PENDING, 128):
        background_store.add(fake_columns(schema, range(begin, begin + 128)), PARTITIONS)
        most = max(most, background_store._added)
    assert most <= MAX_PENDING + 128
    assert len(background_store._at_rest()) >= 20 * MAX_PENDING - 2 * (MAX_PENDING + 128)
    assert background_store.flush().flush_pending() + len(background_store.flush()) >= 20 * MAX_PENDING


class Panic(BaseException):
    """What no handler of exceptions expects."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, torch.OutOfMemoryError, Panic])
@pytest.mark.parametrize("inline", [False, True])
def test_a_failure_in_the_background_is_raised_by_each_later_call_and_is_no_out_of_memory_error_of_the_model(
    open_background_store, schema, monkeypatch, kind, inline
):
    background_store = open_background_store()
    background_store.add(fake_columns(schema, range(100)), PARTITIONS)
    background_store.plan_ahead(0, SAMPLED)
    assert background_store.planned(0) == SAMPLED

    def fail(*_):
        raise kind("no more")

    monkeypatch.setattr(background_store._store, "plan_blocks", fail)
    background_store.plan_ahead(8, SAMPLED)
    if inline:
        with pytest.raises(StoreFailedError):
            background_store.flush()
    else:
        background_store.sample(0, SAMPLED)
    for call in (
        lambda: background_store.sample(1, SAMPLED),
        background_store.has_room,
        background_store.flush,
    ):
        with pytest.raises(
            StoreFailedError, match=f"the replay store failed in the background of a step: {kind.__name__}: no more"
        ):
            call()
    assert not issubclass(StoreFailedError, RuntimeError), "out-of-memory errors of the device are RuntimeErrors"


def test_lost_events_leave_and_are_counted_where_no_step_comes(open_background_store, schema, monkeypatch):
    """As in a backlog of events that are stored only."""
    background_store = open_background_store(capacity=100_000, disk={"bytes": "20MB"}, device_bytes=0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(background_store.flush().tiers.slow[0], "write", full)
    for begin in range(0, 10 * MAX_PENDING, MAX_PENDING):
        background_store.add(fake_columns(schema, range(begin, begin + MAX_PENDING)), PARTITIONS)
        background_store.plan_ahead(0, SAMPLED)
        background_store._store.tiers._io_thread.wait()
    assert background_store.flush().lost >= 7 * MAX_PENDING
    assert len(background_store.flush().tiers.lost_reports) < 4


def test_nothing_is_held_on_to_that_is_done(open_background_store, schema):
    background_store = open_background_store()
    added = []
    for begin in range(0, 4 * MAX_PENDING, MAX_PENDING):
        columns = fake_columns(schema, range(begin, begin + MAX_PENDING))
        added.append(weakref.ref(columns["feature.x"]))
        background_store.add(columns, PARTITIONS)
        del columns
    background_store._at_rest().flush_pending()
    assert [each() is None for each in added] == [True] * 4


def test_neighbours_arrive_in_order(open_background_store, schema, monkeypatch):
    background_store, order = open_background_store(), list[str]()
    monkeypatch.setattr(
        background_store._store.embeddings, "query", lambda step, _embedding: order.append(f"query {step}")
    )
    monkeypatch.setattr(
        background_store._store, "add", lambda columns, *_: order.append(f"add {len(columns['offset'])}")
    )
    for step in range(3):
        background_store.query_neighbours(step, np.zeros((1, 2), np.float32))
        background_store.add(fake_columns(schema, range(step + 1)), PARTITIONS)
    background_store.flush()
    assert order == ["query 0", "add 1", "query 1", "add 2", "query 2", "add 3"]


def test_steps_have_waited_for_what_they_waited_for_and_no_more(open_background_store, schema, monkeypatch):
    """The waits of the background thread are not counted as waits of steps."""
    background_store = open_background_store()
    stats = background_store.flush().tiers.stats

    def waits(*_):
        stats.stall_seconds += 1000.0

    monkeypatch.setattr(background_store._store, "add", waits)
    background_store.add(fake_columns(schema, range(4)), PARTITIONS)
    background_store.plan_ahead(0, SAMPLED)
    background_store._begin()
    assert 0 <= background_store._at_rest().tiers.stats.stall_seconds < 100
    background_store.add(fake_columns(schema, range(4)), PARTITIONS)
    background_store.plan_ahead(8, SAMPLED)
    background_store.planned(8)
    assert 0 < stats.stall_seconds < 100, "a step that needs a plan waits for all before it"


def test_without_a_thread_what_is_due_is_done_by_who_has_sampled(schema):
    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    background_store = BackgroundStore(open_store(schema), in_background=False)
    assert set(threading.enumerate()) <= before
    life = Life(background_store, schema)
    for n in range(1, 40):
        life.step(n)
    assert len(life.store) > HELD / 2
    background_store.close()


def test_slots_that_events_wait_for_are_not_free(open_background_store, schema):
    background_store = open_background_store(capacity=2000)
    background_store.flush().begin_snapshot(1)
    background_store.flush().burst = background_store.flush().slots.free - 300
    background_store.add(fake_columns(schema, range(300)), PARTITIONS)
    assert background_store.has_room()
    background_store.add(fake_columns(schema, [300]), PARTITIONS)
    assert not background_store.has_room()
    assert len(background_store.flush()) == 301, "what waits was not taken in"
