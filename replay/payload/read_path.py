"""Reads the rows of samples: from the memory tier at once, from slower tiers in the I/O thread.

Legend: n rows of a call, m of them not in the memory tier, N rows of a buffer, R bytes of a row.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.payload.clock_cache import Budget
from replay.payload.hierarchy import Identify
from replay.payload.tier_path import TierPath
from replay.row_layout import PackedRows
from replay.tiers.staged_rows import MissingRows, StagedRows
from replay.tiers.tier import SlowTier

BYTES_PER_SECOND = 64_000_000
"""Bound of the rows that are copied to a faster tier, in addition to those that are sampled."""


@dataclass(eq=False)
class ReadPath(TierPath):
    """Reads rows: those of the memory tier at once, the others in the I/O thread.

    Attributes:
        refill: bounds the rows that are copied back to a cache that missed them.
    """

    refill: Budget = field(default_factory=lambda: Budget(BYTES_PER_SECOND))
    _arriving: deque[StagedRows] = field(default_factory=deque)
    """Rows that the memory tier has reserved positions for."""

    def prefetch(self, slots: NDArray[np.int64], identify: Identify) -> StagedRows:
        """Start to bring the rows of n events to the device."""
        self.io_thread.raise_bug()
        self._admit_arrived()
        in_memory = self.cache.find(slots)
        misses = np.flatnonzero(in_memory < 0)
        self.stats.add_read("device", len(slots) - len(misses))
        if not len(misses):
            return self.cache.memory.copy(in_memory)
        missed = slots[misses]
        reserved = self.cache.reserve(len(misses))
        missing = MissingRows(misses, missed, identify(missed), self.cache.generation(missed), reserved)
        # A miss gets the row of position 0 at first: one gather instead of a gather and a scatter.
        staged = self.cache.memory.copy(np.maximum(in_memory, 0), missing)
        if len(reserved):
            self._arriving.append(staged)
        size = len(misses) * self.cache.memory.slot_bytes
        self.stats.stall_seconds += self.io_thread.submit(lambda: self._read_through(staged, missing), size)
        return staged

    def wait(self, staged: StagedRows, n: int | None = None) -> PackedRows:
        """Return those of the first n rows, or of all, that could be read, `[<= n, R]` on the device."""
        missing = staged.missing
        assert missing is not None
        self.stats.stall_seconds += staged.wait()
        rows_nR = staged.rows(n)
        if staged.lost.any():
            self.lost.add(missing.slots[staged.lost], missing.generation[staged.lost])
        self._admit_arrived()
        return rows_nR

    def wait_for_reserved(self) -> None:
        """Wait for all rows that the memory tier has reserved positions for, and add them to it."""
        for staged in self._arriving:
            staged.wait()
        self._admit_arrived()

    def _admit_arrived(self) -> None:
        """Add the rows that have arrived since the previous call to the memory tier."""
        while self._arriving and self._arriving[0].arrived:
            staged = self._arriving[0]
            missing = staged.missing
            assert missing is not None
            n = len(missing.reserved)
            valid = staged.valid[:n]
            if not self.cache.memory.by_host and valid.any():
                # First, so that a device without free memory changes nothing: no thread reads reserved positions.
                self.cache.memory.put(missing.reserved[valid], staged.read_rows(np.flatnonzero(valid)))
            keep = self.cache.fill(missing.slots[:n], missing.generation[:n], missing.reserved, valid)
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
                back = back[: self.refill.take(len(back), self.cache.memory.slot_bytes)]
                # Copied before the rows are released: a step may change the rows of its sample.
                refills.append((tier, back, rows_NR.numpy()[positions[back]]))
            if self.cache.memory.by_host:
                # No thread reads reserved positions. On a GPU this would have to run in order with the step's kernels.
                kept = np.flatnonzero(valid[: len(missing.reserved)])
                self.cache.memory.put(missing.reserved[kept], torch.from_numpy(rows_NR.numpy()[positions[kept]]))
        finally:
            staged.complete(valid, lost)
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

    def _refill(
        self, cache: SlowTier, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]
    ) -> None:
        try:
            cache.write(slots, identity, rows_nR)
        except OSError:
            return  # the tier reports it, and the next read misses the rows
        self.stats.add_moved(cache.name, "written", len(slots))
        self.erasure.set_stale(cache, slots, stale=False)
