"""The tier `disk`: one preallocated file of records that hold a row and a checksum each; and how it is opened.

The file begins with a page that describes it. Records are written by `pwrite` and read by `pread`, not through a memory
map: a disk that fails is an OSError here, and not a signal that ends the process. The checksum covers the row and names
the event, so that neither a flipped bit nor a write that never arrived is taken for the event's payload.

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
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.core.errors import AnabranchError, DependencyError, SettingsError
from anabranch.core.failures import DamagedError, Failure, away_is_dependency, damage_is, decoded, failure_of
from anabranch.core.files import check_names, open_file, sync_directory
from replay.config import DiskSettings
from replay.snapshot import StoreSnapshot, TierRef
from replay.tiers.checksum import CHECKSUM, row_sums
from replay.tiers.disk_files import ASIDE, FORMAT, PAGE, SUFFIX, Header, discard, find, next_path, take_back
from replay.tiers.tier import SlowTier, TierContext, TierFactory

_MOST_WASTE = 1 / 3
"""Of a record: so much more of the disk is taken for records to be whole pages."""
_MOST_AT_ONCE = 256
"""Records of one call, of three parts each; the system takes 1,024."""
_REGION = 64
"""Slots of which is remembered together that some were written."""
_COLD_SECONDS = 20e-6
"""A read that takes longer was not in the page cache."""

log = logging.getLogger(__name__)


class DiskTier:
    """S slots in the file `path`. `read` and `sync` may run beside `write`s of other slots."""

    name = "disk"

    def __init__(self, path: Path, header: Header, descriptor: int, *, pinned: bool = False) -> None:
        self.path = path
        self._header = header
        self.id = header.id
        """Tells this file from any other that had its name."""
        self.slots = header.slots
        self.row_bytes = header.row_bytes
        self.slot_bytes = self.bytes_of(header.row_bytes)
        self._faults: dict[str, str] = {}
        """By what it does not do, one sentence on why."""
        self._file = descriptor
        self._pinned = pinned
        self._cold: bool | None = None
        """Whether reads have lately waited for the disk; None before the first."""
        rest = bytes(self.slot_bytes - header.row_bytes - CHECKSUM.itemsize)
        self._rest = [memoryview(rest)] if rest else []
        """What follows a record in its pages."""
        self._syncing, self._writing = threading.Lock(), threading.Lock()
        self._regions = self._no_regions()
        """Which were written in since the last `sync` began."""
        self._doubtful = self._no_regions()
        """Which may not have come to the disk with a `sync` that failed."""

    @property
    def file(self) -> TierRef:
        """What a checkpoint names for these slots to be found again."""
        return TierRef(self.path.name, self.id)

    @property
    def problem(self) -> str | None:
        """One sentence on why it could not be written or read, until it can."""
        return "; ".join(self._faults.copy().values()) or None

    @staticmethod
    def bytes_of(row_bytes: int) -> int:
        """Return the bytes of a record with what follows it.

        Whole pages, where that does not waste much: a record is read with as few as it can have, and written without
        being read before, which the system does to a page that changes in part.
        """
        record = row_bytes + CHECKSUM.itemsize
        pages = -(-record // PAGE) * PAGE
        return pages if pages - record <= _MOST_WASTE * record else record

    @staticmethod
    def slots_in(size: int, row_bytes: int) -> int:
        """Return how many slots a file of so many bytes has."""
        return max(0, size - PAGE) // DiskTier.bytes_of(row_bytes)

    @classmethod
    def create(cls, path: Path, row_bytes: int, slots: int, *, pinned: bool = False) -> "DiskTier":
        """Make a file in place of one that may be there, with all its space taken from the disk at once.

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
            raise SettingsError(
                f"replay.disk: {path.parent} cannot give {size / 1e9:.3g} GB: {exc.strerror}; free space there, or "
                f"lower replay.disk.bytes (*{SUFFIX}{ASIDE} are of checkpoints that were moved away)"
            ) from exc
        return cls(path, header, descriptor, pinned=pinned)

    @classmethod
    def open(cls, path: Path, *, pinned: bool = False, writable: bool = True) -> "DiskTier":
        """Open the file that a checkpoint names.

        Raises:
            SettingsError: it is not there, or is damaged.
            DependencyError: it cannot be read for now.
        """
        try:
            descriptor = open_file(path, os.O_RDWR if writable else os.O_RDONLY)
        except (OSError, DamagedError) as exc:
            raise _kind_of(exc)(_lost(path, f"cannot be opened: {getattr(exc, 'strerror', None) or exc}")) from exc
        try:
            header = decoded(os.pread(descriptor, PAGE, 0), Header)
            whole = os.fstat(descriptor).st_size >= PAGE + header.slots * cls.bytes_of(header.row_bytes)
            if header.format != FORMAT or not whole:
                raise SettingsError(_lost(path, "is cut short" if not whole else "was written by another release"))
        except (OSError, DamagedError) as exc:
            os.close(descriptor)
            raise _kind_of(exc)(_lost(path, f"cannot be read: {exc}")) from exc
        except SettingsError:
            os.close(descriptor)
            raise
        return cls(path, header, descriptor, pinned=pinned)

    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        """Write n records, neighbours in one call; they are durable after the next `sync`."""
        with self._said("cannot be written", "; events are not stored"):
            self._write(slots, identity, rows_nR)

    def _write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        rows = np.ascontiguousarray(rows_nR).reshape(-1).data
        sums = (row_sums(rows, self.row_bytes, range(len(slots))) ^ identity).view(np.uint8).data
        order = np.argsort(slots)
        if self._cold and self.slot_bytes % PAGE:
            self._ask_for(slots[order])  # pages that change in part are read first
        ends = np.flatnonzero(np.diff(slots[order]) != 1) + 1
        for run in np.split(order, ends) if len(slots) else ():
            for begin in range(0, len(run), _MOST_AT_ONCE):
                places = run[begin : begin + _MOST_AT_ONCE].tolist()
                parts = [part for place in places for part in [*self._record(rows, place, sums, place), *self._rest]]
                self._put(parts, slots[places[0]])

    def read(self, slots: NDArray[np.int64], identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        """Read n records into new memory, pinned if this tier was made so."""
        rows_nR = torch.empty((len(slots), self.row_bytes), dtype=torch.uint8, pin_memory=self._pinned)
        return rows_nR, self.read_into(rows_nR, np.arange(len(slots)), slots, identity)

    def read_into(
        self, rows_NR: Tensor, places: NDArray[np.int64], slots: NDArray[np.int64], identity: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Read n records into `places` of rows on the host, and return which are whole; others are left as they are.

        A record that the disk has lost among others is not whole. Where reads have lately waited for the disk, all are
        asked for before the first is waited for.

        Raises:
            OSError: there is no telling, since nothing can be read or the file is out of reach.
        """
        found = np.zeros(len(slots), CHECKSUM)
        rows, sums = rows_NR.numpy().reshape(-1).data, found.view(np.uint8).data
        offsets = (PAGE + slots * self.slot_bytes).tolist()
        if self._cold is not False:
            self._ask_for(np.sort(slots))
        started = time.perf_counter()
        into = places.tolist()
        with self._said("cannot be read", "; what it has is not rehearsed"):
            failed = 0
            for at, (place, offset) in enumerate(zip(into, offsets, strict=True)):
                try:
                    os.preadv(self._file, self._record(rows, place, sums, at), offset)
                except OSError as exc:  # no row has the checksum 0
                    failed += 1
                    if exc.errno != errno.EIO or (failed == len(into) and not self._reads()):
                        raise
        self._cold = time.perf_counter() - started > _COLD_SECONDS * len(offsets)
        whole: NDArray[np.bool_] = found == row_sums(rows, self.row_bytes, into) ^ identity
        return whole

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Overwrite n records with zeros, those that are not zeros yet: no event's row has the checksum 0 with them."""
        zeros = bytes(self.slot_bytes)
        with self._said("cannot be erased", "; events are not forgotten"):
            for slot in slots.tolist():
                if os.pread(self._file, self.slot_bytes, PAGE + slot * self.slot_bytes) != zeros:
                    self._put([memoryview(zeros)], slot)

    def sync(self) -> None:
        """Wait until what was written is on the disk; raises OSError when it is not.

        What did not come there with a call that failed is written again first: a system tells of it once, and takes
        those pages for written from then on (Rebello et al. 2020, "Can applications recover from fsync failures?").
        """
        with self._said("cannot be flushed", "; no checkpoint is made now"), self._syncing:
            with self._writing:
                written, self._regions = self._regions, self._no_regions()
            again, self._doubtful = self._doubtful, self._doubtful | written
            for region in np.flatnonzero(again).tolist():
                self._write_again(region)
            os.fsync(self._file)
            self._doubtful = self._no_regions()

    def mark_named(self) -> None:
        """Write durably that there is a checkpoint that names this file; raises OSError when that cannot be."""
        if not self._header.named:
            named = msgspec.structs.replace(self._header, named=True)
            with self._said("cannot be marked", "; it is not kept where the checkpoints are moved away"):
                os.pwrite(self._file, named.page(), 0)
                self.sync()
            self._header = named

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def _reads(self) -> bool:
        """Whether anything can be read: the page that describes the file."""
        with contextlib.suppress(OSError):
            return len(os.pread(self._file, PAGE, 0)) == PAGE
        return False

    @contextlib.contextmanager
    def _said(self, what: str, cost: str) -> Iterator[None]:
        """Say once that something cannot be done with the file, and what that costs, until it can."""
        try:
            yield
        except OSError as exc:
            sentence = f"replay.disk: {self.path} {what}: {exc.strerror}{cost}"
            if sentence != self._faults.get(what):
                log.error("%s", sentence)  # noqa: TRY400
            self._faults[what] = sentence
            raise
        self._faults.pop(what, None)

    def _ask_for(self, slots: NDArray[np.int64]) -> None:
        """Have the system read n records, in rising slots, and wait for none."""
        if hasattr(os, "posix_fadvise"):
            for offset in (PAGE + slots * self.slot_bytes).tolist():
                os.posix_fadvise(self._file, offset, self.slot_bytes, os.POSIX_FADV_WILLNEED)

    def _record(self, rows: memoryview, place: int, sums: memoryview, at: int) -> list[memoryview]:
        """Return the two parts of a record, which lie in two arrays here."""
        row, checksum = self.row_bytes, CHECKSUM.itemsize
        return [rows[place * row : (place + 1) * row], sums[at * checksum : (at + 1) * checksum]]

    def _put(self, parts: list[memoryview], slot: int) -> None:
        """Write what follows each other from a slot on."""
        offset, size = PAGE + int(slot) * self.slot_bytes, sum(map(len, parts))
        with self._writing:
            written = os.pwritev(self._file, parts, offset)
            if written < size:
                self._write_all(b"".join(parts)[written:], offset + written)
            self._regions[slot // _REGION : (slot + size // self.slot_bytes - 1) // _REGION + 1] = True

    def _write_again(self, region: int) -> None:
        """Write what a region has; what cannot be read of it is lost, and found so by its checksums."""
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
                    self._write_all(record, offset)

    def _write_all(self, content: bytes, offset: int) -> None:
        while content:
            written = os.pwrite(self._file, content, offset)
            content, offset = content[written:], offset + written

    def _no_regions(self) -> NDArray[np.bool_]:
        return np.zeros(-(-self.slots // _REGION), np.bool_)


class DiskTierFactory(TierFactory):
    """Opens tiers on the disk: files with rising numbers in the folder of the site."""

    def __init__(self, section: DiskSettings | None, site: TierContext) -> None:
        self._section = section
        self._site = site
        self._mine: Path | None = None

    @property
    def slots(self) -> int:
        """The slots of a file of its bytes."""
        assert self._section is not None
        return DiskTier.slots_in(int(self._section.bytes), self._site.row_bytes)

    def owns(self, file: TierRef) -> bool:
        """A checkpoint names the file."""
        return file.name.endswith(SUFFIX)

    def open_existing(self, contents: StoreSnapshot) -> DiskTier:
        """Open the checkpoint's file, also where it was put aside while the checkpoints were not there."""
        file = contents.standing.file
        assert file is not None
        with damage_is(SettingsError, f"checkpoint {contents.standing.checkpoint}: the file of its replay contents"):
            check_names([file.name])
        path = (take_back if self._site.writable else find)(self._folder, file)
        tier = DiskTier.open(path, pinned=self._site.pinned, writable=self._site.writable)
        if tier.id != file.id:
            tier.close()
            raise SettingsError(
                f"{tier.path} is not the file that checkpoint {contents.standing.checkpoint} belongs to; put that one "
                f"back"
            )
        if self._site.writable:
            with away_is_dependency("replay.disk"):
                tier.mark_named()
        return tier

    def open_primary(self, slots: int, source: SlowTier | None) -> DiskTier:
        """Return the checkpoint's own file where it fits, else a new one."""
        if isinstance(source, DiskTier) and (source.row_bytes, source.slots) == (self._site.row_bytes, slots):
            self._mine = source.path
            return source
        return self._made(slots)

    def cache(self, slots: int, _primary: SlowTier) -> DiskTier:
        """Make a new file: a cache on the disk is empty after a restart."""
        return self._made(slots)

    def cleanup_actions(self, *, first: bool) -> list[Callable[[], None]]:  # noqa: ARG002 `make_way` is called before
        """Return what removes the files of earlier processes."""
        files = [] if self._site.folder is None else self._site.folder.glob(f"*{SUFFIX}")
        return [functools.partial(discard, path) for path in files if path != self._mine]

    @property
    def _folder(self) -> Path:
        assert self._site.folder is not None
        return self._site.folder

    def _made(self, slots: int) -> DiskTier:
        self._mine = next_path(self._folder)
        return DiskTier.create(self._mine, self._site.row_bytes, slots, pinned=self._site.pinned)


def _kind_of(error: OSError | DamagedError) -> type[AnabranchError]:
    return SettingsError if failure_of(error) is Failure.DAMAGED else DependencyError


def _lost(path: Path, what: str) -> str:
    return (
        f"the replay contents are in {path}, which {what}; put it back (is its disk mounted?), or begin anew by moving "
        "the checkpoints away"
    )


def _allocate(descriptor: int, size: int) -> None:
    """Take the space of a file: records written into a sparse one cost ten times more, and may find the disk full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:  # macOS
        os.ftruncate(descriptor, size)
