"""Runs store updates in a background thread, in call order.

A step only enqueues them. They start once the next step has its sample, and normally end before the step after that
needs one. Timing does not influence which events are held or sampled: they are the same as without the thread.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import AnabranchError
from anabranch.core.job_thread import JobThread
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.partition import TopicPartition
from anabranch.replay.sample_plan import AHEAD, Sample
from anabranch.replay.store import Store

_Job = Callable[[], object]


class StoreFailedError(Exception):
    """A job of the store has failed: a bug, or a device without free memory. The store must not be used any more."""


class BackgroundStore:
    """Owns one store, which others may change only through `flush`. Used by one thread.

    Either that thread uses the store or the background thread does, never both: a call that needs the store waits until
    the background thread is done, and counts that as waiting for a slower tier. Constants may be read at any time.
    """

    def __init__(self, store: Store, *, in_background: bool = True) -> None:
        """Take a store; `in_background`: run jobs in a background thread, else within `sample`."""
        self._store = store
        self._jobs: list[_Job] = []
        self._added = 0
        """Events that the jobs add."""
        self._step = 0
        self.through = store.planner.planned_through
        """The last step that is planned once the jobs are done."""
        self.ready_through = self.through
        """The last step that was planned before the last call of `plan_ahead`: by the next step these jobs are done."""
        self._due = False
        self._failed: BaseException | None = None
        self._in_background = in_background
        self._thread = JobThread("store")
        if in_background:
            self._thread.start()
        self.listens = store.listens
        """Whether `update_priorities` changes anything."""
        self.fields = store.fields
        """The columns that are kept of an event."""
        self.spare = store.spare
        """Slots beyond those for the held events."""
        self.burst = store.burst
        """How many events may be added between two calls of `has_room`, while slots are not `free_at_once`."""
        self.slots = store.slots
        """Only to be asked whether they are `free_at_once`."""

    def flush(self) -> Store:
        """Run all queued jobs and return the store. Do not keep the reference across other calls.

        Raises:
            StoreFailedError: it has failed, now or before.
        """
        store = self._at_rest()
        self._do(self._take())
        self._raise()
        store.planner.drop_before(self._step)
        return store

    @property
    def problem(self) -> str | None:
        """One sentence on what does not work, else None; any thread may ask."""
        problems = self._store.tiers.problem, self._store.embeddings.problem
        return "; ".join(sentence for sentence in problems if sentence is not None) or None

    def add(
        self,
        columns: Mapping[str, Array],
        partitions: Sequence[TopicPartition],
        embedding: NDArray[np.float32] | None = None,
    ) -> None:
        """Add events, as `Store.add` does."""
        self._jobs.append(partial(self._store.add, columns, partitions, embedding))
        self._added += len(columns["offset"])
        if self._added >= self._store.pending_limit:
            # The jobs begin with the next sample, or without one with the next call of `add`.
            if self._due:
                self._begin()
            self._due = bool(self._jobs)

    def plan_ahead(self, step: int, n: int | Callable[[int], int], ahead: int = AHEAD) -> None:
        """Plan for the steps from `step` on, as `SamplePlanner.blocks` says; drop the plans for earlier steps."""
        self._step, self.ready_through = step, self.through
        missing = self.through < step + ahead - 1
        blocks = self._store.planner.blocks(step, self.through, n, ahead) if missing else []
        if missing or self._store.tiers.lost_reports:
            self._jobs.append(partial(self._store.plan_blocks, step, blocks))
            self._due = True
        if missing:
            self.through = blocks[-1][-1][0]

    def planned(self, step: int) -> int:
        """Return how many events can be sampled for a step."""
        return self._with_plan(step).planner.planned(step) if step <= self.through else 0

    def sample(self, step: int, *counts: int) -> Sample | None:
        """Return the first events of the plan for a step, or of those for some, as `SamplePlanner.sample` does; None
        without any. Starts the jobs that are due."""
        if step + len(counts) - 1 > self.through:
            return None
        sample = self._at_rest().planner.sample(step, *counts)
        if sample is None and len(counts) == 1:
            sample = self._with_plan(step).planner.sample(step, *counts)
        if sample is not None and self._due:
            self._begin()
        return sample if sample is not None and len(sample.slots) else None

    def update_priorities(
        self, sample: Sample, losses: NDArray[np.float32], embedding: NDArray[np.float32] | None = None
    ) -> None:
        """Give the sampler what a step computed, as `Store.update_priorities` does."""
        self._jobs.append(partial(self._store.update_priorities, sample, losses, embedding))

    def remove(
        self,
        events: Mapping[str, Array] | NDArray[np.void],
        slots: NDArray[np.int32] | None = None,
        partitions: Sequence[TopicPartition] = (),
    ) -> None:
        """Remove events, as `Store.remove` does."""
        self._jobs.append(partial(self._store.remove, events, slots, partitions))
        self._due = True

    def query_neighbours(self, step: int, embedding: NDArray[np.float32]) -> None:
        """Search held events near new ones, as `EventEmbeddings.query` does."""
        self._jobs.append(partial(self._store.embeddings.query, step, embedding))

    def has_room(self) -> bool:
        """Return whether there are slots for the events of a step and those of the jobs."""
        return self._at_rest().has_room(self._added) or self.flush().has_room()

    def many_slots_wait(self, checkpoints: int) -> bool:
        """Return whether the slots that wait for one checkpoint to be removed exceed a part of the spare ones."""
        return self._at_rest().slots.waiting * checkpoints > self.spare

    def close(self) -> None:
        """End the thread, drop the jobs that have not begun, and close the store."""
        self._thread.close()
        self._store.close()

    def _with_plan(self, step: int) -> Store:
        """Return the store once it has the plan for a step, if that was requested."""
        store, stats = self._at_rest(), self._store.tiers.stats
        if store.planner.planned_through < step:
            begin, before = time.perf_counter(), stats.stall_seconds
            store = self.flush()
            stats.stall_seconds = before + time.perf_counter() - begin
        return store

    def _at_rest(self) -> Store:
        """Return the store once the thread does not use it; jobs may be pending."""
        if self._thread.busy:
            waited = self._thread.wait()  # before the sum is read: jobs change it, and restore it at their end
            self._store.tiers.stats.stall_seconds += waited
        self._raise()
        return self._store

    def _take(self) -> list[_Job]:
        jobs, self._jobs, self._added, self._due = self._jobs, [], 0, False
        return jobs

    def _begin(self) -> None:
        """Run the enqueued jobs, in the background thread if that is to be used."""
        self._at_rest()
        if self._in_background:
            self._thread.submit(partial(self._do_in_background, self._take()))
        else:
            self._do(self._take())
            self._raise()

    def _do(self, jobs: list[_Job]) -> None:
        """Run jobs, and release each once it is done. After one that fails no other runs."""
        jobs.reverse()
        try:
            while jobs:
                jobs.pop()()
        except BaseException as exc:  # noqa: BLE001 any failure is raised by the next call
            self._failed = exc

    def _raise(self) -> None:
        """Raise the failure, wrapped: an out-of-memory error must not be taken for the model's."""
        if isinstance(self._failed, AnabranchError):
            raise self._failed
        if self._failed is not None:
            failure = f"{type(self._failed).__name__}: {self._failed}"
            raise StoreFailedError(f"the replay store failed in the background of a step: {failure}") from self._failed

    def _do_in_background(self, jobs: list[_Job]) -> None:
        stats = self._store.tiers.stats
        waited = stats.stall_seconds
        self._do(jobs)
        stats.stall_seconds = waited  # no step waited while this thread did
