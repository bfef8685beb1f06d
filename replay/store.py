"""The store: what has been seen, kept for rehearsal.

A composition of four answers: who enters and who leaves (`Admission` and `Quotas`), who is sampled (`Sampler`), where
the payload lies (`TierHierarchy`), how fast (the caller, who asks for so many a step).

Legend: N events offered, H events held, n sampled, D dimensions of an embedding.
"""

from collections import deque
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
from replay.holes import Holes
from replay.plan import Sample, SamplePlan, fetch, resumed
from replay.policies import Policies
from replay.reservoir.event_table import EventTable, columns_of
from replay.reservoir.pending_offers import PendingEvents
from replay.reservoir.quotas import Quotas
from replay.reservoir.reservoir import Reservoir, ScoredEvents
from replay.row_layout import Fields, RowLayout
from replay.sampling.step_rng import StepRng
from replay.snapshot import StoreDelta, StoreSnapshot, StoreState
from replay.tiers.hierarchy import Pack, TierHierarchy
from replay.tiers.tier import Tier

AHEAD = 4
"""Steps that are planned at least: the time that slower tiers have to bring a sample."""

BLOCK = 8
"""Steps that are planned at once, where a choice can be dealt out among them; whose events are taken in at once."""

MOST_WAITING = 1024
"""Events that wait for others, about: so that none of them waits long, nor whoever waits for them to be taken in."""

MOST_WAITING_BYTES = 16_000_000
"""Bytes that they have, about."""

MOST_INSERTED = 1024
"""Events that are inserted at once."""

Wanted = Sequence[tuple[int, int]]
"""Events for steps that are planned at once, by (step, n)."""


