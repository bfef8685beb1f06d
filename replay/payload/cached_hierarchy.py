"""A memory tier above slower tiers. The slowest one, the primary tier, has the payload of every event.

The tiers above it are caches: losing one costs only time. Which tier has a row is decided here, may change at any time,
and does not influence samples. The memory tier accepts new rows while it has room. A slower cache has the events in the
first slots of the primary tier. Slots do not depend on the event, so these are a random part of the events, and the
cache needs no directory.

Legend: n rows of a call, R bytes of a row, S slots.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.core.job_thread import JobThread
from replay.payload.clock_cache import Budget, ClockCache
from replay.payload.erasure import TierErasure
from replay.payload.hierarchy import Identify, Pack, TierHierarchy
from replay.payload.lost_rows import LostRows
from replay.payload.read_path import BYTES_PER_SECOND, ReadPath
from replay.payload.write_path import WritePath
from replay.row_layout import PackedRows
from replay.tiers.memory import MemoryTier
from replay.tiers.staged_rows import StagedRows
from replay.tiers.tier import SlowTier

_MAX_PENDING_BYTES = 64_000_000
"""Bound of the rows that wait for the I/O thread."""


class CachedHierarchy(TierHierarchy):
    """S slots of the primary tier, below caches.

    A slot is written again only after all reads of its present row were submitted, and the I/O thread runs its jobs in
    sequence.
    """

    def __init__(self, memory: MemoryTier, slow: Sequence[SlowTier], *, promote: bool) -> None:
        """Compose the tiers and start the I/O thread.

        Args:
            memory: may have no slots; then it only names the device on which rows are needed.
            slow: at least one, from fast to slow.
            promote: whether sampled rows replace others in the memory tier: where some events are sampled more often.
        """
        super().__init__(memory, slow)
        self._io_thread = JobThread("tiers", _MAX_PENDING_BYTES)
        self._cache = ClockCache(memory, self.slots, Budget(BYTES_PER_SECOND) if promote else None)
        self._lost = LostRows(self._cache)
        self.lost_reports = self._lost.reports
        self._erasure = TierErasure(self.slow, self._io_thread)
        parts = self.slow, self._cache, self._io_thread, self._erasure, self._lost, self.stats
        self._reads, self._writes = ReadPath(*parts), WritePath(*parts)

    @property
    @override
    def demoted(self) -> int:
        return self._cache.demoted

    @property
    @override
    def cached(self) -> dict[str, int]:
        return {self._memory.name: len(self._cache), **self._writes.counts}

    @override
    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], pack: Pack) -> None:
        self._writes.write(slots, identity, pack)

    @override
    def prefetch(self, slots: NDArray[np.int64], identify: Identify) -> StagedRows:
        return self._reads.prefetch(slots, identify)

    @override
    def wait(self, staged: StagedRows, n: int | None = None) -> PackedRows:
        return self._reads.wait(staged, n)

    @override
    def lost(self) -> NDArray[np.int64]:
        return self._lost.take()

    @override
    def add_existing(self, slots: NDArray[np.int64]) -> None:
        self._writes.count(slots, 1)

    @override
    def free(self, slots: NDArray[np.int64]) -> None:
        self._cache.free(slots)
        self._writes.count(slots, -1)

    @override
    def sync(self) -> None:
        self._io_thread.wait()
        self._io_thread.raise_bug()
        for tier in self.slow:
            tier.sync()

    @override
    def erase(self, slots: NDArray[np.int64]) -> None:
        self._reads.wait_for_reserved()
        self._cache.erase(slots)
        self._erasure.erase(slots)

    @override
    def erase_stale(self, first: int, limit: int) -> bool:
        return self._erasure.erase_stale(first, limit)

    @override
    def mark_stale(self, names: Sequence[str] | None = None) -> None:
        self._erasure.mark_caches_stale(names)

    @property
    @override
    def stale_caches(self) -> list[str]:
        return self._erasure.stale_caches

    @property
    @override
    def unerased(self) -> bool:
        return self._erasure.failed

    @override
    def close(self) -> None:
        self._io_thread.close()
        super().close()
