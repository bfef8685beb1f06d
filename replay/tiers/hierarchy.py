"""The tiers that hold the payload of the held events: here a memory tier alone.

Legend: n rows of a call, R bytes of a row, S slots.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from anabranch.core.job_thread import JobThread
from anabranch.replay.row_layout import PackedRows
from anabranch.replay.tiers.memory import MemoryTier
from anabranch.replay.tiers.staged_rows import StagedRows
from anabranch.replay.tiers.tier import SlowTier, Tier, TierStats

Identify = Callable[[NDArray[np.int64]], NDArray[np.uint64]]
"""Returns the identities of the events in n slots."""

Pack = Callable[[slice], NDArray[np.uint8]]
"""Returns the rows of a slice of n events, uint8 `[<= n, R]`; any thread may call it, more than once."""

NO_SLOTS = np.empty(0, np.int64)
_MAX_PENDING_BYTES = 64_000_000
"""Bound of the rows that wait for the I/O thread."""


class TierHierarchy:
    """S slots, one for each event that the store may hold. Used by one thread, except `sync` and the primary tier.

    This one has a memory tier for the payload of all events; `CachedHierarchy` adds slower tiers.
    """

    def __init__(self, memory: MemoryTier, slow: Sequence[SlowTier] = ()) -> None:
        """Compose the tiers; `slow`: from fast to slow. The slowest of all is the primary tier."""
        self.memory = memory
        self.slow = tuple(slow)
        """The slower tiers, from fast to slow."""
        self.all: Sequence[Tier] = [memory, *slow]
        """All tiers, from fast to slow."""
        self.primary = self.all[-1]
        """The tier that has the payload of every event. Any thread may read it."""
        self.slots = self.primary.slots
        self.stats = TierStats.of(self.all)
        self.durable = bool(slow)
        """Whether the payload outlives the process, so that a checkpoint need not contain it."""
        self.file = slow[-1].file if slow else None
        """The reference to the primary tier in a checkpoint; None where the checkpoint has to contain the payload."""
        self.gathers_ahead = memory.gathers_ahead
        """Whether rows of plans may be in slots of a device: they are gathered one step before they are sampled."""
        self.lost_reports: Collection[object] = ()
        """Reports of lost rows, where `lost` may return any slots; any thread may ask whether there are any."""
        self._io_thread = JobThread("tiers", _MAX_PENDING_BYTES)
        self.erasure = TierErasure(self.slow, self._io_thread)
        """Erases slots of slower tiers."""

    @property
    def problem(self) -> str | None:
        """One sentence on what does not work; None: all works."""
        problems = [tier.problem for tier in reversed(self.slow)]
        return "; ".join(sentence for sentence in problems if sentence is not None) or None

    def rows(self, held: int) -> dict[str, int]:
        """Return the events by tier, when `held` events are held; of a slower cache, those that were written to it."""
        return {self.primary.name: held}

    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], pack: Pack) -> None:
        """Write the rows of n events into free slots."""
        self.memory.write(slots, identity, pack(slice(None)))
        self.stats.add_moved("device", "written", len(slots))

    def prefetch(self, slots: NDArray[np.int64], sizes: Sequence[int], _identify: Identify) -> Sequence[StagedRows]:
        """Start to bring the rows of n events to the device, for plans of these sizes, in their order.

        Their identities are computed only if needed.
        """
        self.stats.add_read("device", len(slots))
        return self.memory.stage_each(slots, sizes)

    def wait(self, staged: StagedRows, n: int | None = None) -> PackedRows:
        """Wait for rows of which some are missing; return those of the first n, or all, that could be read, `[<= n, R]`
        on the device."""
        return staged.rows(n)

    def lost(self) -> NDArray[np.int64]:
        """Return the slots of held events whose rows were lost since the previous call."""
        return NO_SLOTS

    def add_existing(self, slots: NDArray[np.int64]) -> None:
        """Register n events whose rows the primary tier already has; the memory tier fills as they are sampled."""

    def free(self, slots: NDArray[np.int64]) -> None:
        """Remove n events, whose slots may be written again, from caches."""

    def sync(self) -> None:
        """Wait until all rows written before survive a restart; raises OSError when they do not.

        Any thread may call it. Rows that a tier did not accept are lost, which is not an error.
        """

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Overwrite the rows of n slots in all tiers, in order with writes. No event may be in these slots afterwards.

        Caches overwrite the rows of removed events too. `erasure.erase_stale` retries what a slower tier could not
        erase.
        """
        self.memory.erase(slots)

    def close(self) -> None:
        """Release memory, files and connections."""
        self._io_thread.close()
        for tier in self.all:
            tier.close()


