"""The tier `disk`: one preallocated file of records, each a row and its checksum.

The first page describes the file. Records are written by `pwrite` and read by `pread`, not through a memory map: a disk
that fails raises an OSError here instead of a signal that ends the process. The checksum depends on the row and on the
event, so it detects flipped bits and writes that never arrived.

Legend: S slots, R bytes of a row, n rows of a call.
"""

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.core.errors import AnabranchError, DependencyError, SettingsError
from anabranch.core.failures import DamagedError, Failure, decoded, failure_of
from anabranch.core.files import open_file, sync_directory
from replay.snapshot import TierRef
from replay.tiers.checksum import CHECKSUM, row_sums
from replay.tiers.disk_files import ASIDE, FORMAT, PAGE, REPLAY, SUFFIX, FileUse, Header, remove_empty
from replay.tiers.record_file import RecordFile
from replay.tiers.tier import SlowTier

_MAX_WASTE = 1 / 3
"""The part of a record by which it may be padded to whole pages."""
_MAX_BATCH = 256
"""Records of one call."""
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
        self._records = RecordFile(descriptor, self.slots, self.slot_bytes)
        self.pinned = pinned
        self._cold: bool | None = None
        """Whether the last read waited for the disk; None before the first."""

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
            self._records.read_ahead(sorted_n)  # the system first reads pages that change in part
        ends = np.flatnonzero(np.diff(sorted_n) != 1) + 1
        for run in np.split(order, ends) if len(slots) else ():
            for begin in range(0, len(run), _MAX_BATCH):
                at = run[begin : begin + _MAX_BATCH]
                records = np.zeros((len(at), self.slot_bytes), np.uint8)
                records[:, : self.row_bytes] = rows_nR[at]
                records[:, self._sum] = (self._sums(records) ^ identity[at])[:, None].view(np.uint8)
                self._records.write(records.reshape(-1).data, int(slots[at[0]]))

    @override
    def read_into(
        self, rows_NR: Tensor, positions: NDArray[np.int64], slots: NDArray[np.int64], identity: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        # A record on a bad sector is invalid; only a file of which nothing can be read raises OSError. If the last read
        # waited for the disk, all records are requested before the first is read.
        order = np.argsort(slots, kind="stable")
        sorted_n = slots[order]
        if self._cold is not False:
            self._records.read_ahead(sorted_n)
        started = time.perf_counter()
        with self._reporting("cannot be read", self._use.unread):
            records = self._records.read(sorted_n)
        self._cold = time.perf_counter() - started > _COLD_SECONDS * len(slots)
        rows_NR.numpy()[positions[order]] = records[:, : self.row_bytes]
        stored = np.ascontiguousarray(records[:, self._sum]).view(CHECKSUM).reshape(-1)
        valid = np.empty(len(slots), np.bool_)
        valid[order] = stored == self._sums(records) ^ identity[order]
        return valid

    @override
    def erase(self, slots: NDArray[np.int64]) -> None:
        with self._reporting("cannot be erased", "; erased events stay on the disk"):
            self._records.erase(slots)

    @override
    def sync(self) -> None:
        with self._reporting("cannot be flushed", "; no checkpoint is made now"):
            self._records.sync()

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
            self._records.write_first_page(header.page())
            if sync:
                self.sync()
        self.header = header

    @override
    def close(self) -> None:
        self._records.close()

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

    @property
    def _sum(self) -> slice:
        """The bytes of a record with the checksum."""
        return slice(self.row_bytes, self.row_bytes + CHECKSUM.itemsize)

    def _sums(self, records: NDArray[np.uint8]) -> NDArray[np.uint64]:
        return row_sums(records.reshape(-1).data, self.row_bytes, range(len(records)), self.slot_bytes)


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
