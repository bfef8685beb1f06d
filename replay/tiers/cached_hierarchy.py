"""A memory tier above slower tiers. The slowest one, the primary tier, has the payload of every event.

The tiers above it are caches: losing one costs only time. Which tier has a row is decided here, may change at any time,
and does not influence samples. The memory tier accepts new rows while it has room. A slower cache has the events in the
first slots of the primary tier. Slots do not depend on the event, so these are a random part of the events, and the
cache needs no directory.

Legend: n rows of a call, m of them not in the memory tier, N rows of a buffer, R bytes of a row, S slots.
"""

import contextlib
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.replay.row_layout import PackedRows
from anabranch.replay.tiers.clock_cache import Budget, ClockCache
from anabranch.replay.tiers.hierarchy import NO_SLOTS, Identify, Pack, TierHierarchy
from anabranch.replay.tiers.memory import MemoryTier
from anabranch.replay.tiers.staged_rows import MissingRows, StagedRows
from anabranch.replay.tiers.tier import SlowTier

_BYTES_PER_SECOND = 64_000_000
"""Bound of the rows that are copied to a faster tier, in addition to those that are sampled."""


class CachedHierarchy(TierHierarchy):
    """S slots of the primary tier, below caches.

    A slot is written again only after all reads of its present row were submitted, and the I/O thread runs its jobs in
    sequence.
    """

    def __init__(self, memory: MemoryTier, slow: Sequence[SlowTier], *, promote: bool) -> None:
        """Compose the tiers.

        Args:
            memory: may have no slots; then it only names the device on which rows are needed.
            slow: at least one, from fast to slow.
            promote: whether sampled rows replace others in the memory tier: where some events are sampled more often.
        """
        super().__init__(memory, slow)
        self._cache = ClockCache(memory, self.slots, Budget(_BYTES_PER_SECOND) if promote else None)
        self._counts = {tier.name: 0 for tier in self.slow[:-1]}
        """Held events that were written to each slower cache."""
        self._refill = Budget(_BYTES_PER_SECOND)
        """Bounds the rows that are copied back to a cache that missed them."""
        self._arriving: deque[StagedRows] = deque()
        """Rows that the memory tier has reserved positions for."""
        self.lost_reports: deque[tuple[NDArray[np.int64], NDArray[np.uint16]]] = deque()
        """Slots whose rows no tier has, with their generations when the row was written or requested; any thread adds
        to them."""

    @override
    def rows(self, held: int) -> dict[str, int]:
        return {self.memory.name: len(self._cache), **self._counts, self.primary.name: held}

    @override
    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], pack: Pack) -> None:
        # To the memory tier what it has room for now, to the slower tiers all of it, in the I/O thread.
        self._io_thread.raise_bug()
        generation = self._cache.generation(slots)
        self._count(slots, 1)
        self.stats.add_moved("device", "written", self._cache.keep(slots, lambda n: torch.from_numpy(pack(slice(n)))))
        self.stats.demoted = self._cache.demoted
        # Last: from here on the I/O thread competes for the GIL.
        self.stats.stall_seconds += self._io_thread.submit(
            lambda: self._write_through(slots, identity, pack(slice(None)), generation),
            len(slots) * self.stats.row_bytes,
        )

    @override
    def prefetch(self, slots: NDArray[np.int64], sizes: Sequence[int], identify: Identify) -> Sequence[StagedRows]:
        return [self._prefetch(part, identify) for part in np.split(slots, np.cumsum(sizes)[:-1])]

    def _prefetch(self, slots: NDArray[np.int64], identify: Identify) -> StagedRows:
        self._io_thread.raise_bug()
        self._admit_arrived()
        in_memory = self._cache.find(slots)
        misses = np.flatnonzero(in_memory < 0)
        self.stats.add_read("device", len(slots) - len(misses))
        if not len(misses):
            return self.memory.copy(in_memory)
        missed = slots[misses]
        reserved = self._cache.reserve(len(misses))
        self.stats.demoted = self._cache.demoted
        missing = MissingRows(misses, missed, identify(missed), self._cache.generation(missed), reserved)
        # A miss gets the row of position 0 at first: one gather instead of a gather and a scatter.
        staged = self.memory.copy(np.maximum(in_memory, 0), missing)
        if len(reserved):
            self._arriving.append(staged)
        size = len(misses) * self.memory.slot_bytes
        self.stats.stall_seconds += self._io_thread.submit(lambda: self._read_through(staged, missing), size)
        return staged

    @override
    def wait(self, staged: StagedRows, n: int | None = None) -> PackedRows:
        missing = staged.missing
        assert missing is not None
        self.stats.stall_seconds += staged.wait()
        rows_nR = staged.rows(n)
        if staged.lost.any():
            self.lost_reports.append((missing.slots[staged.lost], missing.generation[staged.lost]))
        self._admit_arrived()
        return rows_nR

    @override
    def lost(self) -> NDArray[np.int64]:
        if not self.lost_reports:
            return NO_SLOTS
        rows = [self.lost_reports.popleft() for _ in range(len(self.lost_reports))]
        slots, generation = (np.concatenate(column) for column in zip(*rows, strict=True))
        # Without those whose event was removed meanwhile.
        return np.unique(slots[self._cache.generation(slots) == generation])

    @override
    def add_existing(self, slots: NDArray[np.int64]) -> None:
        self._count(slots, 1)

    @override
    def free(self, slots: NDArray[np.int64]) -> None:
        self._cache.free(slots)
        self._count(slots, -1)

    @override
    def sync(self) -> None:
        self._io_thread.wait()
        self._io_thread.raise_bug()
        for tier in self.slow:
            tier.sync()

    @override
    def erase(self, slots: NDArray[np.int64]) -> None:
        for staged in self._arriving:
            staged.wait()
        self._admit_arrived()
        self._cache.erase(slots)
        self.erasure.erase(slots)

    def _count(self, slots: NDArray[np.int64], sign: int) -> None:
        """Count n events as written to the slower caches; `sign` -1: as removed from them."""
        for cache in self.slow[:-1]:
            self._counts[cache.name] += sign * int(np.count_nonzero(slots < cache.slots))

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
            try:
                if len(inside) == len(slots):
                    tier.write(slots, identity, rows_nR)
                else:
                    tier.write(slots[inside], identity[inside], rows_nR[inside])
            except OSError:
                if tier is self.slow[-1]:
                    self.lost_reports.append((slots, generation))
                self.erasure.set_stale(tier, slots[inside], stale=True)
            else:
                self.stats.add_moved(tier.name, "written", len(inside))
                self.erasure.set_stale(tier, slots[inside], stale=False)

    def _admit_arrived(self) -> None:
        """Add the rows that have arrived since the previous call to the memory tier."""
        while self._arriving and self._arriving[0].arrived:
            staged = self._arriving[0]
            missing = staged.missing
            assert missing is not None
            n = len(missing.reserved)
            valid = staged.valid[:n]
            if not self.memory.by_host and valid.any():
                # First, so that a device without free memory changes nothing: no thread reads reserved positions.
                self.memory.put(missing.reserved[valid], staged.read_rows(np.flatnonzero(valid)))
            keep = self._cache.fill(missing.slots[:n], missing.generation[:n], missing.reserved, valid)
            self._arriving.popleft()
            self.stats.add_moved("device", "written", int(keep.sum()))

    def _read_through(self, staged: StagedRows, missing: MissingRows) -> None:
        """Read the missing rows from the first tier that has each, and refill caches; in the I/O thread."""
        m = len(missing.slots)
        valid, lost = np.zeros(m, np.bool_), np.zeros(m, np.bool_)
        refills: list[tuple[SlowTier, NDArray[np.intp], NDArray[np.uint8]]] = []
        try:
            rows_NR, positions = staged.target()
            missed_by = self._read(missing, rows_NR, positions, valid, lost)
            for tier, missed in missed_by:
                back = np.flatnonzero(missed & valid)
                back = back[: self._refill.take(len(back), self.memory.slot_bytes)]
                # Copied before the rows are released: a step may change the rows of its sample.
                refills.append((tier, back, rows_NR.numpy()[positions[back]]))
            if self.memory.by_host:
                # No thread reads reserved positions. On a GPU this would have to run in order with the step's kernels.
                kept = np.flatnonzero(valid[: len(missing.reserved)])
                self.memory.put(missing.reserved[kept], torch.from_numpy(rows_NR.numpy()[positions[kept]]))
        finally:
            staged.complete(valid, lost)
        for cache, back, rows_nR in refills:
            if len(back):
                slots = missing.slots[back]
                with contextlib.suppress(OSError):  # the tier reports it, and the next read misses the rows
                    cache.write(slots, missing.identity[back], rows_nR)
                    self.stats.add_moved(cache.name, "written", len(slots))
                    self.erasure.set_stale(cache, slots, stale=False)

    def _read(
        self,
        missing: MissingRows,
        rows_NR: Tensor,
        positions: NDArray[np.int64],
        valid: NDArray[np.bool_],
        lost: NDArray[np.bool_],
    ) -> list[tuple[SlowTier, NDArray[np.bool_]]]:
        """Read m rows into positions of `rows_NR`, and set which are valid and which are lost, bool `[m]`.

        Returns for each cache which of its rows were not valid, bool `[m]`.
        """
        missed_by: list[tuple[SlowTier, NDArray[np.bool_]]] = []
        for tier in self.slow:
            requested = ~valid & (missing.slots < tier.slots)
            if not requested.any():
                continue
            try:
                valid[requested] = tier.read_into(
                    rows_NR, positions[requested], missing.slots[requested], missing.identity[requested]
                )
            except OSError:
                continue  # a tier that cannot be reached may still have the rows
            self.stats.add_read(tier.name, int((requested & valid).sum()))
            missed = requested & ~valid
            if tier is not self.slow[-1]:
                missed_by.append((tier, missed))
                self.stats.missed[tier.name] += int(missed.sum())
            elif missed.any():
                lost |= missed
                self.erasure.set_stale(tier, missing.slots[missed], stale=True)
        return missed_by
