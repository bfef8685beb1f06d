"""The store: holds events of the stream for replay.

It composes four policies: which events are held (`Admission` and `Quotas`), which are sampled (`Sampler`), which tiers
hold the payload (`TierHierarchy`), and how many events a step replays (chosen by the caller).

Legend: N events of an addition, H events held, n events of a call, D numbers of an embedding.
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.partition import TopicPartition
from anabranch.replay.checkpoint import CapturedStore, StoreRestore
from anabranch.replay.erasure.erased_events import ErasedEvents
from anabranch.replay.reservoir.admission import Admission
from anabranch.replay.reservoir.embeddings import EventEmbeddings, RecentEmbeddings
from anabranch.replay.reservoir.event_table import FREE, RECORD, EventTable
from anabranch.replay.reservoir.quotas import Quotas
from anabranch.replay.reservoir.reservoir import PendingEvents, Reservoir, ScoredEvents, pending_limit
from anabranch.replay.row_layout import Fields, RowLayout
from anabranch.replay.sample_plan import BLOCK, Request, Sample, SamplePlanner
from anabranch.replay.sampling.base import Sampler
from anabranch.replay.snapshot import StoreSnapshot, StoreState
from anabranch.replay.tiers.hierarchy import Pack, TierHierarchy
from anabranch.replay.tiers.slot_allocator import SlotAllocator
from anabranch.replay.tiers.tier import Tier

MAX_INSERTED = 1024
"""The most events that are inserted at once."""
_LOG_INTERVAL_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policies:
    """Which events are held and which are sampled.

    Attributes:
        admission: the priority and the group of each event.
        quotas: how many events of each group are held.
        sampler: which held events are sampled.
        embeddings: of the held events, where a policy needs them.
        recent: the embeddings of recent events, whose near-duplicates are not held; None where these are.
    """

    admission: Admission
    quotas: Quotas
    sampler: Sampler
    embeddings: EventEmbeddings
    recent: RecentEmbeddings | None = None


class Store:
    """At most `quotas.limit` events, in tiers, with a slot for the payload of each. Used by one thread.

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
        self.spare = tiers.slots - policies.quotas.limit
        """Slots beyond those for the held events."""
        self.burst = max(min(MAX_INSERTED, self.spare // 2), policies.quotas.slots_for(step))
        """Slots that must be free for a step to store its events."""
        assert 0 < self.burst <= self.spare
        self.capacity = policies.quotas.k
        """Events that a full store holds."""
        self.tiers = tiers
        self._row_bytes = layout.row_bytes if complete and tiers.durable else None
        self.event_table = event_table
        self.slots = SlotAllocator(tiers.slots, durable=tiers.durable)
        self.reservoir = Reservoir(policies.admission, policies.quotas, event_table, seed)
        self.embeddings = policies.embeddings
        self._sampler = policies.sampler
        self._recent = policies.recent
        self.planner = SamplePlanner(
            self._sampler, self.embeddings, self.reservoir, layout, tiers, seed, weighted=weighted
        )
        self.listens = self._sampler.uses_losses or self._sampler.uses_embeddings or self.embeddings.in_index
        """Whether `update_priorities` changes anything."""
        self._layout = layout
        self.fields: Fields = layout.fields
        """The columns that are kept of an event."""
        self._seed = seed
        self._training = 0
        """The clusters by which the events are grouped."""
        self.lost = 0
        """Events that should be held but are not: no slot could be written, or the payload could not be read."""
        self._logged, self._log_at = 0, 0.0
        self._first_checkpoint: int | None = None
        self.cleanup_actions: list[Callable[[], None]] = []
        """Remove rows that only checkpoints of earlier processes name; run once none of those is left."""
        self._pending = PendingEvents()
        self.pending_limit = pending_limit(layout.row_bytes)
        """The number of pending events at which they are added."""
        self._pending_blocks_limit = BLOCK if self._sampler.divisible and not self.embeddings.in_index else 1

    def __len__(self) -> int:
        return len(self.event_table)

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
        self._regroup()
        if not pending.blocks:
            return 0
        scored = self.reservoir.add(pending.columns(), self.embeddings.clusters_of(pending.embedding, len(pending)))
        if self._recent is None and len(self.event_table) + len(scored.admitted) <= self.reservoir.quotas.limit:
            return self._admit(scored, scored.admitted, pending)
        # Block by block where events are evicted or compared: the result does not depend on how many were pending.
        admitted, embedding = 0, None if self._recent is None else pending.embedding
        for part in pending.parts(scored.admitted):
            rows = self.reservoir.admits(scored, part)
            if self._recent is not None and embedding is not None and len(rows):
                rows = _distinct(scored, rows, embedding, self._recent)
            admitted += self._admit(scored, rows, pending)
        return admitted

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
            self.embeddings.update(sample.slots[known], embedding[known])

    def remove(
        self,
        events: Mapping[str, Array] | NDArray[np.void],
        slots: NDArray[np.int32] | None = None,
        partitions: Sequence[TopicPartition] = (),
    ) -> None:
        """Remove those of n events that are still held; plans that name them keep their rows.

        Args:
            events: their columns or fields `partition`, `offset` and `row`, `[n]` each.
            slots: where they were sampled, `[n]`; None: unknown, so that the table of all events is read.
            partitions: the table that `partition` points into, where it may have new ones.
        """
        self.event_table.register(partitions)
        self.flush_pending()
        if slots is None:
            records = np.zeros(len(events["offset"]), RECORD)
            for name in ("partition", "offset", "row"):
                records[name] = events[name]
            found = self.event_table.find(records)
            held = found[found >= 0]
        else:
            held = slots[(slots >= 0) & self.event_table.still_at(slots, events)]
        if len(held):
            self._keep(self._except_in(held))

    def plan_blocks(self, step: int, blocks: Sequence[Request]) -> None:
        """Plan consecutive blocks of steps; drop the plans for steps before `step`."""
        self._remove_lost()
        self.planner.drop_before(step)
        for request in blocks:
            self.flush_pending()
            self.planner.plans += self.planner.plan(request)

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
        return CapturedStore(state, change, plans, self.tiers)

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
            for clean_up in self.cleanup_actions:
                clean_up()
            self.cleanup_actions = []

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
        self.tiers.erasure.mark_stale(state.stale)
        if not restoring.moves:
            self.tiers.add_existing(self.event_table.slots.astype(np.int64))
        self.embeddings.add(self.event_table.slots, None)  # they are computed when the events are sampled
        self._sampler.add(self.event_table.slots)
        self._count_lost(contents.lost + restoring.lost)
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
            self._keep(~covered)
        self.event_table.erase(slots)
        self._regroup()
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
        unknown = np.flatnonzero((self.event_table.by_slot["offset"] == FREE) & ~named)[:limit]
        self.tiers.erase(unknown)
        self.event_table.erase(unknown)
        return bool(len(unknown))

    def close(self) -> None:
        """Close the tiers and end the index process."""
        self.tiers.close()
        self.embeddings.close()

    def _admit(self, scored: ScoredEvents, rows: NDArray[np.intp], pending: PendingEvents) -> int:
        """Insert the given rows of scored events, and return how many were inserted."""
        count = len(rows)
        while len(rows):
            room = min(self.reservoir.quotas.at_once, self.slots.free)
            if not room:
                self._count_lost(len(rows))
                return count - len(rows)
            self._insert(rows[:room], scored, pending)
            if (stays := self.reservoir.surplus()) is not None:
                self._keep(stays)
            rows = self.reservoir.admits(scored, rows[room:])
        return count

    def _insert(self, rows: NDArray[np.intp], scored: ScoredEvents, pending: PendingEvents) -> None:
        slots = self.slots.take(len(rows))
        self.reservoir.append(slots, scored, rows)
        pack: Pack = lambda part: pending.pack(self._layout, rows[part])  # noqa: E731
        if 2 * len(scored.admitted) < len(pending):
            # The I/O thread would keep all pending blocks in memory, not only these rows, while a disk is slow.
            pack = pack(slice(None)).__getitem__
        self.tiers.write(slots.astype(np.int64), scored.identity.take(rows), pack)
        self.embeddings.add(slots, None if pending.embedding is None else pending.embedding[rows])
        self._sampler.add(slots)

    def _keep(self, stays: NDArray[np.bool_]) -> None:
        """Remove the events that do not stay, bool `[H]`."""
        self.planner.materialize()
        left = self.reservoir.keep(stays)
        self.tiers.free(left.astype(np.int64))
        self.slots.release(left)
        self._sampler.remove(left)
        self.embeddings.remove(left)

    def _remove_lost(self) -> None:
        """Remove events whose rows a tier could not write or read; later events of the stream replace them."""
        lost = self.tiers.lost()
        if len(lost):
            stays = self._except_in(lost)
            self._count_lost(int((~stays).sum()))
            self._keep(stays)

    def _except_in(self, slots: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which events are in other slots than these n, bool `[H]`."""
        named = np.zeros(self.tiers.slots, np.bool_)
        named[slots] = True
        return ~named[self.event_table.slots]

    def _regroup(self) -> None:
        """Assign the events to their clusters again when the index process has trained new ones."""
        if self._training != (training := self.embeddings.poll()):
            self._training = training
            self.reservoir.regroup(self.embeddings.clusters(self.event_table.slots))

    def _count_lost(self, n: int) -> None:
        """Count n events that should be held and are not, and log them from time to time."""
        self.lost += n
        if self.lost > self._logged and time.monotonic() >= self._log_at:
            log.warning("%d events could not be kept, %d since the start", self.lost - self._logged, self.lost)
            self._logged, self._log_at = self.lost, time.monotonic() + _LOG_INTERVAL_SECONDS


def _distinct(
    scored: ScoredEvents, rows: NDArray[np.intp], embedding_ND: NDArray[np.float32], recent: RecentEmbeddings
) -> NDArray[np.intp]:
    """Return the rows of scored events without those that nearly repeat a recent one; the others become recent."""
    known = np.isfinite(embedding_ND[rows]).all(axis=1)
    left_out = np.zeros(len(rows), np.bool_)
    left_out[known] = recent.near_duplicates(
        embedding_ND[rows[known]], scored.records["label"][rows[known]].astype(np.int64)
    )
    return rows[~left_out]