class TierErasure:
    """The slots of slower tiers that may still have the row of an earlier event: they are *stale*.

    A slot is stale after an erasure or a write has failed. Reused slots are safe: a later write clears the mark, and
    after a failed one the new event is lost anyway. `set_stale` runs in the I/O thread, the rest in the store's thread.
    """

    def __init__(self, slow: Sequence[SlowTier], io_thread: JobThread) -> None:
        self._slow = slow
        self._io_thread = io_thread
        self._stale: dict[str, NDArray[np.bool_]] = {}
        """By tier, the stale slots; set in the I/O thread."""
        self._failed: set[str] = set()

    @property
    def failed(self) -> bool:
        """Whether some slots could not be erased; valid after a sync."""
        return bool(self._failed)

    @property
    def stale_caches(self) -> list[str]:
        """The names of caches with stale slots; valid after a sync."""
        return [cache.name for cache in self._slow[:-1] if len(self._stale_in(cache, slice(0, cache.slots)))]

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Erase n slots of all slower tiers; those that fail are stale."""
        for tier in self._slow:
            self._submit(tier, lambda tier: slots[slots < tier.slots])

    def erase_stale(self, first: int, limit: int) -> bool:
        """Erase the stale slots among the `limit` slots from `first` on; return whether more slots follow."""
        last = self._slow[-1].slots if self._slow else 0
        more = bool(self._stale) and first + limit < last
        # The last call examines all slots again: a write that was pending at the first call may have failed since.
        part = slice(first, first + limit) if more else slice(0, last)
        for tier in self._slow:
            self._submit(tier, lambda tier: self._stale_in(tier, part))
        return more

    def mark_stale(self, names: Sequence[str] | None = None) -> None:
        """Mark all slots of the caches with these names, or of all caches, as stale.

        For those that an earlier process may have failed to write or to erase.
        """
        for cache in self._slow[:-1]:
            if names is None or cache.name in names:
                self._stale[cache.name] = np.ones(cache.slots, np.bool_)

    def set_stale(self, tier: SlowTier, slots: NDArray[np.int64], *, stale: bool) -> None:
        """Set whether n slots of a tier are stale."""
        if stale and tier.name not in self._stale:
            self._stale[tier.name] = np.zeros(tier.slots, np.bool_)
        if tier.name in self._stale:
            self._stale[tier.name][slots] = stale

    def _stale_in(self, tier: SlowTier, part: slice) -> NDArray[np.int64]:
        stale = self._stale.get(tier.name)
        return NO_SLOTS if stale is None else part.start + np.flatnonzero(stale[part])

    def _submit(self, tier: SlowTier, slots_of: Callable[[SlowTier], NDArray[np.int64]]) -> None:
        """Erase slots of a tier, which are computed once the jobs submitted before are done."""
        self._io_thread.raise_bug()
        self._io_thread.submit(lambda: self._erase(tier, slots_of(tier)))

    def _erase(self, tier: SlowTier, slots: NDArray[np.int64]) -> None:
        try:
            if len(slots):
                tier.erase(slots)
        except OSError:
            self.set_stale(tier, slots, stale=True)
            self._failed.add(tier.name)
        else:
            self.set_stale(tier, slots, stale=False)
            if not len(self._stale_in(tier, slice(0, tier.slots))):
                self._failed.discard(tier.name)
