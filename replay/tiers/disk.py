"""The tier `disk`: one preallocated file of records, each a row and its checksum.

The first page describes the file. Records are written by `pwrite` and read by `pread`, not through a memory map: a disk
that fails raises an OSError here instead of a signal that ends the process. The checksum depends on the row and on the
event, so it detects flipped bits and writes that never arrived.

Legend: S slots, R bytes of a row, n rows of a call.
"""

import contextlib
import errno
import functools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.core.errors import AnabranchError, DependencyError, SettingsError
from anabranch.core.failures import DamagedError, Failure, away_is_dependency, damage_is, decoded, failure_of
from anabranch.core.files import check_names, open_file, sync_directory, write_at
from anabranch.replay.settings import DiskSettings
from anabranch.replay.snapshot import StoreSnapshot, TierRef
from anabranch.replay.tiers.disk_files import (
    ASIDE,
    FORMAT,
    PAGE,
    REPLAY,
    SUFFIX,
    FileUse,
    Header,
    check_mounted,
    discard,
    discard_unnamed,
    find,
    next_path,
    remove_empty,
    take_back,
)
from anabranch.replay.tiers.tier import CHECKSUM, SlowTier, TierContext, TierFactory, row_sums

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
        self.file: TierRef = TierRef(path.name, header.id)
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
    def mark_named(self, last: int | None = None) -> None:
        # `last`: slots that only checkpoints after this one name may be written from now on.
        header = msgspec.structs.replace(self.header, named=True)
        if last is not None:
            header = header.without_after(last)
        if header != self.header:
            self._mark(header)

    @override
    def mark_intact(self, number: int, stamp: str, oldest: int) -> None:
        self._mark(self.header.listing(number, stamp, oldest), sync=False)

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


class DiskTierFactory(TierFactory):
    """Opens disk tiers: files with ascending numbers in the folder of the context. A cache is a new file."""

    def __init__(self, section: DiskSettings | None, context: TierContext) -> None:
        self._section = section
        self._context = context
        self._path: Path | None = None
        self._restores = False
        """Whether the file of the checkpoint is missing, and the checkpoint has the rows."""

    @property
    @override
    def slots(self) -> int:
        assert self._section is not None
        return DiskTier.slots_in(int(self._section.bytes), self._context.row_bytes)

    @override
    def owns(self, file: TierRef) -> bool:
        return file.name.endswith(SUFFIX)

    @override
    def open_existing(self, contents: StoreSnapshot) -> DiskTier:
        file, context = contents.state.file, self._context
        assert file is not None
        number, stamp = contents.state.checkpoint, contents.state.stamp if contents.rows is not None else None
        try:
            return open_named(self._folder, file, number, pinned=context.pinned, writable=context.writable, stamp=stamp)
        except SettingsError:
            if contents.rows is not None and context.writable:
                check_mounted(self._folder, REPLAY.setting)
                discard_unnamed(self._folder, REPLAY.setting)
                self._restores = True
            raise

    @override
    def open_primary(self, slots: int, source: SlowTier | None) -> DiskTier:
        if isinstance(source, DiskTier) and (source.row_bytes, source.slots) == (self._context.row_bytes, slots):
            self._path = source.path
            return source
        try:
            return self._create(slots)
        except SettingsError:
            if not self._restores:
                raise
        for path in self._folder.glob(f"*{SUFFIX}"):  # there is no space for both, and the checkpoint has the rows
            discard(path)
        return self._create(slots)

    @override
    def cache(self, slots: int, _primary: SlowTier) -> DiskTier:
        return self._create(slots)

    @override
    def cleanup_actions(self, *, first: bool) -> list[Callable[[], None]]:
        files = [] if self._context.folder is None else self._context.folder.glob(f"*{SUFFIX}")
        return [functools.partial(discard, path) for path in files if path != self._path]

    @property
    def _folder(self) -> Path:
        assert self._context.folder is not None
        return self._context.folder

    def _create(self, slots: int) -> DiskTier:
        self._path = next_path(self._folder)
        return DiskTier.create(self._path, self._context.row_bytes, slots, pinned=self._context.pinned)


def open_named(
    folder: Path,
    file: TierRef,
    checkpoint: int,
    *,
    pinned: bool = False,
    writable: bool = True,
    use: FileUse = REPLAY,
    stamp: str | None = None,
) -> DiskTier:
    """Open the file in a folder that a checkpoint names, also if it was put aside.

    `stamp`: of the checkpoint, if the file must list it, since the checkpoint has the rows otherwise.

    Raises:
        SettingsError: it is missing or damaged, or another file has its name, or it does not list the checkpoint.
        DependencyError: it cannot be read or moved now.
    """
    with damage_is(SettingsError, f"checkpoint {checkpoint}: the name of the file that {use.contents}"):
        check_names([file.name])
    path = (take_back if writable else find)(folder, file, use.setting)
    tier = DiskTier.open(path, pinned=pinned, writable=writable, use=use)
    try:
        if tier.id != file.id:
            raise SettingsError(
                f"{tier.path} is not the file that checkpoint {checkpoint} belongs to; put that one back"
            )
        if stamp is not None and not tier.header.lists(stamp):
            raise SettingsError(f"{tier.path} is from another time than checkpoint {checkpoint}, and may lack its rows")
        if writable:
            with away_is_dependency(use.setting):
                tier.mark_named(checkpoint)
    except BaseException:
        tier.close()
        raise
    return tier
