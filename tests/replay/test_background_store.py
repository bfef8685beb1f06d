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
from replay.background_store import Clerk, ClerkError
from replay.build import build_store
from replay.config import ReplaySettings
from replay.erasure.erased_events import ByRange, ErasedEvents
from replay.plan import Draw
from replay.store import MOST_WAITING, Store

PARTITIONS = [TopicPartition("events", 0)]
DRAWN, HELD = 12, 300
KINDS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "class-balanced and loss": {"admission": "class-balanced", "sampling": "loss"},
    "disk": {"disk": {"bytes": "60kB"}, "device_bytes": "1kB"},
}


def open_store(schema: Schema, folder: Path | None = None, **options: Any) -> Store:
    chosen = ReplaySettings.model_validate({"capacity": HELD, **options})
    return build_store(chosen, schema, torch.device("cpu"), 0, folder)


@pytest.fixture
def open_clerk(schema: Schema, tmp_path: Path) -> Iterator[Callable[..., Clerk]]:
    """`open_clerk(**options)`: one of a store with such settings."""
    clerks: list[Clerk] = []

    def make(**options: Any) -> Clerk:
        clerks.append(Clerk(open_store(schema, tmp_path, **options)))
        return clerks[-1]

    yield make
    for clerk in clerks:
        clerk.close()


class Life:
    """What a learner does with a store or with its clerk, which is told by digests of what it sees."""

    def __init__(self, keeper: Store | Clerk, schema: Schema) -> None:
        self._keeper, self._schema = keeper, schema
        self._step = self._offered = 0
        keeper.plan_ahead(0, DRAWN)

    @property
    def store(self) -> Store:
        return self._keeper.store if isinstance(self._keeper, Clerk) else self._keeper

    def offer(self, n: int, again: int = 0) -> None:
        """Offer n events, of which the first were offered already."""
        begin = max(0, self._offered - again)
        columns = fake_columns(self._schema, range(begin, begin + n), label=[0, 1, 1, 2, 3])
        columns["weight"] = (1 + columns["offset"] % 3).astype(np.float32)
        self._offered = max(self._offered, begin + n)
        self._keeper.offer(columns, PARTITIONS)

    def erase(self, first: int, last: int) -> int:
        record = ByRange(time=0.0, by="test", partition="events#0[0]", first=first, last=last)
        return self.store.erase(ErasedEvents([record]))

    def step(self, n: int) -> list[float]:
        """Return the events that a step draws, after which n new ones come."""
        drawn: list[float] = []
        if self._keeper.planned(self._step):
            draw = self._keeper.draw(self._step, DRAWN)
            drawn = [*draw.records["offset"].tolist(), *draw.importance.tolist()]
            drawn += draw.columns["feature.x"].flatten().tolist()
            if self.listens:
                self._keeper.learned(draw, (draw.records["offset"] % 17).astype(np.float32))
        self.offer(n)
        self._step += 1
        self._keeper.plan_ahead(self._step, DRAWN)
        return drawn

    @property
    def listens(self) -> bool:
        return self._keeper.listens

    def seen(self) -> list[tuple[int, ...]]:
        """Return who is held, in order, and what is planned."""
        self.store.take_in()
        plans = [tuple(plan.records["offset"].tolist()) for plan in self.store._plans if plan.step >= self._step]
        return [tuple(self.store.entries.copy()["offset"].tolist()), *plans]


acts = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "offer", "again", "see", "flush", "room", "erase"]),
        st.integers(1, 90),
    ),
    min_size=5,
    max_size=60,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(acts)
