"""A memory tier and slower tiers, of which the last, the primary tier, has the payload of every event.

The tiers above it are caches: losing one costs time and nothing else. Which tier has a row is decided here, may change
at any time, and does not influence samples. The memory tier accepts new rows while it has room. A slower cache has the
events in the first slots of the primary tier: slots do not depend on the event, so that these are a random part of the
events, and no memory is needed to know them.

Legend: n rows of a call, R bytes of a row, S slots.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from replay.payload.clock_cache import Budget, ClockCache
from replay.payload.erasure import TierErasure
from replay.payload.hierarchy import Identify, Pack, TierHierarchy
from replay.payload.io_worker import IOWorker
from replay.payload.lost_rows import LostRows
from replay.payload.read_path import BYTES_PER_SECOND, ReadPath
from replay.payload.write_path import WritePath
from replay.row_layout import PackedRows
from replay.tiers.memory import MemoryTier
from replay.tiers.staged_rows import StagedRows
from replay.tiers.tier import SlowTier


class CachedHierarchy(TierHierarchy):
    """S slots of the slowest tier, below caches.

    A slot is written again only after all reads of its present row were submitted: the jobs of slower tiers run in the
    order in which they are submitted.
    """

    def __init__(self, memory: MemoryTier, slow: Sequence[SlowTier], *, promote: bool) -> None:
        """Compose the tiers and start the I/O thread.

        Args:
            memory: may have no slots: then it only says on which device rows are needed.
            slow: at least one, from fast to slow.
            promote: whether sampled rows replace others in the memory tier: where some events are sampled more often.
        """
        super().__init__(memory, slow)
        self._io_worker = IOWorker("tiers")
        self._cache = ClockCache(memory, self.slots, Budget(BYTES_PER_SECOND) if promote else None)
        self._lost = LostRows(self._cache)
        self._erasure = TierErasure(self.slow, self._io_worker)
        self._reads = ReadPath(memory, self.slow, self._cache, self._io_worker, self._erasure, self._lost, self.stats)
        self._writes = WritePath(self.slow, self._cache, self._io_worker, self._erasure, self._lost, self.stats)

    @property
    def demoted(self) -> int:
        """Rows of the memory tier that were replaced by others."""
        return self._cache.demoted

    @property
    def cached(self) -> dict[str, int]:
        """Rows of held events in each cache, by tier."""
        return {self._memory.name: len(self._cache), **self._writes.counts}

    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], pack: Pack) -> None:
        """Write the rows of n events into free slots, to slower tiers in the I/O thread."""
        self._writes.write(slots, identity, pack)

    def prefetch(self, slots: NDArray[np.int64], identify: Identify) -> StagedRows:
        """Begin to bring the rows of n events to the device."""
        return self._reads.prefetch(slots, identify)

    def wait(self, staged: StagedRows, n: int | None = None) -> PackedRows:
        """Return those of the first n rows, or of all, that could be read, `[<= n, R]` on the device."""
        return self._reads.wait(staged, n)

    @property
    def has_lost(self) -> bool:
        """Whether `lost` may return any slots; any thread may ask."""
        return bool(self._lost)

    def lost(self) -> NDArray[np.int64]:
        """Return the slots of held events whose rows were lost since the previous call."""
        return self._lost.take()

    def add_existing(self, slots: NDArray[np.int64]) -> None:
        """Register n events that the primary tier has already; the memory tier fills as they are sampled."""
        self._writes.count(slots, 1)

    def free(self, slots: NDArray[np.int64]) -> None:
        """Remove n events, whose slots may be written again, from caches."""
        self._cache.free(slots)
        self._writes.count(slots, -1)

    def sync(self) -> None:
        """Wait until all jobs submitted before are done and durable; raises OSError when they are not."""
        self._io_worker.flush()
        for tier in self.slow:
            tier.sync()

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Overwrite what all tiers have in n slots, and what removed events have left in the memory tier."""
        self._reads.wait_for_reserved()
        self._cache.erase(slots)
        self._erasure.erase(slots)

    def erase_stale(self, first: int, most: int) -> bool:
        """Erase the stale ones of `most` slots from `first` on, and return whether there are slots after these."""
        return self._erasure.erase_stale(first, most)

    def mark_stale(self, names: Sequence[str] | None = None) -> None:
        """Mark all slots of slower caches, or of those with these names, as stale."""
        self._erasure.mark_caches_stale(names)

    @property
    def stale_caches(self) -> list[str]:
        """The names of slower caches with stale slots; after `sync`."""
        return self._erasure.stale_caches

    @property
    def unerased(self) -> bool:
        """Whether there is something that could not be erased; after `sync`."""
        return self._erasure.failed

    def close(self) -> None:
        """Stop the I/O thread; release memory, files and connections."""
        self._io_worker.close()
        super().close()
