"""The clerk: what a store does beside the steps is what it would have done between them."""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.block import TopicPartition
from ingest.fake import fake_columns
from ingest.schema import Schema
from replay.build import build_store
from replay.clerk import Clerk
from replay.config import ReplaySettings
from replay.draw import Draw
from replay.store import MOST_WAITING, Store

PARTITIONS = [TopicPartition("events", 0)]
DRAWN, HELD = 12, 300
KINDS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "class-balanced and loss": {"admission": "class-balanced", "sampling": "loss"},
    "auto": {"sampling": "auto"},
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

    def offer(self, n: int) -> None:
        numbers = range(self._offered, self._offered + n)
        self._offered += n
        self._keeper.offer(fake_columns(self._schema, numbers, label=[0, 1, 1, 2, 3]), PARTITIONS)

    def step(self, n: int) -> list[float]:
        """Return the events that a step draws, after which n new ones come."""
        drawn: list[float] = []
        if self._keeper.planned(self._step):
            draw = self._keeper.draw(self._step, DRAWN)
            drawn = [*draw.records["offset"].tolist(), *draw.columns["feature.x"].flatten().tolist()]
            if self.listens:
                self._keeper.learned(draw, (draw.records["offset"] % 17).astype(np.float32))
        self.offer(n)
        self._step += 1
        kind = ("uniform", "loss")[self._step // 5 % 2]
        if isinstance(self._keeper, Clerk):
            self._keeper.plan_ahead(self._step, lambda _step: DRAWN, kind)
        else:
            if self._keeper.several is not None:
                self._keeper.several.kind = kind
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
    st.tuples(st.sampled_from(["step", "step", "step", "offer", "see", "flush", "room"]), st.integers(1, 90)),
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


def test_a_bug_in_the_thread_comes_up_in_the_next_call(
    open_clerk: Callable[..., Clerk], schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    clerk = open_clerk()
    clerk.offer(fake_columns(schema, range(100)), PARTITIONS)
    clerk.plan_ahead(0, DRAWN)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    clerk.planned(0)
    clerk.plan_ahead(4, DRAWN)
    clerk.plan_ahead(8, DRAWN)
    monkeypatch.setattr(clerk._store, "plan_blocks", fail)
    clerk.draw(0, DRAWN)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        clerk.draw(1, DRAWN)


def test_slots_that_events_wait_for_are_not_free(open_clerk: Callable[..., Clerk], schema: Schema) -> None:
    clerk = open_clerk(capacity=2000)
    clerk.store.hold(1)
    clerk.store.burst = clerk.store.slots.free - 300
    clerk.offer(fake_columns(schema, range(300)), PARTITIONS)
    assert clerk.has_room()
    clerk.offer(fake_columns(schema, [300]), PARTITIONS)
    assert not clerk.has_room()
    assert len(clerk.store) == 301, "what waits was not taken in"
