"""Adds events to, and removes them from, all parts of a store: table, tiers, sampler, embeddings.

Legend: N events of an addition, H events held, n events of a call, D numbers of an embedding.
"""

import logging
import time

import numpy as np
from numpy.typing import NDArray

from replay.checkpoint.slot_allocator import SlotAllocator
from replay.payload.hierarchy import Pack, TierHierarchy
from replay.policies import Policies
from replay.reservoir.pending_events import PendingEvents
from replay.reservoir.recent_embeddings import RecentEmbeddings
from replay.reservoir.reservoir import Reservoir, ScoredEvents
from replay.row_layout import RowLayout
from replay.sample_planner import SamplePlanner

_LOG_INTERVAL_SECONDS = 10.0

log = logging.getLogger(__name__)


class HeldEvents:
    """The events of a reservoir, with a slot for the payload of each. Used by one thread."""

    def __init__(
        self,
        policies: Policies,
        reservoir: Reservoir,
        layout: RowLayout,
        tiers: TierHierarchy,
        slots: SlotAllocator,
        planner: SamplePlanner,
    ) -> None:
        self.missing = MissingEvents()
        self._sampler = policies.sampler
        self._tracker = policies.tracker
        self._recent = policies.recent
        self._reservoir = reservoir
        self._event_table = reservoir.event_table
        self._layout = layout
        self._tiers = tiers
        self._slots = slots
        self._planner = planner
        self._grouped = 0

    def add(self, pending: PendingEvents) -> int:
        """Add those of N events that are admitted, and return how many were."""
        self.regroup()
        scored = self._reservoir.add(pending.columns(), self._clusters_of(pending.embedding, len(pending)))
        if self._recent is None and len(self._event_table) + len(scored.admitted) <= self._reservoir.quotas.limit:
            return self._admit(scored, scored.admitted, pending)
        # Block by block where events are evicted or compared: the result does not depend on how many were pending.
        admitted, embedding = 0, None if self._recent is None else pending.embedding
        for part in pending.parts(scored.admitted):
            rows = self._reservoir.admits(scored, part)
            if self._recent is not None and embedding is not None and len(rows):
                rows = _distinct(scored, rows, embedding, self._recent)
            admitted += self._admit(scored, rows, pending)
        return admitted

    def keep(self, stays: NDArray[np.bool_]) -> None:
        """Remove the events that do not stay, bool `[H]`."""
        self._planner.materialize()
        left = self._reservoir.keep(stays)
        self._tiers.free(left.astype(np.int64))
        self._slots.release(left)
        self._sampler.remove(left)
        if self._tracker is not None:
            self._tracker.remove(left)

    def remove_lost(self) -> None:
        """Remove events whose rows a tier could not write or read; later events of the stream replace them."""
        lost = self._tiers.lost()
        if len(lost):
            stays = self.except_in(lost)
            self.missing.add(int((~stays).sum()))
            self.keep(stays)

    def except_in(self, slots: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which events are in other slots than these n, bool `[H]`."""
        named = np.zeros(self._tiers.slots, np.bool_)
        named[slots] = True
        return ~named[self._event_table.slots]

    def regroup(self) -> None:
        """Assign the events to their clusters again when the index process has trained new ones."""
        if self._tracker is not None and self._grouped != (training := self._tracker.poll()):
            self._grouped = training
            self._reservoir.regroup(self._tracker.clusters(self._event_table.slots))

    def _clusters_of(self, embedding: NDArray[np.float32] | None, n: int) -> NDArray[np.int16]:
        """Return the clusters of n new events by their embeddings, float32 `[n, D]`; 0 where they are unknown."""
        if self._tracker is None or embedding is None:
            return np.zeros(n, np.int16)
        return self._tracker.cluster_of(embedding)

    def _admit(self, scored: ScoredEvents, rows: NDArray[np.intp], pending: PendingEvents) -> int:
        """Insert the given rows of scored events, and return how many were inserted."""
        count = len(rows)
        while len(rows):
            room = min(self._reservoir.quotas.at_once, self._slots.free)
            if not room:
                self.missing.add(len(rows))
                return count - len(rows)
            self._insert(rows[:room], scored, pending)
            if (stays := self._reservoir.surplus()) is not None:
                self.keep(stays)
            rows = self._reservoir.admits(scored, rows[room:])
        return count

    def _insert(self, rows: NDArray[np.intp], scored: ScoredEvents, pending: PendingEvents) -> None:
        slots = self._slots.take(len(rows))
        self._reservoir.append(slots, scored, rows)
        pack: Pack = lambda part: pending.pack(self._layout, rows[part])  # noqa: E731
        if 2 * len(scored.admitted) < len(pending):
            # The I/O thread would keep all pending blocks in memory, not only these rows, while a disk is slow.
            pack = pack(slice(None)).__getitem__
        self._tiers.write(slots.astype(np.int64), scored.identity.take(rows), pack)
        if self._tracker is not None:
            self._tracker.add(slots, None if pending.embedding is None else pending.embedding[rows])
        self._sampler.add(slots)


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


class MissingEvents:
    """Counts the events that a store should hold and does not, and logs them from time to time. Used by one thread."""

    def __init__(self) -> None:
        self.count = 0
        self._logged, self._log_at = 0, 0.0

    def add(self, n: int) -> None:
        """Count n more."""
        self.count += n
        if self.count > self._logged and time.monotonic() >= self._log_at:
            log.warning("%d events could not be kept, %d since the start", self.count - self._logged, self.count)
            self._logged, self._log_at = self.count, time.monotonic() + _LOG_INTERVAL_SECONDS
