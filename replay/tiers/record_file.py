"""The file below the tier `disk`: records of one size behind a first page, and which of them an fsync may have lost."""

import contextlib
import errno
import os
import threading

import numpy as np
from numpy.typing import NDArray

from anabranch.core.files import write_at
from replay.tiers.disk_files import PAGE

_REGION = 64
"""Slots that share one mark for having been written."""


class RecordFile:
    """Records by slot. `read` and `sync` may run while another thread writes other slots. All raise OSError."""

    def __init__(self, descriptor: int, slots: int, slot_bytes: int) -> None:
        """Take the descriptor, which `close` closes."""
        self._file = descriptor
        self._slots, self._slot_bytes = slots, slot_bytes
        self._syncing, self._writing = threading.Lock(), threading.Lock()
        self._regions = self._no_regions()
        """The regions that were written since the last `sync` began."""
        self._doubtful = self._no_regions()
        """The regions that a failed `sync` may not have brought to the disk."""

    def read_ahead(self, slots: NDArray[np.int64]) -> None:
        """Have the system read n records in the background, in ascending slots."""
        if hasattr(os, "posix_fadvise"):
            for offset in (PAGE + slots * self._slot_bytes).tolist():
                os.posix_fadvise(self._file, offset, self._slot_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return n records, in ascending slots; one that cannot be read is zeros, which is valid for no event."""
        size, failed = self._slot_bytes, 0
        records = np.zeros((len(slots), size), np.uint8)
        content = records.reshape(-1).data
        ends = np.flatnonzero(np.diff(slots, append=-1) != 1) + 1
        begins = np.append(0, ends)[:-1]
        runs = list(zip(begins.tolist(), ends.tolist(), slots[begins].tolist(), strict=True))
        while runs:
            begin, end, slot = runs.pop()
            try:
                os.preadv(self._file, (content[begin * size : end * size],), PAGE + slot * size)
            except OSError as exc:
                if exc.errno == errno.EIO and end > begin + 1:  # each of them may be readable
                    runs += [(at, at + 1, slot + at - begin) for at in range(begin, end)]
                    continue
                failed += 1
                if exc.errno != errno.EIO or (failed == len(slots) and not self._reads()):
                    raise
        return records

    def _reads(self) -> bool:
        """Return whether the first page can be read."""
        with contextlib.suppress(OSError):
            return len(os.pread(self._file, PAGE, 0)) == PAGE
        return False

    def write(self, content: memoryview, slot: int) -> None:
        """Write consecutive records from a slot on."""
        offset, size = PAGE + slot * self._slot_bytes, len(content)
        with self._writing:
            written = os.pwritev(self._file, [content], offset)
            if written < size:
                write_at(self._file, bytes(content[written:]), offset + written)
            self._regions[slot // _REGION : (slot + size // self._slot_bytes - 1) // _REGION + 1] = True

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Write zeros over records; a row of zeros with the checksum 0 is valid for no event."""
        zeros = bytes(self._slot_bytes)
        for slot in slots.tolist():
            if os.pread(self._file, self._slot_bytes, PAGE + slot * self._slot_bytes) != zeros:
                self.write(memoryview(zeros), slot)

    def write_first_page(self, page: bytes) -> None:
        """Write the first page."""
        os.pwrite(self._file, page, 0)

    def sync(self) -> None:
        """Wait until all writes outlive the process.

        The system reports a failed fsync once and then treats its pages as clean, so those regions are written again
        first (Rebello et al. 2020, "Can applications recover from fsync failures?").
        """
        with self._syncing:
            with self._writing:
                written, self._regions = self._regions, self._no_regions()
            again, self._doubtful = self._doubtful, self._doubtful | written
            for region in np.flatnonzero(again).tolist():
                self._write_again(region)
            os.fsync(self._file)
            self._doubtful = self._no_regions()

    def _write_again(self, region: int) -> None:
        """Read and write the records of a region again; unreadable ones are lost, and invalid when read."""
        begin = region * _REGION
        for slot in range(begin, min(begin + _REGION, self._slots)):
            offset = PAGE + slot * self._slot_bytes
            with self._writing:
                try:
                    record = os.pread(self._file, self._slot_bytes, offset)
                except OSError as exc:
                    if exc.errno != errno.EIO:
                        raise
                else:
                    write_at(self._file, record, offset)

    def close(self) -> None:
        """Close the file."""
        # A checkpoint that is still being written must not read another file of the same descriptor.
        descriptor, self._file = self._file, -1
        os.close(descriptor)

    def _no_regions(self) -> NDArray[np.bool_]:
        return np.zeros(-(-self._slots // _REGION), np.bool_)