def test_no_timing_decides_what_is_held_or_drawn(schema: Schema, kind: str, asked: list[tuple[str, int]]) -> None:
    """Whatever is asked for between the steps, and however far the thread has come by then."""
    with contextlib.ExitStack() as stack:
        plain, kept = (
            open_store(schema, Path(stack.enter_context(tempfile.TemporaryDirectory())), **KINDS[kind])
            for _ in range(2)
        )
        clerk = Clerk(kept)
        stack.callback(clerk.close)
        stack.callback(plain.close)
        one, other = Life(plain, schema), Life(clerk, schema)
        for act, n in asked:
            if act == "step":
                assert one.step(n) == other.step(n)
            elif act == "offer":
                one.offer(n)
                other.offer(n)
            elif act == "again":
                one.offer(n, n // 2)
                other.offer(n, n // 2)
            elif act == "erase":
                assert one.erase(n, n + n // 3) == other.erase(n, n + n // 3)
            elif act == "see":
                assert one.seen() == other.seen()
            elif act == "flush":
                other.store.take_in()
            else:
                clerk.has_room()
        assert one.seen() == other.seen()


def hold_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let the store take in nothing until the second event is set; the first says that it has begun to."""
    begun, opened = threading.Event(), threading.Event()
    take_in = store.take_in

    def held_up() -> int:
        begun.set()
        assert opened.wait(30)
        return take_in()

    monkeypatch.setattr(store, "take_in", held_up)
    return begun, opened


def test_a_step_goes_on_while_the_store_takes_in_and_the_next_one_waits(
    open_clerk: Callable[..., Clerk], schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    clerk = open_clerk()
    for step in range(5):
        clerk.offer(fake_columns(schema, range(step * 40, step * 40 + 40)), PARTITIONS)
        clerk.plan_ahead(step, DRAWN)
    assert clerk.planned(7) == DRAWN
    assert clerk.planned(8) == 0
    stalled = clerk.store.tiers.stats.stall_seconds
    begun, opened = hold_up(clerk.store, monkeypatch)
    clerk.offer(fake_columns(schema, range(200, 240)), PARTITIONS)
    clerk.plan_ahead(5, DRAWN)
    assert not begun.is_set(), "nothing is begun between two steps"
    assert len(clerk.draw(5, DRAWN)) == DRAWN
    assert begun.wait(30), "a step that has its draw lets it begin"
    clerk.offer(fake_columns(schema, range(240, 280)), PARTITIONS)
    drawn: list[Draw] = []
    thread = threading.Thread(target=lambda: drawn.append(clerk.draw(6, DRAWN)))
    thread.start()
    assert not drawn
    opened.set()
    thread.join(30)
    assert len(drawn[0]) == DRAWN
    assert clerk.store.tiers.stats.stall_seconds > stalled, "what a step waited for is told"


def test_offers_that_nobody_draws_from_are_taken_in_too(open_clerk: Callable[..., Clerk], schema: Schema) -> None:
    clerk, most = open_clerk(capacity=100_000), 0
    for begin in range(0, 20 * MOST_WAITING, 128):
        clerk.offer(fake_columns(schema, range(begin, begin + 128)), PARTITIONS)
        most = max(most, clerk._offered)
    assert most <= MOST_WAITING + 128
    assert len(clerk._at_rest()) >= 20 * MOST_WAITING - 2 * (MOST_WAITING + 128)
    assert clerk.store.take_in() + len(clerk.store) >= 20 * MOST_WAITING


class Panic(BaseException):
    """What no handler of exceptions expects."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, torch.OutOfMemoryError, Panic])
@pytest.mark.parametrize("inline", [False, True])
def test_what_fails_beside_a_step_is_told_by_each_later_call_and_is_no_want_of_memory_of_the_model(
    open_clerk: Callable[..., Clerk],
    schema: Schema,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException],
    inline: bool,
) -> None:
    clerk = open_clerk()
    clerk.offer(fake_columns(schema, range(100)), PARTITIONS)
    clerk.plan_ahead(0, DRAWN)
    assert clerk.planned(0) == DRAWN

    def fail(*_: object) -> None:
        raise kind("no more")

    monkeypatch.setattr(clerk._store, "plan_blocks", fail)
    clerk.plan_ahead(8, DRAWN)
    if inline:
        with pytest.raises(ClerkError):
            _ = clerk.store
    else:
        clerk.draw(0, DRAWN)
    for call in (lambda: clerk.draw(1, DRAWN), clerk.has_room, lambda: clerk.store):
        with pytest.raises(ClerkError, match=f"the replay store failed beside a step: {kind.__name__}: no more"):
            call()
    assert not issubclass(ClerkError, RuntimeError), "by which a device without memory is told"


def test_lost_events_leave_and_are_counted_where_no_step_comes(
    open_clerk: Callable[..., Clerk], schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a backlog of events that are stored only."""
    clerk = open_clerk(capacity=100_000, disk={"bytes": "20MB"}, device_bytes=0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(clerk.store.tiers.slow[0], "write", full)
    for begin in range(0, 10 * MOST_WAITING, MOST_WAITING):
        clerk.offer(fake_columns(schema, range(begin, begin + MOST_WAITING)), PARTITIONS)
        clerk.plan_ahead(0, DRAWN)
        clerk._store.tiers._courier.drain()
    assert clerk.store.lost >= 7 * MOST_WAITING
    assert len(clerk.store.tiers._lost) < 4


def test_nothing_is_held_on_to_that_is_done(open_clerk: Callable[..., Clerk], schema: Schema) -> None:
    clerk = open_clerk()
    offered = []
    for begin in range(0, 4 * MOST_WAITING, MOST_WAITING):
        columns = fake_columns(schema, range(begin, begin + MOST_WAITING))
        offered.append(weakref.ref(columns["feature.x"]))
        clerk.offer(columns, PARTITIONS)
        del columns
    clerk._at_rest().take_in()
    assert [each() is None for each in offered] == [True] * 4


def test_what_is_looked_for_comes_in_its_order(
    open_clerk: Callable[..., Clerk], schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    clerk, order = open_clerk(), list[str]()
    monkeypatch.setattr(clerk._store, "seek", lambda step, _embedding: order.append(f"seek {step}"))
    monkeypatch.setattr(clerk._store, "offer", lambda columns, *_: order.append(f"offer {len(columns['offset'])}"))
    for step in range(3):
        clerk.seek(step, np.zeros((1, 2), np.float32))
        clerk.offer(fake_columns(schema, range(step + 1)), PARTITIONS)
    _ = clerk.store
    assert order == ["seek 0", "offer 1", "seek 1", "offer 2", "seek 2", "offer 3"]


def test_steps_have_waited_for_what_they_waited_for_and_no_more(
    open_clerk: Callable[..., Clerk], schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thread waits for beside them is no wait of theirs."""
    clerk = open_clerk()
    stats = clerk.store.tiers.stats

    def waits(*_: object) -> None:
        stats.stall_seconds += 1000.0

    monkeypatch.setattr(clerk._store, "offer", waits)
    clerk.offer(fake_columns(schema, range(4)), PARTITIONS)
    clerk.plan_ahead(0, DRAWN)
    clerk._begin()
    assert 0 <= clerk._at_rest().tiers.stats.stall_seconds < 100
    clerk.offer(fake_columns(schema, range(4)), PARTITIONS)
    clerk.plan_ahead(8, DRAWN)
    clerk.planned(8)
    assert 0 < stats.stall_seconds < 100, "a step that needs a plan waits for all before it"


def test_without_a_thread_what_is_due_is_done_by_who_has_drawn(schema: Schema) -> None:
    before = threading.active_count()
    clerk = Clerk(open_store(schema), beside=False)
    assert threading.active_count() == before
    life = Life(clerk, schema)
    for n in range(1, 40):
        life.step(n)
    assert len(life.store) > HELD / 2
    clerk.close()


def test_slots_that_events_wait_for_are_not_free(open_clerk: Callable[..., Clerk], schema: Schema) -> None:
    clerk = open_clerk(capacity=2000)
    clerk.store.hold(1)
    clerk.store.burst = clerk.store.slots.free - 300
    clerk.offer(fake_columns(schema, range(300)), PARTITIONS)
    assert clerk.has_room()
    clerk.offer(fake_columns(schema, [300]), PARTITIONS)
    assert not clerk.has_room()
    assert len(clerk.store) == 301, "what waits was not taken in"
