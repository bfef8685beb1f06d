"""Slots of shared memory between the ingest process and the learner.

The memory has no name: it is a file that exists only as open descriptors, so a kill -9 leaves nothing behind, and a
container's small /dev/shm is no limit. Only the writer has the list of free slots. Messages on the connection
pass slots in both directions, so no lock is needed.
"""

import mmap
import os
from collections.abc import Iterable

import numpy as np

from anabranch.core.errors import SettingsError
from anabranch.core.temporary_files import anonymous_file
from anabranch.ingest.events.block import Array, BlockLayout
from anabranch.ingest.transport.decoding_mark import MARK_BYTES, DecodingMark

MOST_ROWS = 4096
"""Events of a block at most."""
_SLOTS = 8


class SharedRing:
    """`slots` slots with room for `rows` events each, `slot_bytes` bytes a slot, and the mark of what is decoded."""

    def __init__(self, layout: BlockLayout, buffer_bytes: int, descriptor: int | None = None) -> None:
        """Create the memory, or map that of another process when its descriptor is given."""
        self.rows = _rows_of_a_slot(layout, buffer_bytes)
        self.slots = max(2, buffer_bytes // layout.slot_bytes(self.rows))
        self._slot_bytes = layout.slot_bytes(self.rows)
        self._layout = layout
        size = self.slots * self._slot_bytes
        self.descriptor = anonymous_file(MARK_BYTES + size) if descriptor is None else descriptor
        self._memory = mmap.mmap(self.descriptor, MARK_BYTES + size)
        self.mark = DecodingMark(memoryview(self._memory)[size:])
        self._views: dict[int, dict[str, Array]] = {}
        self._written: dict[int, int] = {}
        """Rows of each slot that hold data written by this process."""

    def views(self, slot: int, rows: int) -> dict[str, Array]:
        """Return the columns of a slot's first `rows` events as views of the shared memory."""
        if slot not in self._views:
            window = memoryview(self._memory)[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]
            self._views[slot] = self._layout.views(window, self.rows)
        return {name: column[:rows] for name, column in self._views[slot].items()}

    def write(self, slot: int, columns: dict[str, Array], begin: int, end: int) -> None:
        """Copy rows `[begin, end)` of the columns into a slot."""
        for name, view in self.views(slot, end - begin).items():
            np.copyto(view, columns[name][begin:end])
        self._written[slot] = max(self._written.get(slot, 0), end - begin)

    def clear_one(self, free: Iterable[int]) -> None:
        """Overwrite one free slot with zeros, if any still holds data."""
        slot = next((slot for slot in free if slot in self._written), None)
        if slot is not None:
            for view in self.views(slot, self._written.pop(slot)).values():
                view[...] = 0

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last view of it."""
        os.close(self.descriptor)


def ring_bytes(layout: BlockLayout, buffer_bytes: int) -> int:
    """Return the bytes of a ring; raises SettingsError where the buffer is too small for one event a slot."""
    slot_bytes = layout.slot_bytes(_rows_of_a_slot(layout, buffer_bytes))
    return max(2, buffer_bytes // slot_bytes) * slot_bytes


def _rows_of_a_slot(layout: BlockLayout, buffer_bytes: int) -> int:
    rows = min(MOST_ROWS, buffer_bytes // _SLOTS // layout.row_bytes())
    while rows > 0 and layout.slot_bytes(rows) * _SLOTS > buffer_bytes:
        rows -= max(1, rows // 16)
    if rows < 1:
        raise SettingsError(
            f"stream.buffer_bytes = {buffer_bytes} is too small: an event has {layout.row_bytes()} bytes, "
            f"so at least {layout.slot_bytes(1) * _SLOTS} are needed"
        )
    return rows
