"""The clerk: what a store does beside the steps is what it would have done between them."""

import contextlib
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.events.partition import TopicPartition
from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from replay.background_store import BackgroundStore, StoreFailedError
from replay.build import build_store
from replay.config import ReplaySettings
from replay.erasure.erased_events import ByRange, ErasedEvents
from replay.plan import Sample
from replay.store import MOST_WAITING, Store

PARTITIONS = [TopicPartition("events", 0)]
SAMPLED, HELD = 12, 300
KINDS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "class-balanced and loss": {"admission": "class-balanced", "sampling": "loss"},
    "disk": {"disk": {"bytes": "60kB"}, "device_bytes": "1kB"},
}


def open_store(schema: Schema, folder: Path | None = None, **options: Any) -> Store:
    chosen = ReplaySettings.model_validate({"capacity": HELD, **options})
    return build_store(chosen, schema, torch.device("cpu"), 0, folder)


@pytest.fixture
def open_clerk(schema: Schema, tmp_path: Path) -> Iterator[Callable[..., BackgroundStore]]:
    """`open_clerk(**options)`: one of a store with such settings."""
    clerks: list[BackgroundStore] = []

    def make(**options: Any) -> BackgroundStore:
        clerks.append(BackgroundStore(open_store(schema, tmp_path, **options)))
        return clerks[-1]

    yield make
    for clerk in clerks:
        clerk.close()


class Life:
    """What a learner does with a store or with its clerk, which is told by digests of what it sees."""

    def __init__(self, keeper: Store | BackgroundStore, schema: Schema) -> None:
        self._keeper, self._schema = keeper, schema
        self._step = self._offered = 0
        keeper.plan_ahead(0, SAMPLED)

    @property
    def store(self) -> Store:
        return self._keeper.flush() if isinstance(self._keeper, BackgroundStore) else self._keeper

    def add(self, n: int, again: int = 0) -> None:
        """Offer n events, of which the first were offered already."""
        begin = max(0, self._offered - again)
        columns = fake_columns(self._schema, range(begin, begin + n), label=[0, 1, 1, 2, 3])
        columns["weight"] = (1 + columns["offset"] % 3).astype(np.float32)
        self._offered = max(self._offered, begin + n)
        self._keeper.add(columns, PARTITIONS)

    def erase(self, first: int, last: int) -> int:
        record = ByRange(time=0.0, by="test", partition="events#0[0]", first=first, last=last)
        return self.store.erase(ErasedEvents([record]))

    def step(self, n: int) -> list[float]:
        """Return the events that a step samples, after which n new ones come."""
        sampled: list[float] = []
        if self._keeper.planned(self._step):
            sample = self._keeper.sample(self._step, SAMPLED)
            sampled = [*sample.records["offset"].tolist(), *sample.importance.tolist()]
            sampled += sample.columns["feature.x"].flatten().tolist()
            if self.listens:
                self._keeper.update_priorities(sample, (sample.records["offset"] % 17).astype(np.float32))
        self.add(n)
        self._step += 1
        self._keeper.plan_ahead(self._step, SAMPLED)
        return sampled

    @property
    def listens(self) -> bool:
        return self._keeper.listens

    def seen(self) -> list[tuple[int, ...]]:
        """Return who is held, in order, and what is planned."""
        self.store.flush_pending()
        plans = [tuple(plan.records["offset"].tolist()) for plan in self.store._plans if plan.step >= self._step]
        return [tuple(self.store.entries.copy()["offset"].tolist()), *plans]


acts = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "add", "again", "see", "flush", "room", "erase"]),
        st.integers(1, 90),
    ),
    min_size=5,
    max_size=60,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(acts)