class Store:
    """At most `quotas.limit` events, in tiers. Used by one thread, but for `contents`.

    Idempotent: an event is admitted by its priority alone, and one that is held already is not added again. In the
    normal case events of a partition come in rising order, and a watermark makes that check free.
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
    ) -> None:
        """Compose the store, to which a step may offer up to `step` events."""
        spare = tiers.slots - policies.quotas.limit
        self.burst = max(min(MOST_INSERTED, spare // 2), slots_for(step, policies.quotas))
        """Slots that have to be free for a step to store its events."""
        assert 0 < self.burst <= spare
        self.spare = spare
        """Slots beyond those for the events held."""
        self.tiers = tiers
        self.event_table = event_table
        self.slots = SlotAllocator(tiers.slots, durable=tiers.durable)
        self._holes = Holes()
        self.reservoir = Reservoir(policies.admission, policies.quotas, event_table, seed)
        self._sampler = policies.sampler
        self._tracker = policies.tracker
        self._grouped = 0
        self._layout = layout
        self._seed = seed
        self._chance = StepRng(seed)
        self._weighted = weighted
        self._plans: deque[SamplePlan] = deque()
        self._held_through = -1
        """The last step whose plan a checkpoint is being written of."""
        self._first_checkpoint: int | None = None
        self._leftovers: list[Callable[[], None]] = []
        self._waiting = PendingEvents()
        alone = not policies.sampler.divisible or policies.tracker is not None
        self._together = 1 if alone else BLOCK

    def __len__(self) -> int:
        return len(self.event_table)

    @property
    def lost(self) -> int:
        """Events that were to be held, and are not: no slot could be written, or the payload not be read back."""
        return self._holes.count

    @property
    def rows(self) -> dict[str, int]:
        """Events held, by tier."""
        return self.tiers.rows(len(self))

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that they take, by tier."""
        return self.tiers.bytes(len(self))

    @property
    def bounds(self) -> dict[str, int]:
        """Bytes that each tier may hold."""
        return self.tiers.bounds

    @property
    def fields(self) -> Fields:
        """The columns that are kept of an event."""
        return self._layout.fields

    @property
    def capacity(self) -> int:
        """Events that are kept when there is no end of them."""
        return self.reservoir.quotas.k

    def has_room(self, more: int = 0) -> bool:
        """Return whether the events of a step would find slots, beside `more` others; takes in what waits if need be.

        Where slots are free as soon as events leave them there is room for any number, one part after the other.
        """
        if self.slots.free_at_once:
            return True
        if self.slots.free - len(self._waiting) - more < self.burst:
            self.flush_pending()
        return self.slots.free - len(self._waiting) - more >= self.burst

    def add_now(
        self,
        columns: Mapping[str, Array],
        partitions: Sequence[TopicPartition],
        embedding: NDArray[np.float32] | None = None,
    ) -> int:
        """Offer N events as `offer` does, but take in at once; return how many were admitted, of all that waited."""
        self._put(columns, partitions, embedding)
        return self.flush_pending()

    def add(
        self,
        columns: Mapping[str, Array],
        partitions: Sequence[TopicPartition],
        embedding: NDArray[np.float32] | None = None,
    ) -> None:
        """Offer N events, which wait for some more, but are in the store before it is planned from, checkpointed or
        erased.

        What is held is the same as if each had been taken in at once; what an offer costs beside copying is shared.

        Args:
            columns: a block's columns, each `[N, ...]`; they must not change any more.
            partitions: the table that the column `partition` points into.
            embedding: of the model, float32 `[N, D]`, NaN where it is not known; None: of no event.
        """
        self._put(columns, partitions, embedding)
        if len(self._waiting.blocks) == self._together or self.are_many(len(self._waiting)):
            self.flush_pending()

    def are_many(self, n: int) -> bool:
        """Return whether n events are too many to wait."""
        return n >= min(MOST_WAITING, max(1, MOST_WAITING_BYTES // self._layout.row_bytes))

    def flush_pending(self) -> int:
        """Take in the events that wait, and return how many were admitted."""
        waiting, self._waiting = self._waiting, PendingEvents()
        if not waiting.blocks:
            return 0
        self._regroup()
        offer = self.reservoir.add(waiting.columns(), self._clusters_of(waiting.embedding, len(waiting)))
        if len(self) + len(offer.admitted) <= self.reservoir.quotas.limit:
            return self._admit(offer, offer.admitted, waiting)
        # Block by block where some have to leave, for what is held not to depend on how many waited.
        return sum(
            self._admit(offer, self.reservoir.admits(offer, rows), waiting) for rows in waiting.parts(offer.admitted)
        )

    def _put(
        self, columns: Mapping[str, Array], partitions: Sequence[TopicPartition], embedding: NDArray[np.float32] | None
    ) -> None:
        self.event_table.meet(partitions)
        self._waiting.put(columns, embedding)

    def _admit(self, offer: ScoredEvents, rows: NDArray[np.intp], waiting: PendingEvents) -> int:
        """Hold the given rows of an offer, and return how many were."""
        count = len(rows)
        while len(rows):
            room = min(self.reservoir.quotas.at_once, self.slots.free)
            if not room:
                self._holes.add(len(rows))
                return count - len(rows)
            self._insert(rows[:room], offer, waiting)
            if (stays := self.reservoir.surplus()) is not None:
                self._keep(stays)
            rows = self.reservoir.admits(offer, rows[room:])
        return count

    def update_priorities(
        self, sample: Sample, losses: NDArray[np.float32], embedding: NDArray[np.float32] | None = None
    ) -> None:
        """Hear what a step said of the n events of its sample.

        Args:
            sample: what was rehearsed.
            losses: of each event, float32 `[n]`, NaN where it is not known.
            embedding: of the model, float32 `[n, D]`, NaN likewise; None: of no event.
        """
        still = (sample.slots >= 0) & self.event_table.are(sample.slots, sample.records)
        told = still & ~np.isnan(losses)
        self._sampler.update_priorities(sample.slots[told], losses[told])
        if self._tracker is not None and embedding is not None:
            told = still & ~np.isnan(embedding).any(axis=1)
            self._tracker.update(sample.slots[told], embedding[told])

    def remove(self, slots: NDArray[np.int32], records: NDArray[np.void]) -> None:
        """Let those of n events of samples leave that are held still; plans that name them keep them."""
        self.flush_pending()
        gone = np.zeros(self.tiers.slots, np.bool_)
        gone[slots[(slots >= 0) & self.event_table.are(slots, records)]] = True
        if gone.any():
            self._keep(~gone[self.event_table.slots])

    @property
    def neighbours(self) -> NeighbourClient | None:
        """The index of embeddings, for policies that ask for it."""
        return None if self._tracker is None else self._tracker.neighbours

    @property
    def problem(self) -> str | None:
        """One sentence on what does not work as it should."""
        said = (self.tiers.problem, None if self.neighbours is None else self.neighbours.problem)
        return "; ".join(sentence for sentence in said if sentence is not None) or None

    @property
    def listens(self) -> bool:
        """Whether `learned` changes anything."""
        return self._sampler.uses_losses or self._tracker is not None

    def query_neighbours(self, step: int, embedding: NDArray[np.float32]) -> None:
        """Look for old events that are near to new ones, float32 `[N, D]`, for later samples; waits for nothing."""
        if self._tracker is not None:
            self._tracker.query(step, embedding)

    def plan(self, step: int, n: int) -> SamplePlan:
        """Choose n events for a step, or all when fewer are held, and begin to bring them to the device."""
        return self._plan([(step, n)])[0]

    def _plan(self, wanted: Wanted) -> list[SamplePlan]:
        """Plan so many events for each of some steps."""
        self.flush_pending()
        self._regroup()
        total = sum(n for _, n in wanted)
        if total > len(self) and len(wanted) > 1:
            return [self.plan(step, n) for step, n in wanted]
        if self._tracker is not None:
            self._tracker.select_answer(wanted[0][0])
        choice = self._sampler.sample(total, self._chance.of(wanted[0][0]))
        places, records, rates, shares = (
            choice.slots.astype(np.int64),
            self.event_table.records(choice.slots),
            None,
            None,
        )
        if self._weighted:
            rates, shares = self.reservoir.rates(records, self._clusters(choice.slots))
        plans, end = [], 0
        for step, n in wanted:
            mine = slice(end, end := end + n)
            rows = self.tiers.stage(places[mine], self.event_table.identity)
            rate, share, correction = _part(rates, mine), _part(shares, mine), _part(choice.correction, mine)
            plans.append(SamplePlan(step, choice.slots[mine], records[mine], rate, share, correction, rows))
        return plans

    def fetch(self, plan: SamplePlan, n: int | None = None) -> Sample:
        """Return the first n events of a plan, or all; fewer when the rows of some cannot be had."""
        return fetch(plan, self._layout, self.tiers, n)

    def plan_ahead(self, step: int, n: int | Callable[[int], int]) -> None:
        """Plan AHEAD steps from `step` on that are not planned yet, and those in one block with the last of them.

        Args:
            step: the next one.
            n: events for each step, or a function of the step.
        """
        self.plan_blocks(step, self.blocks(step, self.planned_through, n))

    def blocks(self, step: int, through: int, n: int | Callable[[int], int]) -> list[Wanted]:
        """Return what has yet to be planned for AHEAD steps from `step` on, in blocks, where it is up to `through`."""
        found, first = list[Wanted](), max(step, through + 1)
        block = BLOCK if self._sampler.divisible else 1
        while first < step + AHEAD:
            steps = range(first, (first // block + 1) * block)
            found.append([(each, n if isinstance(n, int) else n(each)) for each in steps])
            first = steps.stop
        return found

    def plan_blocks(self, step: int, blocks: Sequence[Wanted]) -> None:
        """Plan blocks that follow each other, and what is planned already. Plans for earlier steps are used up."""
        self._drop_lost()
        self.use_up(step)
        for wanted in blocks:
            self._plans += self._plan(wanted)

    @property
    def planned_through(self) -> int:
        """The last step that is planned; -1: there is none."""
        return self._plans[-1].step if self._plans else -1

    def planned(self, step: int) -> int:
        """Return how many events can be sampled for a step."""
        return next((len(plan) for plan in self._plans if plan.step == step), 0)

    def sample(self, step: int, n: int) -> Sample:
        """Return the first n events of the plan for a step; it and those before it are used up.

        Their columns are the caller's, who may write into them.
        """
        self.use_up(step)
        plan = self._plans.popleft()
        assert plan.step == step
        sample = self.fetch(plan, n)
        return sample.copy() if step <= self._held_through else sample

    def use_up(self, step: int) -> None:
        """Let go of the plans for steps before this one, which may have sampled nothing."""
        while self._plans and self._plans[0].step < step:
            self._plans.popleft()

    def begin_snapshot(self, number: int) -> CapturedStore:
        """Copy what checkpoint `number` needs, and keep what slots hold until `end_snapshot`: only one hold at a time.

        What is copied is what came since the checkpoint before, and one bit for each event of that one.
        """
        self.flush_pending()
        self._first_checkpoint = self._first_checkpoint or number
        self._held_through = self._plans[-1].step if self._plans else -1
        change, reservoir_state = self.reservoir.begin_snapshot(number)
        standing = StoreState(
            checkpoint=number,
            file=self.tiers.file,
            retired=self.slots.begin_snapshot(number),
            plans=(),
            sampler=self._sampler.state(),
            seed=self._seed,
            **reservoir_state,
        )
        return CapturedStore(standing, change, self.event_table.identity(change.index["slot"]), tuple(self._plans))

    def contents(self, held: CapturedStore) -> tuple[StoreState, StoreDelta]:
        """Return what was held, the payload being durable or part of it. May run in another thread until
        `end_snapshot`.

        Raises:
            OSError: the tier that has the payload cannot be made durable.
        """
        return held.contents(self.tiers)

    def end_snapshot(self, oldest: int | None, *, written: bool = True) -> None:
        """End a hold.

        Args:
            oldest: the number of the oldest checkpoint that may be resumed; None: there is none.
            written: whether the checkpoint that was held for exists; if not, the next has to tell all.
        """
        self._held_through = -1
        if not written:
            self.reservoir.changes.clear()
        self.slots.end_snapshot(oldest)
        if oldest is None or (self._first_checkpoint is not None and oldest >= self._first_checkpoint):
            for discard in self._leftovers:
                discard()
            self._leftovers = []

    def discard_later(self, leftovers: list[Callable[[], None]]) -> None:
        """Call what removes things that only checkpoints of earlier processes can name, once those are gone."""
        self._leftovers = leftovers

    def restore(self, contents: StoreSnapshot, source: Tier | None = None) -> None:
        """Take up what a checkpoint has in place of what is held.

        Args:
            contents: of the checkpoint; if a tier has the payload, its slots are those of this store's own tiers ...
            source: ... or of this tier, from which the rows are copied.

        Raises:
            SettingsError: the contents do not fit this store.
        """
        resumption = StoreRestore(contents, source, self.reservoir, self._layout, self.tiers, self._seed)
        standing = resumption.contents.standing
        self.reservoir.take_up(standing)
        index = resumption.place(self.slots)
        self.event_table.restore(index, standing.bases)
        self.tiers.doubt(standing.stale)
        if not resumption.moves:
            self.tiers.take_up(self.event_table.slots.astype(np.int64))
        if self._tracker is not None:
            self._tracker.restore(self.event_table.slots)
        self._sampler.add(self.event_table.slots)
        self._holes.add(contents.lost + resumption.lost)
        if len(index) == len(contents.index) and not contents.lost:
            self._sampler.restore(standing.sampler)
            if resumption.goes_on:
                self.reservoir.changes.begin(standing.checkpoint, len(self))
        self._plans.clear()
        for plan in standing.plans:
            # A checkpoint that has the payload may name slots of several lives.
            slots = self.event_table.find(plan.events) if resumption.moves else plan.events["slot"].copy()
            self._plans.append(resumed(plan, self.tiers.staged(plan.rows), slots, weighted=self._weighted))

    def erase(self, erased: ErasedEvents) -> int:
        """Let erased events leave, overwrite their payload in all tiers, and plan anew what names one.

        Also that of events which have left already. Returns how many of the events held were erased.
        """
        self.flush_pending()
        covered, left = self.event_table.covered(erased)
        slots = np.concatenate([self.event_table.slots[covered], left])
        self.tiers.erase(slots.astype(np.int64))
        if covered.any():
            self._keep(~covered)
        self.event_table.erase(slots)
        for place, plan in enumerate(self._plans):
            if erased.covers(self.event_table.bases, columns_of(plan.records)).any():
                plan.rows.clear()
                self._plans[place] = self.plan(plan.step, len(plan))
        return int(np.count_nonzero(covered))

    def erase_unknown(self, named: NDArray[np.bool_], most: int) -> bool:
        """Erase up to `most` slots of which it is not known who has left them, and return whether there were any.

        Args:
            named: which slots a checkpoint names, bool by slot; they stay.
            most: at once.
        """
        if not self.tiers.durable:
            return False
        unknown = self.event_table.unknown()
        unknown = unknown[~named[unknown]][:most]
        self.tiers.erase(unknown.astype(np.int64))
        self.event_table.erase(unknown)
        return bool(len(unknown))

    def close(self) -> None:
        """Let go of the tiers, and end the index process."""
        self.tiers.close()
        if self._tracker is not None:
            self._tracker.close()

    def _clusters_of(self, embedding: NDArray[np.float32] | None, n: int) -> NDArray[np.int16]:
        """Return the clusters of n events that are offered; 0 where they are not known."""
        if self._tracker is None or embedding is None:
            return np.zeros(n, np.int16)
        return self._tracker.cluster_of(embedding)

    def _clusters(self, slots: NDArray[np.int32]) -> NDArray[np.int16]:
        return np.zeros(len(slots), np.int16) if self._tracker is None else self._tracker.clusters(slots)

    def _regroup(self) -> None:
        """Follow the clusters when the index process has found others."""
        if self._tracker is not None and self._grouped != (training := self._tracker.poll()):
            self._grouped = training
            self.reservoir.regroup(self._tracker.clusters(self.event_table.slots))

    def _insert(self, rows: NDArray[np.intp], offer: ScoredEvents, waiting: PendingEvents) -> None:
        slots = self.slots.take(len(rows))
        self.reservoir.append(slots, offer, rows)
        pack: Pack = lambda part: waiting.pack(self._layout, rows[part])  # noqa: E731
        if 2 * len(offer.admitted) < len(waiting):
            # The I/O thread would keep far more than the rows that it reckons with, for as long as a disk is slow.
            pack = pack(slice(None)).__getitem__
        self.tiers.write(slots.astype(np.int64), offer.identity.take(rows), pack)
        if self._tracker is not None:
            self._tracker.add(slots, None if waiting.embedding is None else waiting.embedding[rows])
        self._sampler.add(slots)

    def _keep(self, stays: NDArray[np.bool_]) -> None:
        """Let those leave that do not stay, bool `[H]`."""
        for plan in self._plans:
            plan.rows.settle()
        left = self.reservoir.keep(stays)
        self.tiers.free(left.astype(np.int64))
        self.slots.leave(left)
        self._sampler.remove(left)
        if self._tracker is not None:
            self._tracker.remove(left)

    def _drop_lost(self) -> None:
        """Let events leave whose rows a tier could not write or give back: holes, which fill as the stream goes on."""
        lost = self.tiers.lost()
        if len(lost):
            gone = np.zeros(self.tiers.slots, np.bool_)
            gone[lost] = True
            stays = ~gone[self.event_table.slots]
            self._holes.add(int((~stays).sum()))
            self._keep(stays)


def slots_for(n: int, quotas: Quotas) -> int:
    """Return how many free slots n events need at most that are offered between two checkpoints.

    No more than are held at any moment: what came since the last checkpoint leaves slots that are free at once.
    """
    return max(quotas.at_once, min(n, quotas.limit + quotas.at_once))


def _part(values: NDArray[np.float64] | None, which: slice) -> NDArray[np.float64] | None:
    return None if values is None else values[which]
