"""The payload of waiting events: one file in the disk tier's format, written in extents.

An extent is `rows` consecutive slots. New rows are appended to one extent; an extent is written again once all of its
rows are gone and no checkpoint that may be restored names it. So rows of events that come together are one write. Rows
that cannot be written, since the file is full or its disk fails, stay in memory, in slots from -2 down, until they can.

Legend: E extents, S slots, n rows of a call, R bytes of a row.
"""

import time
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.learner.checkpoints.part_formats import NO_SLOT, memory_index
from anabranch.learner.extensions.late_labels.indexes import Numbers
from anabranch.replay.tiers.disk import DiskTier
from anabranch.replay.tiers.slot_allocator import SlotAllocator

_MOST_ROWS = 1024
_EXTENTS = 64
"""A file has at least so many extents, if it has so many slots."""
_MOST_IN_MEMORY = 2**30
_MEMORY_BYTES = 2**26
"""Rows in memory from which on nothing more should be added."""
_SPARSE = 1 / 2
"""Extents with fewer rows than this part of their slots are moved when space runs low."""
_RETRY_SECONDS = 1.0

Slots = NDArray[np.int32]


class PayloadFile:
    """Rows by slot. Used by one thread."""

    def __init__(self, tier: DiskTier) -> None:
        self.tier = tier
        """The file. Any thread may call its `sync` and its marks."""
        self.rows = max(1, min(_MOST_ROWS, tier.slots // _EXTENTS))
        """Slots of an extent."""
        count = tier.slots // self.rows
        self.slots = count * self.rows
        """S."""
        self.extents = SlotAllocator(count, durable=True)
        """Which extents may be written: snapshots are of these."""
        self._live = np.zeros(count, np.int32)
        """How many rows of each extent are in use, `[E]`."""
        self._open, self._next = -1, self.rows
        """The extent that rows are appended to, and its next slot."""
        self.memory = np.zeros((0, tier.row_bytes), np.uint8)
        """Rows in memory and those between them, uint8 `[m, R]`; row i is in the slot -2 - i."""
        self._memory_numbers = Numbers(_MOST_IN_MEMORY)
        self._failed_at = -_RETRY_SECONDS
        self._failing = False
        self._unnamed: NDArray[np.bool_] | None = None
        """During an erasure the slots that are still to be overwritten, `[S]`."""

    @property
    def _free(self) -> int:
        """Rows that can be written to the file now."""
        return 0 if self._failing else self.extents.free * self.rows + self.rows - self._next

    @property
    def room(self) -> int:
        """Rows that can be added now, in the file or in memory."""
        return self._free + _MEMORY_BYTES // self.tier.row_bytes - self._in_memory

    @property
    def needs_checkpoint(self) -> bool:
        """Whether little of the file can be written, and checkpoints would free extents."""
        if self._free < self.slots // 16:
            return self.extents.retired > 0
        return self._free < self.slots // 8 and self.extents.waiting > 0

    @property
    def frees_soon(self) -> bool:
        """Whether space comes without rows that leave: the disk fails now, or checkpoints free extents."""
        return self._failing or self.extents.retired > 0

    @property
    def retries(self) -> bool:
        """Whether rows in memory should be written to the file now."""
        recovered = not self._failing or time.monotonic() >= self._failed_at + _RETRY_SECONDS
        return self._in_memory > 0 and recovered and self.extents.free > 0

    def append(self, identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> Slots:
        """Add n rows of the events `identity`, and return their slots."""
        slots = np.empty(len(identity), np.int32)
        done = 0
        while done < len(slots) and (self._next < self.rows or self._open_extent()):
            count = min(len(slots) - done, self.rows - self._next)
            first = self._open * self.rows + self._next
            slots[done : done + count] = np.arange(first, first + count)
            self._live[self._open] += count
            self._next, done = self._next + count, done + count
        try:
            self.tier.write(slots[:done].astype(np.int64), identity[:done], rows_nR[:done])
            self._failing = False
            if self._unnamed is not None:  # after the write: what a failed one leaves is still to be overwritten
                self._unnamed[slots[:done]] = False
        except OSError:  # the tier logs and reports it
            self._failing, self._failed_at = True, time.monotonic()
            self.release(slots[:done])
            done = 0
        if done < len(slots):
            slots[done:] = self._append_memory(rows_nR[done:])
        return slots

    def read(self, slots: Slots, identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        """Return n rows, uint8 `[n, R]`, and which are undamaged, bool `[n]`; raises OSError when none can be read."""
        return read_rows(self.tier, self.memory, slots, identity)

    def release(self, slots: Slots) -> None:
        """Release n rows, whose events are gone."""
        extents, counts = np.unique(slots[slots >= 0] // self.rows, return_counts=True)
        self._live[extents] -= counts.astype(np.int32)
        empty = extents[(self._live[extents] == 0) & (extents != self._open)]
        if len(empty):
            self.extents.release(empty.astype(np.int32))
        in_memory = memory_index(slots[slots < NO_SLOT])
        self.memory[in_memory] = 0  # checkpoints have these bytes
        self._memory_numbers.release(in_memory)
        if len(in_memory) and not self._in_memory:
            self.memory, self._memory_numbers = self.memory[:0], Numbers(_MOST_IN_MEMORY)

    def erase(self, slots: Slots) -> None:
        """Overwrite n rows; raises OSError when the file cannot be written."""
        self.memory[memory_index(slots[slots < NO_SLOT])] = 0
        self.tier.erase(np.sort(slots[slots >= 0]).astype(np.int64))

    def sparse(self, limit: int) -> NDArray[np.intp]:
        """Return up to `limit` extents that should be moved: space runs low, and they have few rows."""
        low = self.slots // 16 < self._free < self.slots // 4 and self.extents.waiting <= len(self._live) // 8
        if not low:
            return np.empty(0, np.intp)
        sparse = np.flatnonzero((self._live > 0) & (self._live <= _SPARSE * self.rows))
        sparse = sparse[sparse != self._open]
        sparse = sparse[np.argsort(self._live[sparse], kind="stable")[:limit]]
        fits: NDArray[np.intp] = sparse[np.cumsum(self._live[sparse]) <= self._free]
        return fits

    def restore(self, slots: Slots, retired: NDArray[np.int64], number: int, memory: NDArray[np.uint8]) -> None:
        """Restore the slots in use, the retired extents, the checkpoint's number and the rows in memory."""
        self._live[:] = np.bincount(slots[slots >= 0] // self.rows, minlength=len(self._live))
        self.extents.restore(np.flatnonzero(self._live).astype(np.int32), retired, number)
        self.memory = memory.copy()
        numbers = self._memory_numbers.take(len(memory))
        self._memory_numbers.release(np.setdiff1d(numbers, memory_index(slots[slots < NO_SLOT])))

    def begin_overwrite(self, in_use: Slots) -> None:
        """Begin to overwrite all slots except those in use, and those that are written from now on."""
        self._unnamed = np.ones(self.slots, np.bool_)
        self._unnamed[in_use[in_use >= 0]] = False

    def overwrite(self, named: NDArray[np.int64], limit: int) -> Iterator[None]:
        """Overwrite the slots of `begin_overwrite`, but for those named by checkpoints; yields after `limit` of them.

        Raises OSError.
        """
        if self._unnamed is not None:
            self._unnamed[named[named < self.slots]] = False
        while self._unnamed is not None:
            slots = np.flatnonzero(self._unnamed)[:limit]
            self.tier.erase(slots)
            self._unnamed[slots] = False
            if len(slots) < limit:
                self._unnamed = None
            else:
                yield

    def _open_extent(self) -> bool:
        """Begin to append to a free extent; return False where there is none."""
        if not self.extents.free:
            return False
        before, self._open = self._open, int(self.extents.take(1)[0])
        if before >= 0 and not self._live[before]:
            self.extents.release(np.array([before], np.int32))
        self._next = 0
        if self._unnamed is not None:  # before rows of the extent may be named by a new checkpoint
            slots = np.arange(self._open * self.rows, (self._open + 1) * self.rows)
            try:
                self.tier.erase(slots[self._unnamed[slots]])
            except OSError:
                self.extents.release(np.array([self._open], np.int32))
                self._open, self._next = -1, self.rows
                return False
            self._unnamed[slots] = False
        return True

    @property
    def _in_memory(self) -> int:
        """Rows that are in memory."""
        return _MOST_IN_MEMORY - self._memory_numbers.free

    def _append_memory(self, rows_nR: NDArray[np.uint8]) -> Slots:
        index = self._memory_numbers.take(len(rows_nR))
        if (missing := self._memory_numbers.used - len(self.memory)) > 0:
            more = np.zeros((max(missing, len(self.memory) // 2), self.tier.row_bytes), np.uint8)
            self.memory = np.concatenate([self.memory, more])
        self.memory[index] = rows_nR
        return (NO_SLOT - 1 - index).astype(np.int32)


def read_rows(
    tier: DiskTier, memory: NDArray[np.uint8], slots: Slots, identity: NDArray[np.uint64]
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Return n rows of a file and of a copy of the rows in memory, as `PayloadFile.read`, in any thread."""
    rows_nR = torch.empty((len(slots), tier.row_bytes), dtype=torch.uint8)
    valid = slots != NO_SLOT
    on_disk = np.flatnonzero(slots >= 0)
    valid[on_disk] = tier.read_into(rows_nR, on_disk, slots[on_disk].astype(np.int64), identity[on_disk])
    in_memory = slots < NO_SLOT
    rows_nR.numpy()[in_memory] = memory[memory_index(slots[in_memory])]
    return rows_nR, valid
