"""Writes the rows of new events: to the memory tier while it has room, and to all slower tiers.

Legend: n rows of a call, R bytes of a row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from replay.payload.hierarchy import Pack
from replay.payload.tier_path import TierPath


@dataclass(eq=False)
class WritePath(TierPath):
    """Writes rows: to the memory tier at once, to slower tiers in the I/O thread."""

    def __post_init__(self) -> None:
        self.counts = {tier.name: 0 for tier in self.slow[:-1]}
        """Held events that were written to each slower cache."""

    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], pack: Pack) -> None:
        """Write the rows of n events: those that the memory tier has room for now, all in the I/O thread."""
        self.io_thread.raise_bug()
        generation = self.cache.generation(slots)
        self.count(slots, 1)
        self.stats.add_moved("device", "written", self.cache.keep(slots, lambda n: torch.from_numpy(pack(slice(n)))))
        # Last: from here on the I/O thread competes for the GIL.
        self.stats.stall_seconds += self.io_thread.submit(
            lambda: self._write_through(slots, identity, pack(slice(None)), generation),
            len(slots) * self.stats.row_bytes,
        )

    def count(self, slots: NDArray[np.int64], sign: int) -> None:
        """Count n events as written to the slower caches; `sign` -1: as removed from them."""
        for cache in self.slow[:-1]:
            self.counts[cache.name] += sign * int(np.count_nonzero(slots < cache.slots))

    def _write_through(
        self,
        slots: NDArray[np.int64],
        identity: NDArray[np.uint64],
        rows_nR: NDArray[np.uint8],
        generation: NDArray[np.uint16],
    ) -> None:
        """Write new rows to the slower tiers; in the I/O thread."""
        for tier in self.slow:
            inside = np.flatnonzero(slots < tier.slots)
            columns = slots, identity, rows_nR
            try:
                tier.write(*(columns if len(inside) == len(slots) else (column[inside] for column in columns)))
            except OSError:
                if tier is self.slow[-1]:
                    self.lost.add(slots, generation)
                self.erasure.set_stale(tier, slots[inside], stale=True)
            else:
                self.stats.add_moved(tier.name, "written", len(inside))
                self.erasure.set_stale(tier, slots[inside], stale=False)
