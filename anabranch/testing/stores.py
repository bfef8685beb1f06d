"""Stores in one thread: adding and planning at once, and checkpoints of a store without files."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.partition import TopicPartition
from anabranch.replay.checkpoint import CapturedStore
from anabranch.replay.sample_plan import Sample, SamplePlan
from anabranch.replay.snapshot import StoreSnapshot
from anabranch.replay.store import Store


def add_now(
    store: Store,
    columns: Mapping[str, Array],
    partitions: Sequence[TopicPartition],
    embedding: NDArray[np.float32] | None = None,
) -> int:
    """Add N events as `Store.add` does, but at once; return how many of all pending events were admitted."""
    return store.add(columns, partitions, embedding) + store.flush_pending()


def plan_ahead(store: Store, step: int, n: int | Callable[[int], int]) -> None:
    """Plan what `SamplePlanner.blocks` returns, as `BackgroundStore.plan_ahead` does, but at once."""
    store.plan_blocks(step, store.planner.blocks(step, store.planner.planned_through, n))


def plan_of(store: Store, step: int, n: int) -> SamplePlan:
    """Choose n events for a step, or all when fewer are held, and prefetch their rows to the device."""
    store.flush_pending()
    return store.planner.plan([(step, n)])[0]


def sample_of(store: Store, step: int, n: int) -> Sample:
    """Choose n events for a step, or all when fewer are held, and fetch those that can be read."""
    return store.planner.fetch(plan_of(store, step, n))


class FakeCheckpoints:
    """The checkpoints of one store. Each is captured as changes of the previous one, and returned complete."""

    def __init__(self, store: Store, before: StoreSnapshot | None = None) -> None:
        self._store = store
        self._before = before

    def checkpoint(self, number: int, oldest: int | None = None) -> StoreSnapshot:
        """Checkpoint the store, and release what only checkpoints before `oldest`, by default before this one, need."""
        contents = self.finish(self._store.begin_snapshot(number))
        self._store.end_snapshot(number if oldest is None else oldest)
        return contents

    def finish(self, captured: CapturedStore) -> StoreSnapshot:
        """Return the captured contents; the caller calls `end_snapshot`."""
        state, change = captured.contents()
        index, payload = change.index, change.payload
        if change.base is not None:
            assert self._before is not None
            assert self._before.state.checkpoint == change.base
            index = np.concatenate([self._before.index[change.alive], index])
            if payload is not None and self._before.payload is not None:
                payload = torch.cat([self._before.payload[torch.from_numpy(change.alive)], payload])
        self._before = StoreSnapshot(state, index, payload)
        return self._before
