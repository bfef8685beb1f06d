"""Reads the rows of samples: from the memory tier at once, from slower tiers in the I/O thread.

Legend: n rows of a call, m of them not in the memory tier, N rows of a buffer, R bytes of a row.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.payload.clock_cache import Budget, ClockCache
from replay.payload.erasure import TierErasure
from replay.payload.hierarchy import Identify
from replay.payload.io_worker import IOWorker
from replay.payload.lost_rows import LostRows
from replay.row_layout import PackedRows
from replay.tiers.memory import MemoryTier
from replay.tiers.staged_rows import MissingRows, StagedRows
from replay.tiers.tier import SlowTier, TierStats

BYTES_PER_SECOND = 64_000_000
"""The most that is copied up between two tiers beside what is sampled."""


class ReadPath:
    """Used by the store's thread; slower tiers are read in the I/O thread."""

    def __init__(
        self,
        memory: MemoryTier,
        slow: Sequence[SlowTier],
        cache: ClockCache,
        io_worker: IOWorker,
        erasure: TierErasure,
        lost: LostRows,
        stats: TierStats,
    ) -> None:
        self._memory = memory
        self._slow = slow
        self._cache = cache
        self._io_worker = io_worker
        self._erasure = erasure
        self._lost = lost
        self._stats = stats
        self._arriving: deque[StagedRows] = deque()
        """Rows that the memory tier has reserved slots for."""
        self.refill = Budget(BYTES_PER_SECOND)
        """Of rows that are copied back to a cache that missed them."""

    def prefetch(self, slots: NDArray[np.int64], identify: Identify) -> StagedRows:
        """Begin to bring the rows of n events to the device."""
        self._admit_arrived()
        in_memory = self._cache.find(slots)
        misses = np.flatnonzero(in_memory < 0)
        self._stats.add_read("device", len(slots) - len(misses))
        if not len(misses):
            return StagedRows(self._memory.gather(in_memory))
        missed = slots[misses]
        reserved = self._cache.reserve(len(misses))
        missing = MissingRows(misses, missed, identify(missed), self._cache.generation(missed), reserved)
        pinned = self._memory.device.type == "cuda"
        staged = StagedRows(self._gather(in_memory, len(misses)), missing, pinned=pinned)
        if len(reserved):
            self._arriving.append(staged)
        size = len(misses) * self._memory.slot_bytes
        self._stats.stall_seconds += self._io_worker.submit(lambda: self._read_through(staged, missing), size)
        return staged

    def wait(self, staged: StagedRows, n: int | None = None) -> PackedRows:
        """Return those of the first n rows, or of all, that could be read, `[<= n, R]` on the device."""
        missing = staged.late
        if missing is None:
            return staged.rows(n)
        self._stats.stall_seconds += staged.wait()
        rows_nR = staged.rows(n)
        if staged.lost.any():
            self._lost.add(missing.slots[staged.lost], missing.generation[staged.lost])
        self._admit_arrived()
        return rows_nR

    def wait_for_reserved(self) -> None:
        """Wait for all rows that the memory tier has reserved slots for, and add them to it."""
        for staged in self._arriving:
            staged.wait()
        self._admit_arrived()

    def _admit_arrived(self) -> None:
        """Add the rows that have arrived since the previous call to the memory tier."""
        while self._arriving and self._arriving[0].landed:
            staged = self._arriving.popleft()
            missing = staged.late
            assert missing is not None
            n = len(missing.reserved)
            keep = self._cache.fill(missing.slots[:n], missing.generation[:n], missing.reserved, staged.brought[:n])
            if self._memory.lies_on.type != "cpu" and keep.any():
                kept = torch.from_numpy(np.flatnonzero(keep)).to(self._memory.lies_on)
                rows_nR = staged.first_brought(n).to(self._memory.lies_on, non_blocking=True)
                self._memory.put(missing.reserved[keep], rows_nR[kept])
            self._stats.add_moved("device", "written", int(keep.sum()))

    def _gather(self, in_memory: NDArray[np.int64], misses: int) -> Tensor:
        if misses == len(in_memory):
            shape = (misses, self._memory.slot_bytes)
            return torch.empty(shape, dtype=torch.uint8, device=self._memory.device)
        # A miss takes the row of slot 0 for the moment: one gather instead of a gather and a scatter.
        return self._memory.gather(np.maximum(in_memory, 0))

    def _read_through(self, staged: StagedRows, missing: MissingRows) -> None:
        """Read the missing rows from the first tier that has each, and refill caches; in the I/O thread."""
        m = len(missing.slots)
        valid, lost = np.zeros(m, np.bool_), np.zeros(m, np.bool_)
        refills: list[tuple[SlowTier, NDArray[np.intp], NDArray[np.uint8]]] = []
        try:
            rows_NR, positions = staged.basket()
            missed_by = self._read(missing, rows_NR, positions, valid, lost)
            for tier, missed in missed_by:
                back = np.flatnonzero(missed & valid)
                back = back[: self.refill.take(len(back), self._memory.slot_bytes)]
                # Copied before the rows are released: a step may change the rows of its sample.
                refills.append((tier, back, rows_NR.numpy()[positions[back]]))
            if self._memory.lies_on.type == "cpu":
                # Nobody reads reserved slots. On a device this would have to be in order with the step's kernels.
                kept = np.flatnonzero(valid[: len(missing.reserved)])
                self._memory.put(missing.reserved[kept], torch.from_numpy(rows_NR.numpy()[positions[kept]]))
        finally:
            staged.land(valid, lost)
        for tier, back, rows_nR in refills:
            if len(back):
                self._refill(tier, missing.slots[back], missing.identity[back], rows_nR)

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
        for tier in self._slow:
            asked = ~valid & (missing.slots < tier.slots)
            if not asked.any():
                continue
            try:
                valid[asked] = tier.read_into(rows_NR, positions[asked], missing.slots[asked], missing.identity[asked])
            except OSError:
                continue  # a tier that cannot be reached may still have the rows
            self._stats.add_read(tier.name, int((asked & valid).sum()))
            missed = asked & ~valid
            if tier is not self._slow[-1]:
                missed_by.append((tier, missed))
                self._stats.missed[tier.name] += int(missed.sum())
            elif missed.any():
                lost |= missed
                self._erasure.set_stale(tier, missing.slots[missed], stale=True)
        return missed_by

    def _refill(
        self, cache: SlowTier, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]
    ) -> None:
        try:
            cache.write(slots, identity, rows_nR)
        except OSError:
            return  # the tier reports it, and misses the rows the next time
        self._stats.add_moved(cache.name, "written", len(slots))
        self._erasure.set_stale(cache, slots, stale=False)
