"""`erasures.log`: what was erased, at whose word, up to where, and what that removed.

Records are appended, under a lock on the file, and are on the disk when `append` returns. A line without its end was
torn by a crash, before anybody was told that it is there: it is cut off. A line that ends and does not have its
checksum is damage, and is refused: what it said must not come back in silence.

Now and then `compact` writes a new file, in which what all records cover is packed, and puts it in the place of the old
one. Numbers go on from there, so that a log that lost records is told from one that is whole. Records by key whose
events cannot be read again, nor come from a checkpoint, are dropped then.
"""

import contextlib
import copy
import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.files import sync_directory
from replay.erasure.erased_events import ByKey, ByRange, ErasedEvents, Record
from replay.erasure.log_file import (
    SECRET_FILE,
    Applied,
    DamagedLineError,
    Head,
    KeyLine,
    Line,
    PackedLine,
    Secret,
    decode,
    encode,
)

NAME = "erasures.log"
COMMAND = "command"
"""Who said a record that was no tombstone."""
_SMALL_BYTES = 1 << 20
_AT_ONCE = 4096
_TEMPORARY = ".compacting"


class ErasureLog:
    """The log as far as it was read. Used by one thread; other processes may append or compact it at any time."""

    def __init__(self, path: Path) -> None:
        """Take the path of the file, which need not be there; `refresh` reads it."""
        self.path = path
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.erased = ErasedEvents()
        """All that the records cover."""
        self.count = 0
        """The number of the last record; they count from 1."""
        self.through = 0
        """The number of the last record that is known to be applied everywhere; 0 when none is."""
        self.store = self.holdout = 0
        """Events of the store and of the holdout set that were removed in all."""
        self.dropped = 0
        """The highest number of a record that was dropped: what it erased may be in a checkpoint that is older."""
        self._log_starts: dict[str, int] = {}
        self._open: list[Record] = []
        """Those after `through`, in order."""
        self._fresh: list[Record] = []
        """Those that were read and are not in `erased` yet."""
        self._ends: dict[str, int] = {}
        """Of the last tombstone that says them."""
        self._secret: Secret | None = None
        self._packed: list[PackedLine] = []
        self._bytes = self._packed_bytes = 0
        self._head = b""
        """The first line, by which one file is told from another that took its place."""
        self._seen: object = None
        """Of the file when it was read last."""

    def since(self, number: int) -> list[Record]:
        """Return the records after that number, which is `through` or more."""
        assert number >= self.count - len(self._open)
        return self._open[number - (self.count - len(self._open)) :]

    @property
    def is_long(self) -> bool:
        """Whether so much of it could be packed that it should be."""
        return self._bytes - self._packed_bytes > max(_SMALL_BYTES, self._packed_bytes // 2)

    def refresh(self) -> bool:
        """Read what was appended since, and return whether there was anything.

        Raises:
            SettingsError: the file is damaged.
            DependencyError: it cannot be read.
        """
        if not self.is_behind():
            return False
        known = self.count, self._bytes
        try:
            with self.path.open("rb") as file:
                seen = _seen(os.fstat(file.fileno()))
                if (head := file.readline()) != self._head:
                    self._meet(head)
                elif os.fstat(file.fileno()).st_size < self._bytes:
                    raise SettingsError(self._damaged("lost lines that were there"))
                file.seek(self._bytes)
                for line in file:
                    if line.endswith(b"\n"):
                        self._take(line)
            self._cover()
            self._seen = seen
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise DependencyError(f"{self.path} cannot be read: {exc.strerror}; what it says has to be known") from exc
        if self.count < known[0]:
            raise SettingsError(self._damaged("lost records that were there"))
        return (self.count, self._bytes) != known

    def knows(self, tombstone: ByKey) -> bool:
        """Whether what a tombstone erases is written down; `by` is its place."""
        partition, _, offset = tombstone.by.rpartition("@")
        return self.erased.knows(int(tombstone.key_hash, 16), partition, int(offset))

    def is_behind(self) -> bool:
        """Whether something may have been appended that is not read yet; costs next to nothing."""
        try:
            return _seen(self.path.stat()) != self._seen
        except OSError:
            return False

    def append(self, said: Sequence[Record] | Applied) -> list[Record]:
        """Write records, numbered, or what was done; it is durable when this returns.

        Raises:
            OSError: it cannot be written; nothing is there then that a reader would see after a crash.
            SettingsError: what is there is damaged.
        """
        with _locked(self.path) as descriptor:
            new = os.fstat(descriptor).st_size == 0
            self.refresh()
            secret = self._secret or Secret.read(self.path) or Secret.make(self.path)
            records = [] if isinstance(said, Applied) else self._numbered(said)
            lines = [said] if isinstance(said, Applied) else self._lines(records, secret)
            content = b"".join([b"" if self._bytes else _first(secret), *map(encode, lines)])
            os.ftruncate(descriptor, self._bytes)
            try:
                _write(descriptor, content, self._bytes)
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, self._bytes)
                raise
            if new:
                sync_directory(self.path.parent)
        self.refresh()
        return records

    def copy(self) -> "ErasureLog":
        """Return the log as far as it was read, for another thread."""
        new = copy.copy(self)
        new.erased, new._open, new._fresh, new._packed = self.erased.copy(), list(self._open), [], []
        return new

    def compact(self, log_starts: Mapping[str, int] | None = None, through: int = 0) -> None:
        """Write the log anew, with what all records cover packed, and put it in the place of the old one.

        Args:
            log_starts: by name of the partition the first offset that may still be read.
            through: the number of the last record of which no checkpoint has events. With all its events below
                `log_starts`, a record up to it, and of which is known that it is applied, is dropped.

        Whoever reads sees the old file or the new one. Most of it is done while others may append; what they did is
        taken over, under the lock, before the new one takes its place. A crash leaves a file that is written over.

        Raises:
            OSError: it cannot be written; the old one is as it was.
            SettingsError: what is there is damaged.
        """
        whole = self.copy()
        whole.refresh()
        if whole._secret is None:
            return
        if dropped := whole.erased.drop(log_starts or {}, min(through, whole.through)):
            whole.dropped, whole._log_starts = max(dropped, whole.dropped), dict(log_starts or {})
        temporary = self.path.with_name(f"{NAME}{_TEMPORARY}")
        with _locked(temporary) as descriptor:
            os.ftruncate(descriptor, 0)
            _write(descriptor, whole._compacted(whole._secret), 0)
            os.fsync(descriptor)
            with _locked(self.path) as old:
                if os.pread(old, len(whole._head), 0) != whole._head:
                    return  # another one was quicker
                since = os.pread(old, os.fstat(old).st_size - whole._bytes, whole._bytes)
                _write(descriptor, since[: since.rfind(b"\n") + 1], os.fstat(descriptor).st_size)
                os.fsync(descriptor)
                temporary.replace(self.path)
                sync_directory(self.path.parent)

    def _compacted(self, secret: Secret) -> bytes:
        """Return a log that says the same: records that are not applied have lines of their own beside the pack."""
        packed = [encode(line) for line in secret.pack(self.erased.packed())]
        first = self.count - len(self._open)
        head = Head(
            file=secrets.token_hex(8),
            secret=secret.check,
            records=first,
            through=self.through,
            store=self.store,
            holdout=self.holdout,
            ends=self._ends,
            dropped=self.dropped,
            log_starts=self._log_starts,
        )
        begin = len(encode(head)) + sum(map(len, packed))
        head = msgspec.structs.replace(head, tail=f"{begin:020d}")
        return b"".join([encode(head), *packed, *map(encode, self._lines(self._open, secret))])

    def _lines(self, records: Sequence[Record], secret: Secret) -> list[Line]:
        lines: list[Line] = []
        ends: dict[str, int] | None = self._ends
        for record in records:
            lines.append(secret.line_of(record, ends))
            if isinstance(record, ByKey) and record.by != COMMAND:
                ends = record.up_to
        return lines

    def _numbered(self, records: Sequence[Record]) -> list[Record]:
        first = self.count + 1
        return [msgspec.structs.replace(record, number=first + place) for place, record in enumerate(records)]

    def _meet(self, line: bytes) -> None:
        """Take up a file that was not seen before, by its first line: what is known of it already is not read again."""
        if not line.endswith(b"\n"):
            if self._head:
                raise SettingsError(self._damaged("lost lines that were there"))
            return
        count, through = self.count, self.through
        self._bytes = 0
        head = self._decoded(line)
        if not isinstance(head, Head):
            raise SettingsError(self._damaged("a first line of another release"))
        self._head, self._secret = line, self._known(head)
        if count >= head.records and through >= head.through and count:
            self._bytes = self._packed_bytes = int(head.tail)
            self._ends = head.ends
            self.through, self.store, self.holdout = head.through, head.store, head.holdout
            self.erased.drop(head.log_starts, head.dropped)
            self.dropped, self._log_starts = head.dropped, head.log_starts
            return
        secret = self._secret
        self._begin_anew()
        self._head, self._secret, self._bytes = line, secret, len(line)
        self.count, self.through, self._ends = head.records, head.through, head.ends
        self.store, self.holdout, self._packed_bytes = head.store, head.holdout, int(head.tail)
        self.dropped, self._log_starts = head.dropped, head.log_starts

    def _known(self, head: Head) -> Secret:
        secret = Secret.read(self.path)
        if secret is None or secret.check != head.secret:
            name = self.path.with_name(SECRET_FILE)
            raise SettingsError(
                f"{name} is missing, or not the secret of {self.path}; put it back, or what was erased may come back"
            )
        return secret

    def _take(self, line: bytes) -> None:
        said = self._decoded(line)
        if isinstance(said, Applied):
            self._take_applied(said)
        elif isinstance(said, PackedLine):
            self._packed.append(said)
        elif isinstance(said, Head):
            raise SettingsError(self._damaged("a second head"))
        else:
            self._take_record(said)
        self._bytes += len(line)
        if self._packed and self._bytes == self._packed_bytes and self._secret is not None:
            self.erased, self._packed = self._secret.unpack(self._packed, self.count), []

    def _take_applied(self, said: Applied) -> None:
        self._open = self._open[max(0, said.through - (self.count - len(self._open))) :]
        self.through = max(self.through, said.through)
        self.store, self.holdout = self.store + said.store, self.holdout + said.holdout

    def _take_record(self, said: KeyLine | ByRange) -> None:
        assert self._secret is not None
        record = self._secret.record_of(said, self._ends) if isinstance(said, KeyLine) else said
        if isinstance(said, KeyLine) and said.by != COMMAND and said.up_to is not None:
            self._ends = said.up_to
        if record.number <= self.count:  # known from the file before
            return
        if record.number != self.count + 1:
            raise SettingsError(self._damaged(f"record {record.number} where {self.count + 1} should be"))
        self.count += 1
        self._open.append(record)
        self._fresh.append(record)
        if len(self._fresh) == _AT_ONCE:
            self._cover()

    def _cover(self) -> None:
        fresh, self._fresh = self._fresh, []
        self.erased.add(fresh)

    def _decoded(self, line: bytes) -> Line:
        try:
            return decode(line)
        except DamagedLineError as exc:
            raise SettingsError(self._damaged(str(exc))) from exc

    def _damaged(self, what: str) -> str:
        return (
            f"{self.path} has {what} at byte {self._bytes}; put the file back from a backup, or what was erased "
            "could come back"
        )


def _first(secret: Secret) -> bytes:
    """Return the head of a new log."""
    head = Head(file=secrets.token_hex(8), secret=secret.check)
    return encode(msgspec.structs.replace(head, tail=f"{len(encode(head)):020d}"))


def _seen(found: os.stat_result) -> object:
    """Return what changes with each change of a file."""
    return found.st_size, found.st_ino, found.st_mtime_ns


def now() -> float:
    """Return the time that records carry, seconds since 1970."""
    return round(time.time(), 3)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Hold the lock of the file that is in that place, and yield its descriptor; it is made where there is none."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):  # else another one was put there meanwhile
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _write(descriptor: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
