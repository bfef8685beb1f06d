"""The payload of waiting events: one file in the disk tier's format, written in extents.

An extent is `rows` consecutive slots. New rows are appended to one extent; an extent is written again once all of its
rows are gone and no checkpoint that may be restored names it. So rows of events that come together are one write. Rows
that cannot be written, since the file is full or its disk fails, stay in memory, in slots from -2 down, until they can.

Legend: E extents, S slots, n rows of a call, R bytes of a row.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.checkpoint.slot_allocator import SlotAllocator
from replay.snapshot import TierRef
from replay.tiers.disk import DiskTier

NO_SLOT = -1
"""The slot of an event whose payload is lost."""
_MOST_ROWS = 1024
_EXTENTS = 64
"""A file has at least so many extents, if it has so many slots."""
_MEMORY_BYTES = 2**26
"""Rows in memory from which on nothing more should be added."""
_SPARSE = 1 / 2
"""Extents with fewer rows than this part of their slots are moved when space runs low."""
_RETRY_SECONDS = 1.0

Slots = NDArray[np.int32]


class PayloadFile:
    """Rows by slot. Used by one thread, save for `sync`."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self.rows = max(1, min(_MOST_ROWS, tier.slots // _EXTENTS))
        """Slots of an extent."""
        count = tier.slots // self.rows
        self.slots = count * self.rows
        """S."""
        self._extents = SlotAllocator(count, durable=True)
        self._live = np.zeros(count, np.int32)
        """How many rows of each extent are in use, `[E]`."""
        self._open, self._next = -1, self.rows
        """The extent that rows are appended to, and its next slot."""
        self.memory = np.zeros((0, tier.row_bytes), np.uint8)
        """Rows in memory and those between them, uint8 `[m, R]`; row i is in the slot -2 - i."""
        self._memory_free: list[int] = []
        self._failed_at = -_RETRY_SECONDS
        self._failing = False
        self._unnamed: NDArray[np.bool_] | None = None
        """During an erasure the slots that are still to be overwritten, `[S]`."""

    @property
    def file(self) -> TierRef:
        """The reference to the file in a checkpoint."""
        return self._tier.file

    @property
    def row_bytes(self) -> int:
        """R."""
        return self._tier.row_bytes

    @property
    def problem(self) -> str | None:
        """One sentence on what does not work, else None."""
        return self._tier.problem

    @property
    def sync(self) -> Callable[[], None]:
        """Wait until all rows in the file outlive the process; raises OSError. Any thread may call it."""
        return self._tier.sync

    @property
    def mark_named(self) -> Callable[[], None]:
        """Record durably that a checkpoint names the file; raises OSError. Any thread may call it."""
        return self._tier.mark_named

    @property
    def mark_intact(self) -> Callable[[int, str, int], None]:
        """Record that the file has the rows of a checkpoint, as `SlowTier.mark_intact`. Any thread."""
        return self._tier.mark_intact

    @property
    def free(self) -> int:
        """Rows that can be written to the file now."""
        return 0 if self._failing else self._extents.free * self.rows + self.rows - self._next

    @property
    def room(self) -> int:
        """Rows that can be added now, in the file or in memory."""
        return self.free + _MEMORY_BYTES // self.row_bytes - self.in_memory

    @property
    def in_memory(self) -> int:
        """Rows that are in memory."""
        return len(self.memory) - len(self._memory_free)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether little of the file can be written, and checkpoints would free extents."""
        if self.free < self.slots // 16:
            return self._extents.retired > 0
        return self.free < self.slots // 8 and self._extents.waiting > 0

    @property
    def frees_soon(self) -> bool:
        """Whether space comes without rows that leave: the disk fails now, or checkpoints free extents."""
        return self._failing or self._extents.retired > 0

    @property
    def retries(self) -> bool:
        """Whether rows in memory should be written to the file now."""
        recovered = not self._failing or time.monotonic() >= self._failed_at + _RETRY_SECONDS
        return self.in_memory > 0 and recovered and self._extents.free > 0

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
            self._tier.write(slots[:done].astype(np.int64), identity[:done], rows_nR[:done])
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

    def read(
        self, slots: Slots, identity: NDArray[np.uint64], memory: NDArray[np.uint8] | None = None
    ) -> tuple[Tensor, NDArray[np.bool_]]:
        """Return n rows, uint8 `[n, R]`, and which are undamaged, bool `[n]`; raises OSError when none can be read.

        `memory`: a copy of `memory`, with which any thread may call this for slots that a checkpoint names.
        """
        rows_nR = torch.empty((len(slots), self.row_bytes), dtype=torch.uint8)
        valid = slots != NO_SLOT
        on_disk = np.flatnonzero(slots >= 0)
        valid[on_disk] = self._tier.read_into(rows_nR, on_disk, slots[on_disk].astype(np.int64), identity[on_disk])
        in_memory = slots < NO_SLOT
        rows_nR.numpy()[in_memory] = (self.memory if memory is None else memory)[memory_index(slots[in_memory])]
        return rows_nR, valid

    def rewrite(self, slots: Slots, identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        """Write n rows into the slots that `restore` has set; raises OSError when the file cannot be written."""
        self._tier.write(slots.astype(np.int64), identity, rows_nR)

    def release(self, slots: Slots) -> None:
        """Release n rows, whose events are gone."""
        extents, counts = np.unique(slots[slots >= 0] // self.rows, return_counts=True)
        self._live[extents] -= counts.astype(np.int32)
        empty = extents[(self._live[extents] == 0) & (extents != self._open)]
        if len(empty):
            self._extents.release(empty.astype(np.int32))
        in_memory = memory_index(slots[slots < NO_SLOT])
        self.memory[in_memory] = 0  # checkpoints have these bytes
        self._memory_free += in_memory.tolist()
        if self._memory_free and not self.in_memory:
            self.memory, self._memory_free = self.memory[:0], []

    def erase(self, slots: Slots) -> None:
        """Overwrite n rows; raises OSError when the file cannot be written."""
        self.memory[memory_index(slots[slots < NO_SLOT])] = 0
        self._tier.erase(np.sort(slots[slots >= 0]).astype(np.int64))

    def sparse(self, limit: int) -> NDArray[np.intp]:
        """Return up to `limit` extents that should be moved: space runs low, and they have few rows."""
        low = self.slots // 16 < self.free < self.slots // 4 and self._extents.waiting <= len(self._live) // 8
        if not low:
            return np.empty(0, np.intp)
        sparse = np.flatnonzero((self._live > 0) & (self._live <= _SPARSE * self.rows))
        sparse = sparse[sparse != self._open]
        sparse = sparse[np.argsort(self._live[sparse], kind="stable")[:limit]]
        fits: NDArray[np.intp] = sparse[np.cumsum(self._live[sparse]) <= self.free]
        return fits

    def begin_snapshot(self, number: int) -> NDArray[np.int64]:
        """Begin checkpoint `number`, as `SlotAllocator.begin_snapshot`, for extents."""
        return self._extents.begin_snapshot(number)

    def end_snapshot(self, oldest: int | None) -> None:
        """End the snapshot, as `SlotAllocator.end_snapshot`."""
        self._extents.end_snapshot(oldest)

    def restore(self, slots: Slots, retired: NDArray[np.int64], number: int, memory: NDArray[np.uint8]) -> None:
        """Restore the slots in use, the retired extents, the checkpoint's number and the rows in memory."""
        self._live[:] = np.bincount(slots[slots >= 0] // self.rows, minlength=len(self._live))
        self._extents.restore(np.flatnonzero(self._live).astype(np.int32), retired, number)
        self.memory = memory.copy()
        used = memory_index(slots[slots < NO_SLOT])
        self._memory_free = np.setdiff1d(np.arange(len(memory)), used).tolist()

    def begin_overwrite(self, in_use: Slots) -> None:
        """Begin to overwrite all slots except those in use, and those that are written from now on."""
        self._unnamed = np.ones(self.slots, np.bool_)
        self._unnamed[in_use[in_use >= 0]] = False

    def spare(self, named: NDArray[np.int64]) -> None:
        """Leave slots that are named by checkpoints out of those to be overwritten."""
        if self._unnamed is not None:
            self._unnamed[named[named < self.slots]] = False

    def overwrite(self, limit: int) -> bool:
        """Overwrite up to `limit` slots; return whether there are more. Raises OSError."""
        if self._unnamed is None:
            return False
        slots = np.flatnonzero(self._unnamed)[:limit]
        self._tier.erase(slots)
        self._unnamed[slots] = False
        if len(slots) < limit:
            self._unnamed = None
        return self._unnamed is not None

    def close(self) -> None:
        """Close the file."""
        self._tier.close()

    def _open_extent(self) -> bool:
        """Begin to append to a free extent; return False where there is none."""
        if not self._extents.free:
            return False
        before, self._open = self._open, int(self._extents.take(1)[0])
        if before >= 0 and not self._live[before]:
            self._extents.release(np.array([before], np.int32))
        self._next = 0
        if self._unnamed is not None:  # before rows of the extent may be named by a new checkpoint
            slots = np.arange(self._open * self.rows, (self._open + 1) * self.rows)
            try:
                self._tier.erase(slots[self._unnamed[slots]])
            except OSError:
                self._extents.release(np.array([self._open], np.int32))
                self._open, self._next = -1, self.rows
                return False
            self._unnamed[slots] = False
        return True

    def _append_memory(self, rows_nR: NDArray[np.uint8]) -> Slots:
        missing = len(rows_nR) - len(self._memory_free)
        if missing > 0:
            begin = len(self.memory)
            more = max(missing, begin // 2)
            self.memory = np.concatenate([self.memory, np.zeros((more, self.row_bytes), np.uint8)])
            self._memory_free += range(begin + more - 1, begin - 1, -1)
        index = np.array([self._memory_free.pop() for _ in range(len(rows_nR))], np.int32)
        self.memory[index] = rows_nR
        return (NO_SLOT - 1 - index).astype(np.int32)


def memory_index(slots: Slots) -> NDArray[np.int32]:
    """Return the index in `memory` of n slots that are in memory."""
    return (NO_SLOT - 1 - slots).astype(np.int32)