def test_no_timing_decides_what_is_held_or_sampled(schema: Schema, kind: str, asked: list[tuple[str, int]]) -> None:
    """Whatever is asked for between the steps, and however far the thread has come by then."""
    with contextlib.ExitStack() as stack:
        plain, kept = (
            open_store(schema, Path(stack.enter_context(tempfile.TemporaryDirectory())), **KINDS[kind])
            for _ in range(2)
        )
        clerk = BackgroundStore(kept)
        stack.callback(clerk.close)
        stack.callback(plain.close)
        one, other = Life(plain, schema), Life(clerk, schema)
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
                clerk.has_room()
        assert one.seen() == other.seen()


def hold_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let the store take in nothing until the second event is set; the first says that it has begun to."""
    begun, opened = threading.Event(), threading.Event()
    take_in = store.flush_pending

    def held_up() -> int:
        begun.set()
        assert opened.wait(30)
        return take_in()

    monkeypatch.setattr(store, "flush_pending", held_up)
    return begun, opened


def test_a_step_goes_on_while_the_store_takes_in_and_the_next_one_waits(
    open_clerk: Callable[..., BackgroundStore], schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    clerk = open_clerk()
    for step in range(5):
        clerk.add(fake_columns(schema, range(step * 40, step * 40 + 40)), PARTITIONS)
        clerk.plan_ahead(step, SAMPLED)
    assert clerk.planned(7) == SAMPLED
    assert clerk.planned(8) == 0
    stalled = clerk.flush().tiers.stats.stall_seconds
    begun, opened = hold_up(clerk.flush(), monkeypatch)
    clerk.add(fake_columns(schema, range(200, 240)), PARTITIONS)
    clerk.plan_ahead(5, SAMPLED)
    assert not begun.is_set(), "nothing is begun between two steps"
    assert len(clerk.sample(5, SAMPLED)) == SAMPLED
    assert begun.wait(30), "a step that has its sample lets it begin"
    clerk.add(fake_columns(schema, range(240, 280)), PARTITIONS)
    sampled: list[Sample] = []
    thread = threading.Thread(target=lambda: sampled.append(clerk.sample(6, SAMPLED)))
    thread.start()
    assert not sampled
    opened.set()
    thread.join(30)
    assert len(sampled[0]) == SAMPLED
    assert clerk.flush().tiers.stats.stall_seconds > stalled, "what a step waited for is told"


def test_offers_that_nobody_samples_from_are_taken_in_too(
    open_clerk: Callable[..., BackgroundStore], schema: Schema
) -> None:
    clerk, most = open_clerk(capacity=100_000), 0
    for begin in range(0, 20 * MOST_WAITING, 128):
        clerk.add(fake_columns(schema, range(begin, begin + 128)), PARTITIONS)
        most = max(most, clerk._offered)
    assert most <= MOST_WAITING + 128
    assert len(clerk._at_rest()) >= 20 * MOST_WAITING - 2 * (MOST_WAITING + 128)
    assert clerk.flush().flush_pending() + len(clerk.flush()) >= 20 * MOST_WAITING


class Panic(BaseException):
    """What no handler of exceptions expects."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, torch.OutOfMemoryError, Panic])
@pytest.mark.parametrize("inline", [False, True])
def test_what_fails_beside_a_step_is_told_by_each_later_call_and_is_no_want_of_memory_of_the_model(
    open_clerk: Callable[..., BackgroundStore],
    schema: Schema,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException],
    inline: bool,
) -> None:
    clerk = open_clerk()
    clerk.add(fake_columns(schema, range(100)), PARTITIONS)
    clerk.plan_ahead(0, SAMPLED)
    assert clerk.planned(0) == SAMPLED

    def fail(*_: object) -> None:
        raise kind("no more")

    monkeypatch.setattr(clerk._store, "plan_blocks", fail)
    clerk.plan_ahead(8, SAMPLED)
    if inline:
        with pytest.raises(StoreFailedError):
            clerk.flush()
    else:
        clerk.sample(0, SAMPLED)
    for call in (lambda: clerk.sample(1, SAMPLED), clerk.has_room, clerk.flush):
        with pytest.raises(StoreFailedError, match=f"the replay store failed beside a step: {kind.__name__}: no more"):
            call()
    assert not issubclass(StoreFailedError, RuntimeError), "by which a device without memory is told"


