"""The tier `disk`: one preallocated file of records, each a row and its checksum.

The first page describes the file. Records are written by `pwrite` and read by `pread`, not through a memory map: a disk
that fails raises an OSError here instead of a signal that ends the process. The checksum depends on the row and on the
event, so it detects flipped bits and writes that never arrived.

Legend: S slots, R bytes of a row, n rows of a call.
"""

import contextlib
import errno
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.core.errors import AnabranchError, DependencyError, SettingsError
from anabranch.core.failures import DamagedError, Failure, decoded, failure_of
from anabranch.core.files import open_file, sync_directory, write_at
from replay.snapshot import TierRef
from replay.tiers.checksum import CHECKSUM, row_sums
from replay.tiers.disk_files import ASIDE, FORMAT, PAGE, REPLAY, SUFFIX, FileUse, Header, remove_empty
from replay.tiers.tier import SlowTier

_MAX_WASTE = 1 / 3
"""The part of a record by which it may be padded to whole pages."""
_MAX_BATCH = 256
"""Records of one call."""
_REGION = 64
"""Slots that share one mark for having been written."""
_COLD_SECONDS = 20e-6
"""A read that takes longer was not in the page cache."""

log = logging.getLogger(__name__)


class DiskTier(SlowTier):
    """S slots in the file `path`. `read` and `sync` may run while another thread writes other slots."""

    name = "disk"

    def __init__(
        self, path: Path, header: Header, descriptor: int, *, pinned: bool = False, use: FileUse = REPLAY
    ) -> None:
        self.path = path
        self._use = use
        self.header = header
        """The contents of the first page."""
        self.id = header.id
        """Distinguishes this file from others of the same name."""
        self.slots, self.row_bytes = header.slots, header.row_bytes
        self.slot_bytes = self.bytes_of(header.row_bytes)
        self._faults: dict[str, str] = {}
        """By the operation that fails, one sentence on why."""
        self._file = descriptor
        self._pinned = pinned
        self._cold: bool | None = None
        """Whether the last read waited for the disk; None before the first."""
        self._syncing, self._writing = threading.Lock(), threading.Lock()
        self._regions = self._no_regions()
        """The regions that were written since the last `sync` began."""
        self._doubtful = self._no_regions()
        """The regions that a failed `sync` may not have brought to the disk."""

    @property
    @override
    def file(self) -> TierRef:
        return TierRef(self.path.name, self.id)

    @property
    @override
    def problem(self) -> str | None:
        return "; ".join(self._faults.copy().values()) or None

    @staticmethod
    def bytes_of(row_bytes: int) -> int:
        """Return the bytes of a record with its padding.

        Records are padded to whole pages if that does not waste much: such a record takes the fewest page reads, and is
        written without a read before, which the system does for a page that changes in part.
        """
        record = row_bytes + CHECKSUM.itemsize
        pages = -(-record // PAGE) * PAGE
        return pages if pages - record <= _MAX_WASTE * record else record

    @staticmethod
    def slots_in(size: int, row_bytes: int) -> int:
        """Return how many slots a file of `size` bytes has."""
        return max(0, size - PAGE) // DiskTier.bytes_of(row_bytes)

    @classmethod
    def create(
        cls, path: Path, row_bytes: int, slots: int, *, pinned: bool = False, use: FileUse = REPLAY
    ) -> "DiskTier":
        """Create a file, or replace one, and allocate all its space on the disk at once.

        Raises:
            SettingsError: the disk has no room for it, or cannot be written.
        """
        header = Header(format=FORMAT, id=uuid.uuid4().hex, row_bytes=row_bytes, slots=slots)
        size = PAGE + slots * cls.bytes_of(row_bytes)
        temporary = path.with_name(f".tmp-{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _allocate(descriptor, size)
                os.pwrite(descriptor, header.page(), 0)
                os.fsync(descriptor)
                temporary.rename(path)
                sync_directory(path.parent)
            except OSError:
                os.close(descriptor)
                temporary.unlink(missing_ok=True)
                raise
        except OSError as exc:
            remove_empty(path.parent)
            raise SettingsError(
                f"{use.setting}: {path.parent} cannot give {size / 1e9:.3g} GB: {exc.strerror}; free space there, or "
                f"lower {use.setting}.bytes (*{SUFFIX}{ASIDE} are of checkpoints that were moved away)"
            ) from exc
        return cls(path, header, descriptor, pinned=pinned, use=use)

    @classmethod
    def open(cls, path: Path, *, pinned: bool = False, writable: bool = True, use: FileUse = REPLAY) -> "DiskTier":
        """Open the file that a checkpoint names.

        Raises:
            SettingsError: it is missing or damaged.
            DependencyError: it cannot be read now.
        """
        try:
            descriptor = open_file(path, os.O_RDWR if writable else os.O_RDONLY)
        except (OSError, DamagedError) as exc:
            raise _kind_of(exc)(_lost(use, path, f"cannot be opened: {getattr(exc, 'strerror', None) or exc}")) from exc
        try:
            header = decoded(os.pread(descriptor, PAGE, 0), Header)
            complete = os.fstat(descriptor).st_size >= PAGE + header.slots * cls.bytes_of(header.row_bytes)
            if header.format != FORMAT or not complete:
                raise SettingsError(_lost(use, path, "was written by another release" if complete else "is cut short"))
        except (OSError, DamagedError) as exc:
            os.close(descriptor)
            raise _kind_of(exc)(_lost(use, path, f"cannot be read: {exc}")) from exc
        except SettingsError:
            os.close(descriptor)
            raise
        return cls(path, header, descriptor, pinned=pinned, use=use)

    @override
    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        with self._reporting("cannot be written", self._use.unwritten):
            self._write(slots, identity, rows_nR)

    def _write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        order = np.argsort(slots, kind="stable")
        sorted_n = slots[order]
        if self._cold and self.slot_bytes % PAGE:
            self._read_ahead(sorted_n)  # the system first reads pages that change in part
        ends = np.flatnonzero(np.diff(sorted_n) != 1) + 1
        for run in np.split(order, ends) if len(slots) else ():
            for begin in range(0, len(run), _MAX_BATCH):
                at = run[begin : begin + _MAX_BATCH]
                records = np.zeros((len(at), self.slot_bytes), np.uint8)
                records[:, : self.row_bytes] = rows_nR[at]
                records[:, self._sum] = (self._sums(records) ^ identity[at])[:, None].view(np.uint8)
                self._put(records.reshape(-1).data, int(slots[at[0]]))

    @override
    def read(self, slots: NDArray[np.int64], identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        rows_nR = torch.empty((len(slots), self.row_bytes), dtype=torch.uint8, pin_memory=self._pinned)
        return rows_nR, self.read_into(rows_nR, np.arange(len(slots)), slots, identity)

    @override
    def read_into(
        self, rows_NR: Tensor, positions: NDArray[np.int64], slots: NDArray[np.int64], identity: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        # A record on a bad sector is invalid; only a file of which nothing can be read raises OSError. If the last read
        # waited for the disk, all records are requested before the first is read.
        order = np.argsort(slots, kind="stable")
        sorted_n = slots[order]
        if self._cold is not False:
            self._read_ahead(sorted_n)
        started = time.perf_counter()
        with self._reporting("cannot be read", self._use.unread):
            records = self._read_records(sorted_n)
        self._cold = time.perf_counter() - started > _COLD_SECONDS * len(slots)
        rows_NR.numpy()[positions[order]] = records[:, : self.row_bytes]
        stored = np.ascontiguousarray(records[:, self._sum]).view(CHECKSUM).reshape(-1)
        valid = np.empty(len(slots), np.bool_)
        valid[order] = stored == self._sums(records) ^ identity[order]
        return valid

    @override
    def erase(self, slots: NDArray[np.int64]) -> None:
        # A row of zeros with the checksum 0 is valid for no event.
        zeros = bytes(self.slot_bytes)
        with self._reporting("cannot be erased", "; erased events stay on the disk"):
            for slot in slots.tolist():
                if os.pread(self._file, self.slot_bytes, PAGE + slot * self.slot_bytes) != zeros:
                    self._put(memoryview(zeros), slot)

    @override
    def sync(self) -> None:
        # The system reports a failed fsync once and then treats its pages as clean, so those regions are written again
        # first (Rebello et al. 2020, "Can applications recover from fsync failures?").
        with self._reporting("cannot be flushed", "; no checkpoint is made now"), self._syncing:
            with self._writing:
                written, self._regions = self._regions, self._no_regions()
            again, self._doubtful = self._doubtful, self._doubtful | written
            for region in np.flatnonzero(again).tolist():
                self._write_again(region)
            os.fsync(self._file)
            self._doubtful = self._no_regions()

    @override
    def mark_named(self) -> None:
        if not self.header.named:
            self._mark(msgspec.structs.replace(self.header, named=True))

    @override
    def mark_intact(self, number: int, stamp: str, oldest: int) -> None:
        self._mark(self.header.listing(number, stamp, oldest), sync=False)

    def unlist_after(self, number: int) -> None:
        """Record durably that slots which only checkpoints after this one name may be written; raises OSError."""
        if (header := self.header.without_after(number)) != self.header:
            self._mark(header)

    def _mark(self, header: Header, *, sync: bool = True) -> None:
        with self._reporting("cannot be marked", "; the next checkpoint tries again"):
            os.pwrite(self._file, header.page(), 0)
            if sync:
                self.sync()
        self.header = header

    @override
    def close(self) -> None:
        # A checkpoint that is still being written must not read another file of the same descriptor.
        descriptor, self._file = self._file, -1
        os.close(descriptor)

    def _reads(self) -> bool:
        """Return whether the first page can be read."""
        with contextlib.suppress(OSError):
            return len(os.pread(self._file, PAGE, 0)) == PAGE
        return False

    @contextlib.contextmanager
    def _reporting(self, what: str, cost: str) -> Iterator[None]:
        """Log an error of the file once, with what it costs, and report it as a problem until the operation works."""
        try:
            yield
        except OSError as exc:
            sentence = f"{self._use.setting}: {self.path} {what}: {exc.strerror}{cost}"
            if sentence != self._faults.get(what):
                log.error("%s", sentence)  # noqa: TRY400
            self._faults[what] = sentence
            raise
        self._faults.pop(what, None)

    def _read_ahead(self, slots: NDArray[np.int64]) -> None:
        """Have the system read n records in the background, in ascending slots."""
        if hasattr(os, "posix_fadvise"):
            for offset in (PAGE + slots * self.slot_bytes).tolist():
                os.posix_fadvise(self._file, offset, self.slot_bytes, os.POSIX_FADV_WILLNEED)

    @property
    def _sum(self) -> slice:
        """The bytes of a record with the checksum."""
        return slice(self.row_bytes, self.row_bytes + CHECKSUM.itemsize)

    def _sums(self, records: NDArray[np.uint8]) -> NDArray[np.uint64]:
        return row_sums(records.reshape(-1).data, self.row_bytes, range(len(records)), self.slot_bytes)

    def _read_records(self, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return n records, in ascending slots; one that cannot be read is zeros, which is valid for no event."""
        size, failed = self.slot_bytes, 0
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

    def _put(self, content: memoryview, slot: int) -> None:
        """Write consecutive records from a slot on."""
        offset, size = PAGE + slot * self.slot_bytes, len(content)
        with self._writing:
            written = os.pwritev(self._file, [content], offset)
            if written < size:
                write_at(self._file, bytes(content[written:]), offset + written)
            self._regions[slot // _REGION : (slot + size // self.slot_bytes - 1) // _REGION + 1] = True

    def _write_again(self, region: int) -> None:
        """Read and write the records of a region again; unreadable ones are lost, and invalid when read."""
        begin = region * _REGION
        for slot in range(begin, min(begin + _REGION, self.slots)):
            offset = PAGE + slot * self.slot_bytes
            with self._writing:
                try:
                    record = os.pread(self._file, self.slot_bytes, offset)
                except OSError as exc:
                    if exc.errno != errno.EIO:
                        raise
                else:
                    write_at(self._file, record, offset)

    def _no_regions(self) -> NDArray[np.bool_]:
        return np.zeros(-(-self.slots // _REGION), np.bool_)


def _kind_of(error: OSError | DamagedError) -> type[AnabranchError]:
    return SettingsError if failure_of(error) is Failure.DAMAGED else DependencyError


def _lost(use: FileUse, path: Path, what: str) -> str:
    return (
        f"{use.contents} {path}, which {what}; put it back (is its disk mounted?), or start empty by "
        "moving the checkpoints away"
    )


def _allocate(descriptor: int, size: int) -> None:
    """Allocate the space of a file: writes into a sparse file take ten times longer, and may find the disk full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:  # macOS
        os.ftruncate(descriptor, size)
