"""The clerk of a store: takes in what is offered, and plans ahead, in a thread of its own.

What a step leaves to the store is written down and costs its caller next to nothing. It is done, in the order in which
it was asked for, beside the next step: begun when that has its sample, and ended, as a rule, before the one after it
wants one. So no timing decides what is held or sampled: both are what they would be without the thread.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import AnabranchError
from ingest.events.block import Array
from ingest.events.partition import TopicPartition
from replay.checkpoint.capture import CapturedStore
from replay.plan import Sample
from replay.snapshot import StoreDelta, StoreState
from replay.store import Store

_Job = Callable[[], object]


class StoreFailedError(Exception):
    """The store has failed at what it was to do: a bug, or a device that has no memory left. It is not to be used."""


class BackgroundStore:
    """Keeps one store, which nobody else may change except by way of `flush`. Used by one thread.

    Either that thread has the store or the clerk's own does, never both: each call that needs it waits until the other
    is done with it, which counts as waiting for a slower tier. What never changes may be asked for at any time.
    """

    def __init__(self, store: Store, *, beside: bool = True) -> None:
        """Take a store; unless `beside` what is due is done at once, by whoever has sampled."""
        self._store = store
        self._jobs: list[_Job] = []
        self._offered = 0
        """Events among the jobs."""
        self._step = 0
        self._through = store.planned_through
        """The last step that is planned once the jobs are done."""
        self._due = False
        self._busy = threading.Lock()
        self._given: queue.SimpleQueue[list[_Job] | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        self._thread: threading.Thread | None = None
        if beside:
            self._thread = threading.Thread(target=self._run, name="clerk", daemon=True)
            self._thread.start()
        self.listens = store.listens
        """Whether `learned` changes anything."""
        self.fields = store.fields
        """The columns that are kept of an event."""
        self.spare = store.spare
        """Slots beyond those for the events held."""

    def flush(self) -> Store:
        """Run all queued jobs and return the store. Do not keep the reference across other calls.

        Raises:
            StoreFailedError: it has failed, now or before.
        """
        store = self._at_rest()
        self._do(self._take())
        self._raise()
        store.use_up(self._step)
        return store

    @property
    def problem(self) -> str | None:
        """One sentence on what does not work as it should; any thread may ask."""
        return self._store.problem

    def add(
        self,
        columns: Mapping[str, Array],
        partitions: Sequence[TopicPartition],
        embedding: NDArray[np.float32] | None = None,
    ) -> None:
        """Offer events, as `Store.offer` does."""
        self._jobs.append(partial(self._store.add, columns, partitions, embedding))
        self._offered += len(columns["offset"])
        if self._store.are_many(self._offered):
            # Begun with the next sample, or where none comes with the next offer.
            if self._due:
                self._begin()
            self._due = bool(self._jobs)

    def plan_ahead(self, step: int, n: int | Callable[[int], int]) -> None:
        """Plan for the steps from `step` on, as `Store.plan_ahead` does."""
        self._step = step
        blocks = self._store.blocks(step, self._through, n)
        if blocks or self._store.tiers.has_lost:
            self._jobs.append(partial(self._store.plan_blocks, step, blocks))
            self._due = True
        if blocks:
            self._through = blocks[-1][-1][0]

    def planned(self, step: int) -> int:
        """Return how many events can be sampled for a step."""
        return self._with_plan(step).planned(step) if step <= self._through else 0

    def sample(self, step: int, n: int) -> Sample:
        """Return the first n events of the plan for a step, as `Store.sample` does, and let what is due be done."""
        sample = self._with_plan(step).sample(step, n)
        if self._due:
            self._begin()
        return sample

    def update_priorities(
        self, sample: Sample, losses: NDArray[np.float32], embedding: NDArray[np.float32] | None = None
    ) -> None:
        """Hear what a step said of the events of its sample, as `Store.learned` does."""
        self._jobs.append(partial(self._store.update_priorities, sample, losses, embedding))

    def remove(self, slots: NDArray[np.int32], records: NDArray[np.void]) -> None:
        """Let events of a sample leave, as `Store.remove` does."""
        self._jobs.append(partial(self._store.remove, slots, records))
        self._due = True

    def query_neighbours(self, step: int, embedding: NDArray[np.float32]) -> None:
        """Look for old events that are near to new ones, as `Store.seek` does."""
        self._jobs.append(partial(self._store.query_neighbours, step, embedding))

    def has_room(self) -> bool:
        """Return whether the events of a step would find slots, beside those that wait."""
        return self._at_rest().has_room(self._offered) or self.flush().has_room()

    @property
    def slots_waiting(self) -> int:
        """Slots that wait for a checkpoint to be gone."""
        return self._at_rest().slots.waiting

    def contents(self, held: CapturedStore) -> tuple[StoreState, StoreDelta]:
        """Return what was held, as `Store.contents` does; in any thread."""
        return self._store.contents(held)

    def mark_named(self) -> None:
        """Have the store's files marked as named by a checkpoint, as `Tiers.mark_named` does; in any thread."""
        self._store.tiers.mark_named()

    def close(self) -> None:
        """End the thread, leave undone what was not begun, and close the store."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
        self._store.close()

    def _with_plan(self, step: int) -> Store:
        """Return the store when it has the plan for a step, if that was asked for."""
        store, stats = self._at_rest(), self._store.tiers.stats
        if store.planned_through < step:
            begin, before = time.perf_counter(), stats.stall_seconds
            store = self.flush()
            stats.stall_seconds = before + time.perf_counter() - begin
        return store

    def _at_rest(self) -> Store:
        """Return the store, once the thread leaves it alone; jobs may wait."""
        if self._busy.locked():
            begin = time.perf_counter()
            with self._busy:
                pass
            self._store.tiers.stats.stall_seconds += time.perf_counter() - begin
        self._raise()
        return self._store

    def _take(self) -> list[_Job]:
        jobs, self._jobs, self._offered, self._due = self._jobs, [], 0, False
        return jobs

    def _begin(self) -> None:
        """Have what was asked for done."""
        self._at_rest()
        if self._thread is None:
            self._do(self._take())
            self._raise()
        else:
            self._busy.acquire()
            self._given.put(self._take())

    def _do(self, jobs: list[_Job]) -> None:
        """Do them, and hold on to none that is done. What fails leaves those after it undone, for good."""
        jobs.reverse()
        try:
            while jobs:
                jobs.pop()()
        except BaseException as exc:  # noqa: BLE001 whatever it is: whoever waits for the thread hears of it
            self._failed = exc

    def _raise(self) -> None:
        """Raise what has failed: not as it is, since out of memory is not the model's here."""
        if isinstance(self._failed, AnabranchError):
            raise self._failed
        if self._failed is not None:
            told = f"{type(self._failed).__name__}: {self._failed}"
            raise StoreFailedError(f"the replay store failed beside a step: {told}") from self._failed

    def _run(self) -> None:
        stats = self._store.tiers.stats
        while (jobs := self._given.get()) is not None:
            waited = stats.stall_seconds
            self._do(jobs)
            stats.stall_seconds = waited  # for what this thread has waited no step has
            self._busy.release()
