"""The store: holds events of the stream for replay.

It composes four policies: which events are held (`Admission` and `Quotas`), which are sampled (`Sampler`), which tiers
hold the payload (`TierHierarchy`), and how many events a step replays (chosen by the caller).

Legend: N events of an addition, H events held, n events of a sample, D numbers of an embedding.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array
from ingest.events.partition import TopicPartition
from replay.checkpoint.capture import CapturedStore
from replay.checkpoint.restore import StoreRestore
from replay.checkpoint.slot_allocator import SlotAllocator
from replay.embedding_index.client import NeighbourClient
from replay.erasure.erased_events import ErasedEvents
from replay.held_events import HeldEvents
from replay.payload.hierarchy import TierHierarchy
from replay.policies import Policies
from replay.reservoir.event_table import RECORD, EventTable
from replay.reservoir.pending_events import PendingEvents, pending_limit
from replay.reservoir.reservoir import Reservoir
from replay.row_layout import Fields, RowLayout
from replay.sample_plan import Sample, SamplePlan
from replay.sample_planner import BLOCK, Request, SamplePlanner
from replay.snapshot import StoreDelta, StoreSnapshot, StoreState
from replay.tiers.tier import Tier

MAX_INSERTED = 1024
"""The most events that are inserted at once."""


class Store:
    """At most `quotas.limit` events, in tiers. Used by one thread, except `contents`.

    Adding is idempotent: an event is admitted by its priority alone, and a held event is not added twice. The events of
    a partition normally arrive in ascending order; then a watermark makes that check free.
    """

    def __init__(
        self,
        policies: Policies,
        event_table: EventTable,
        layout: RowLayout,
        tiers: TierHierarchy,
        seed: int,
        *,
        weighted: bool,
        step: int = 0,
        complete: bool = False,
    ) -> None:
        """Compose the store; a step may add up to `step` events. `complete`: checkpoints have the payload."""
        spare = tiers.slots - policies.quotas.limit
        self.burst = max(min(MAX_INSERTED, spare // 2), policies.quotas.slots_for(step))
        """Slots that must be free for a step to store its events."""
        assert 0 < self.burst <= spare
        self.spare = spare
        """Slots beyond those for the held events."""
        self.tiers = tiers
        self._row_bytes = layout.row_bytes if complete and tiers.durable else None
        self.event_table = event_table
        self.slots = SlotAllocator(tiers.slots, durable=tiers.durable)
        self.reservoir = Reservoir(policies.admission, policies.quotas, event_table, seed)
        self.planner = SamplePlanner(policies, self.reservoir, layout, tiers, seed, weighted=weighted)
        self._held = HeldEvents(policies, self.reservoir, layout, tiers, self.slots, self.planner)
        self._sampler = policies.sampler
        self._tracker = policies.tracker
        self._recent = policies.recent
        self.listens = self._sampler.uses_losses or self._sampler.uses_embeddings or self._tracker is not None
        """Whether `update_priorities` changes anything."""
        self._layout = layout
        self.fields: Fields = layout.fields
        """The columns that are kept of an event."""
        self._seed = seed
        self._first_checkpoint: int | None = None
        self._cleanup_actions: list[Callable[[], None]] = []
        self._pending = PendingEvents()
        self.pending_limit = pending_limit(layout.row_bytes)
        """The number of pending events at which they are added."""
        self._pending_blocks_limit = BLOCK if policies.sampler.divisible and policies.tracker is None else 1

    def __len__(self) -> int:
        return len(self.event_table)

    @property
    def lost(self) -> int:
        """Events that should be held but are not: no slot could be written, or the payload could not be read."""
        return self._held.missing.count

    @property
    def rows(self) -> dict[str, int]:
        """Held events, by tier."""
        return self.tiers.rows(len(self))

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of the held events, by tier."""
        return self.tiers.bytes(len(self))

    @property
    def bounds(self) -> dict[str, int]:
        """Bytes that each tier may hold."""
        return self.tiers.bounds

    @property
    def capacity(self) -> int:
        """Events that a full store holds."""
        return self.reservoir.quotas.k

    @property
    def neighbours(self) -> NeighbourClient | None:
        """The client of the embedding index; None where no policy needs one."""
        return None if self._tracker is None else self._tracker.neighbours

    @property
    def problem(self) -> str | None:
        """One sentence on what does not work, else None."""
        problems = (self.tiers.problem, None if self.neighbours is None else self.neighbours.problem)
        return "; ".join(sentence for sentence in problems if sentence is not None) or None

    def has_room(self, more: int = 0) -> bool:
        """Return whether there are slots for the events of a step and `more` others; may add pending events.

        If slots are free as soon as their events are removed, there is room for any number, one part at a time.
        """
        if self.slots.free_at_once or self.slots.free - len(self._pending) - more >= self.burst:
            return True
        self.flush_pending()
        return self.slots.free - more >= self.burst

    def add(
        self,
        columns: Mapping[str, Array],
        partitions: Sequence[TopicPartition],
        embedding: NDArray[np.float32] | None = None,
    ) -> int:
        """Add N events; they stay pending until there are enough, or the store is sampled, captured or changed.

        The held events are the same as if each block was added at once. Returns how many pending ones were admitted.

        Args:
            columns: a block's columns, each `[N, ...]`; they must not change any more.
            partitions: the table that the column `partition` points into.
            embedding: of the model, float32 `[N, D]`, NaN where it is unknown; None: of no event.
        """
        self.event_table.register(partitions)
        self._pending.put(columns, embedding)
        if len(self._pending.blocks) == self._pending_blocks_limit or len(self._pending) >= self.pending_limit:
            return self.flush_pending()
        return 0

    def flush_pending(self) -> int:
        """Add the pending events, and return how many were admitted."""
        pending, self._pending = self._pending, PendingEvents()
        return self._held.add(pending) if pending.blocks else 0

    def update_priorities(
        self, sample: Sample, losses: NDArray[np.float32], embedding: NDArray[np.float32] | None = None
    ) -> None:
        """Update the sampler by the losses and embeddings that a step computed for the n events of its sample.

        Args:
            sample: the events that the step replayed.
            losses: of each event, float32 `[n]`, NaN where it is unknown.
            embedding: of the model, float32 `[n, D]`, NaN where it is unknown; None: of no event.
        """
        held = (sample.slots >= 0) & self.event_table.still_at(sample.slots, sample.records)
        known = held & ~np.isnan(losses)
        self._sampler.update_priorities(sample.slots[known], losses[known])
        if embedding is not None:
            known = held & np.isfinite(embedding).all(axis=1)
            self._sampler.update_embeddings(sample.slots[known], embedding[known])
            if self._tracker is not None:
                self._tracker.update(sample.slots[known], embedding[known])

    def remove(self, slots: NDArray[np.int32], records: NDArray[np.void]) -> None:
        """Remove those of n sampled events that are still held; plans that name them keep their rows."""
        self.flush_pending()
        held = slots[(slots >= 0) & self.event_table.still_at(slots, records)]
        if len(held):
            self._held.keep(self._held.except_in(held))

    def remove_events(self, columns: Mapping[str, Array], partitions: Sequence[TopicPartition]) -> None:
        """Remove those of n events that are held, by `partition`, `offset` and `row`; reads the table of all events."""
        self.event_table.register(partitions)
        self.flush_pending()
        events = np.zeros(len(columns["offset"]), RECORD)
        for name in ("partition", "offset", "row"):
            events[name] = columns[name]
        slots = self.event_table.find(events)
        if (held := slots[slots >= 0]).size:
            self._held.keep(self._held.except_in(held))

    def query_neighbours(self, step: int, embedding: NDArray[np.float32]) -> None:
        """Search held events near new ones, float32 `[N, D]`, for later samples; does not wait for the answer."""
        if self._tracker is not None:
            self._tracker.query(step, embedding)

    def plan(self, step: int, n: int) -> SamplePlan:
        """Choose n events for a step, or all when fewer are held, and prefetch their rows to the device."""
        self._prepare_plan()
        return self.planner.plan([(step, n)])[0]

    def plan_blocks(self, step: int, blocks: Sequence[Request]) -> None:
        """Plan consecutive blocks of steps; drop the plans for steps before `step`."""
        self._held.remove_lost()
        self.planner.drop_before(step)
        for request in blocks:
            self._prepare_plan()
            self.planner.append(request)

    def fetch(self, plan: SamplePlan, n: int | None = None) -> Sample:
        """Return the first n events of a plan, or all; fewer when the rows of some cannot be read."""
        return self.planner.fetch(plan, n)

    def sample(self, step: int, n: int) -> Sample | None:
        """Return the first n events of the plan for a step, as `SamplePlanner.sample` does."""
        return self.planner.sample(step, n)

    def begin_snapshot(self, number: int) -> CapturedStore:
        """Copy what checkpoint `number` needs; the slots that it names are not written until `end_snapshot`.

        Copies only the changes since the previous checkpoint, and one bit for each of its events. Not reentrant.
        """
        self.flush_pending()
        self._first_checkpoint = self._first_checkpoint or number
        plans = self.planner.begin_snapshot()
        change, reservoir_state = self.reservoir.begin_snapshot(number)
        state = StoreState(
            checkpoint=number,
            file=self.tiers.file,
            retired=self.slots.begin_snapshot(number),
            plans=(),
            sampler=self._sampler.state(),
            row_bytes=self._row_bytes,
            stamp=uuid.uuid4().hex[:16],
            **reservoir_state,
        )
        return CapturedStore(state, change, self.event_table.identity(change.index["slot"]), plans)

    def contents(self, held: CapturedStore, oldest: int = 0) -> tuple[StoreState, StoreDelta]:
        """Return the captured state, as `CapturedStore.contents` does. Any thread, until `end_snapshot`.

        Raises:
            OSError: the tier that has the payload cannot be made durable.
        """
        return held.contents(self.tiers, oldest)

    def end_snapshot(self, oldest: int | None, *, written: bool = True) -> None:
        """End a snapshot.

        Args:
            oldest: the number of the oldest checkpoint that may be restored; None: there is none.
            written: whether the checkpoint was written; if not, the next one contains all events.
        """
        self.planner.end_snapshot()
        if not written:
            self.reservoir.changes.clear()
        self.slots.end_snapshot(oldest)
        if oldest is None or (self._first_checkpoint is not None and oldest >= self._first_checkpoint):
            for clean_up in self._cleanup_actions:
                clean_up()
            self._cleanup_actions = []

    def discard_later(self, cleanup_actions: list[Callable[[], None]]) -> None:
        """Run these actions once no checkpoint of an earlier process is left: they remove rows that only those name."""
        self._cleanup_actions = cleanup_actions

    def restore(self, contents: StoreSnapshot, source: Tier | None = None) -> None:
        """Replace the held events and plans by those of a checkpoint.

        Args:
            contents: of the checkpoint; if a tier has the payload, its slots are those of this store's own tiers ...
            source: ... or of this tier, from which the rows are copied. If that is missing, the checkpoint has them.

        Raises:
            SettingsError: the contents do not fit this store.
        """
        restoring = StoreRestore(contents, source, self.reservoir, self._layout, self.tiers, self._seed)
        state = restoring.contents.state
        self.reservoir.restore(state)
        index = restoring.assign_slots(self.slots)
        self.event_table.restore(index, state.bases)
        self.tiers.mark_stale(state.stale)
        if not restoring.moves:
            self.tiers.add_existing(self.event_table.slots.astype(np.int64))
        if self._tracker is not None:
            self._tracker.restore(self.event_table.slots)
        self._sampler.add(self.event_table.slots)
        self._held.missing.add(contents.lost + restoring.lost)
        if len(index) == len(contents.index) and not contents.lost:
            self._sampler.restore(state.sampler)
            if restoring.goes_on and state.row_bytes == self._row_bytes:
                self.reservoir.changes.begin(state.checkpoint, len(self))
        self.planner.restore(state.plans, moved=restoring.moves and not restoring.keeps_slots)

    def erase(self, erased: ErasedEvents) -> int:
        """Remove erased events, overwrite their payload in all tiers, and replace the plans that name one.

        The payload of removed events is overwritten too. Returns how many of the held events were erased.
        """
        self.flush_pending()
        covered, left = self.event_table.covered(erased)
        slots = np.concatenate([self.event_table.slots[covered], left])
        self.tiers.erase(slots.astype(np.int64))
        if covered.any():
            self._held.keep(~covered)
        self.event_table.erase(slots)
        self._held.regroup()
        if self._recent is not None:
            self._recent.clear()
        self.planner.replace_erased(erased)
        return int(np.count_nonzero(covered))

    def erase_unknown(self, named: NDArray[np.bool_], limit: int) -> bool:
        """Erase up to `limit` slots whose earlier events are unknown, and return whether there were any.

        Args:
            named: which slots a checkpoint names, bool by slot; they are not erased.
            limit: how many to erase at once.
        """
        if not self.tiers.durable:
            return False
        unknown = self.event_table.unknown()
        unknown = unknown[~named[unknown]][:limit]
        self.tiers.erase(unknown.astype(np.int64))
        self.event_table.erase(unknown)
        return bool(len(unknown))

    def close(self) -> None:
        """Close the tiers and end the index process."""
        self.tiers.close()
        if self._tracker is not None:
            self._tracker.close()

    def _prepare_plan(self) -> None:
        self.flush_pending()
        self._held.regroup()
