"""Writes the rows of new events: to the memory tier while it has room, and to all slower tiers.

Legend: n rows of a call, R bytes of a row.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from replay.payload.clock_cache import ClockCache
from replay.payload.erasure import TierErasure
from replay.payload.hierarchy import Pack
from replay.payload.io_worker import IOWorker
from replay.payload.lost_rows import LostRows
from replay.tiers.tier import SlowTier, TierStats


class WritePath:
    """Used by the store's thread; slower tiers are written in the I/O thread."""

    def __init__(
        self,
        slow: Sequence[SlowTier],
        cache: ClockCache,
        io_worker: IOWorker,
        erasure: TierErasure,
        lost: LostRows,
        stats: TierStats,
    ) -> None:
        self._slow = slow
        self._cache = cache
        self._io_worker = io_worker
        self._erasure = erasure
        self._lost = lost
        self._stats = stats
        self.counts = {tier.name: 0 for tier in slow[:-1]}
        """Held events that were written to each slower cache."""

    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], pack: Pack) -> None:
        """Write the rows of n events: those that the memory tier has room for now, all in the I/O thread."""
        generation = self._cache.generation(slots)
        self.count(slots, 1)
        self._stats.add_moved("device", "written", self._cache.keep(slots, lambda n: torch.from_numpy(pack(slice(n)))))
        # Last, since the I/O thread competes for the interpreter from now on.
        self._stats.stall_seconds += self._io_worker.submit(
            lambda: self._write_through(slots, identity, pack(slice(None)), generation),
            len(slots) * self._stats.row_bytes,
        )

    def count(self, slots: NDArray[np.int64], sign: int) -> None:
        """Count n events as written to the slower caches; `sign` -1: as removed from them."""
        for cache in self._slow[:-1]:
            self.counts[cache.name] += sign * int(np.count_nonzero(slots < cache.slots))

    def _write_through(
        self,
        slots: NDArray[np.int64],
        identity: NDArray[np.uint64],
        rows_nR: NDArray[np.uint8],
        generation: NDArray[np.uint16],
    ) -> None:
        """Write new rows to the slower tiers; in the I/O thread."""
        for tier in self._slow:
            inside = np.flatnonzero(slots < tier.slots)
            columns = slots, identity, rows_nR
            try:
                tier.write(*(columns if len(inside) == len(slots) else (column[inside] for column in columns)))
            except OSError:
                if tier is self._slow[-1]:
                    self._lost.add(slots, generation)
                self._erasure.set_stale(tier, slots[inside], stale=True)
            else:
                self._stats.add_moved(tier.name, "written", len(inside))
                self._erasure.set_stale(tier, slots[inside], stale=False)