def test_lost_events_leave_and_are_counted_where_no_step_comes(
    open_clerk: Callable[..., BackgroundStore], schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a backlog of events that are stored only."""
    clerk = open_clerk(capacity=100_000, disk={"bytes": "20MB"}, device_bytes=0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(clerk.flush().tiers.slow[0], "write", full)
    for begin in range(0, 10 * MOST_WAITING, MOST_WAITING):
        clerk.add(fake_columns(schema, range(begin, begin + MOST_WAITING)), PARTITIONS)
        clerk.plan_ahead(0, SAMPLED)
        clerk._store.tiers._courier.drain()
    assert clerk.flush().lost >= 7 * MOST_WAITING
    assert len(clerk.flush().tiers._lost) < 4


def test_nothing_is_held_on_to_that_is_done(open_clerk: Callable[..., BackgroundStore], schema: Schema) -> None:
    clerk = open_clerk()
    offered = []
    for begin in range(0, 4 * MOST_WAITING, MOST_WAITING):
        columns = fake_columns(schema, range(begin, begin + MOST_WAITING))
        offered.append(weakref.ref(columns["feature.x"]))
        clerk.add(columns, PARTITIONS)
        del columns
    clerk._at_rest().flush_pending()
    assert [each() is None for each in offered] == [True] * 4


def test_what_is_looked_for_comes_in_its_order(
    open_clerk: Callable[..., BackgroundStore], schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    clerk, order = open_clerk(), list[str]()
    monkeypatch.setattr(clerk._store, "query_neighbours", lambda step, _embedding: order.append(f"seek {step}"))
    monkeypatch.setattr(clerk._store, "add", lambda columns, *_: order.append(f"offer {len(columns['offset'])}"))
    for step in range(3):
        clerk.query_neighbours(step, np.zeros((1, 2), np.float32))
        clerk.add(fake_columns(schema, range(step + 1)), PARTITIONS)
    clerk.flush()
    assert order == ["seek 0", "offer 1", "seek 1", "offer 2", "seek 2", "offer 3"]


def test_steps_have_waited_for_what_they_waited_for_and_no_more(
    open_clerk: Callable[..., BackgroundStore], schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thread waits for beside them is no wait of theirs."""
    clerk = open_clerk()
    stats = clerk.flush().tiers.stats

    def waits(*_: object) -> None:
        stats.stall_seconds += 1000.0

    monkeypatch.setattr(clerk._store, "add", waits)
    clerk.add(fake_columns(schema, range(4)), PARTITIONS)
    clerk.plan_ahead(0, SAMPLED)
    clerk._begin()
    assert 0 <= clerk._at_rest().tiers.stats.stall_seconds < 100
    clerk.add(fake_columns(schema, range(4)), PARTITIONS)
    clerk.plan_ahead(8, SAMPLED)
    clerk.planned(8)
    assert 0 < stats.stall_seconds < 100, "a step that needs a plan waits for all before it"


def test_without_a_thread_what_is_due_is_done_by_who_has_sampled(schema: Schema) -> None:
    before = threading.active_count()
    clerk = BackgroundStore(open_store(schema), beside=False)
    assert threading.active_count() == before
    life = Life(clerk, schema)
    for n in range(1, 40):
        life.step(n)
    assert len(life.store) > HELD / 2
    clerk.close()


def test_slots_that_events_wait_for_are_not_free(open_clerk: Callable[..., BackgroundStore], schema: Schema) -> None:
    clerk = open_clerk(capacity=2000)
    clerk.flush().begin_snapshot(1)
    clerk.flush().burst = clerk.flush().slots.free - 300
    clerk.add(fake_columns(schema, range(300)), PARTITIONS)
    assert clerk.has_room()
    clerk.add(fake_columns(schema, [300]), PARTITIONS)
    assert not clerk.has_room()
    assert len(clerk.flush()) == 301, "what waits was not taken in"
