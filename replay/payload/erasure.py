"""Erases slots of slower tiers, and keeps which slots may still have the row of an earlier event.

Legend: n slots of a call.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from anabranch.core.job_thread import JobThread
from replay.payload.lost_rows import NO_SLOTS
from replay.tiers.tier import SlowTier


class TierErasure:
    """The stale slots of each slower tier. `set_stale` runs in the I/O thread, the rest in the store's thread."""

    def __init__(self, slow: Sequence[SlowTier], io_thread: JobThread) -> None:
        self._slow = slow
        self._io_thread = io_thread
        self._stale: dict[str, NDArray[np.bool_]] = {}
        """By tier, the slots that may still have the row of an earlier event; set in the I/O thread."""
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
        last = self._slow[-1].slots
        more = bool(self._stale) and first + limit < last
        # The last call examines all slots again: a write that was pending at the first call may have failed since.
        part = slice(first, first + limit) if more else slice(0, last)
        for tier in self._slow:
            self._submit(tier, lambda tier: self._stale_in(tier, part))
        return more

    def mark_caches_stale(self, names: Sequence[str] | None) -> None:
        """Mark all slots of the caches with these names, or of all caches, as stale."""
        for cache in self._slow[:-1]:
            if names is None or cache.name in names:
                self._stale[cache.name] = np.ones(cache.slots, np.bool_)

    def set_stale(self, tier: SlowTier, slots: NDArray[np.int64], *, stale: bool) -> None:
        """Set whether n slots of a tier may have rows of earlier events."""
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
