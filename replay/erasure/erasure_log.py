"""`erasures.log`: which events were erased, by which command or tombstone, and how many events that removed.

Records are appended under a lock on the file, and are durable when `append` returns. A line without its end was torn by
a crash before `append` returned, and is cut off. A complete line with a wrong checksum is damage, and raises an error:
erased events must not come back silently.

A line is the CRC-32C of a JSON object, a space, and the object. The first line is the head. A line with many packed
records may follow, and then one line for each further record, in order. A reader who can guess a key could search for
its hash. So hashes are masked by a secret of 32 bytes, in a file next to the log that only its owner may read.

From time to time `compact` replaces the file by a new one with packed records. Numbers of records go on, so that a log
that lost records is detected. Compaction drops records by key whose events can neither be read again nor come from a
checkpoint.
"""

import contextlib
import copy
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import crc32c
import msgspec

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import UNDECODABLE
from anabranch.core.files import sync_directory, write_at
from anabranch.replay.erasure.erased_events import ByKey, ByRange, ErasedEvents, Packed, Record

FORMAT = 4
SECRET_FILE = "erasures.key"  # noqa: S105 its name
"""The name of the file with the secret, next to the log."""
SECRET_BYTES = 32
_CHECK_BYTES = 8


class Head(msgspec.Struct, frozen=True, kw_only=True, tag="head", tag_field="what"):
    """The first line: totals of the packed records and of the events that they removed."""

    format: int = FORMAT
    file: str
    """A random id of this file: an inode may soon be reused."""
    secret: str
    """A digest that identifies the secret."""
    tail: str = "0" * 20
    """The byte at which the lines for single records begin, in a fixed number of digits."""
    records: int = 0
    """The number of the last record that is packed."""
    through: int = 0
    store: int = 0
    holdout: int = 0
    ends: dict[str, int] = {}
    """The ends of the last tombstone, to which lines without `up_to` refer."""
    dropped: int = 0
    """The highest number of a dropped record: an older checkpoint may have events that it erased."""
    log_starts: dict[str, int] = {}
    """The ends below which records were last dropped: other readers drop the same records."""


class Applied(msgspec.Struct, frozen=True, kw_only=True, tag="applied", tag_field="what"):
    """The events of the records up to number `through` are gone from store, holdout set, tiers and checkpoints."""

    time: float
    through: int
    store: int
    """Events that were removed from the store."""
    holdout: int
    """Events that were removed from the holdout set."""


class KeyLine(msgspec.Struct, frozen=True, kw_only=True, tag="key", tag_field="what", omit_defaults=True):
    """A record by key. Without `up_to` it has the ends of the last tombstone before it with `up_to`."""

    number: int
    time: float
    by: str
    key: str
    """16 hexadecimal digits, masked by the secret."""
    up_to: dict[str, int] | None = None
    beyond: dict[str, int] = {}


Line = Head | Packed | KeyLine | ByRange | Applied
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class DamagedLineError(ValueError):
    """A complete line that is not one of ours; its message is a description."""


def encode(line: Line) -> bytes:
    """Return the bytes of a line."""
    text = msgspec.json.encode(line)
    return b"%08x %s\n" % (crc32c.crc32c(text), text)


def decode(line: bytes) -> Line:
    """Return the object of a line; raises DamagedLineError."""
    checksum, _, text = line[:-1].partition(b" ")
    if checksum != b"%08x" % crc32c.crc32c(text):
        raise DamagedLineError("a line that does not have its checksum")
    try:
        return _decoder.decode(text)
    except UNDECODABLE as exc:
        raise DamagedLineError(f"a line of another release: {exc}") from exc


class Secret:
    """The secret that masks the hashes of keys in the log."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        self.check = hashlib.blake2b(b"check", key=value, digest_size=_CHECK_BYTES).hexdigest()
        """A digest that identifies the secret without revealing it."""

    @classmethod
    def read(cls, path: Path) -> "Secret | None":
        """Read the secret next to a log; None if it is missing, or was torn by a crash before it was used.

        Raises:
            DependencyError: it cannot be read.
        """
        try:
            value = path.with_name(SECRET_FILE).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise DependencyError(
                f"{path.with_name(SECRET_FILE)} cannot be read: {exc.strerror}; {path} needs it"
            ) from exc
        return cls(value) if len(value) == SECRET_BYTES else None

    @classmethod
    def make(cls, path: Path) -> "Secret":
        """Create a secret for the log at a path; it is durable when this returns. Raises OSError."""
        value = secrets.token_bytes(SECRET_BYTES)
        descriptor = os.open(path.with_name(SECRET_FILE), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, value)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_directory(path.parent)
        return cls(value)

    def line_of(self, record: Record, ends: dict[str, int] | None) -> KeyLine | ByRange:
        """Return the line of a record; `ends`: of the last tombstone."""
        if isinstance(record, ByRange):
            return record
        masked = f"{int(record.key_hash, 16) ^ self._mask(record):016x}"
        up_to = None if record.up_to == ends else record.up_to
        return KeyLine(
            number=record.number, time=record.time, by=record.by, key=masked, up_to=up_to, beyond=record.beyond
        )

    def record_of(self, line: KeyLine, ends: dict[str, int]) -> ByKey:
        """Return the record of a line; `ends`: of the last tombstone."""
        up_to = ends if line.up_to is None else line.up_to
        return ByKey(
            number=line.number,
            time=line.time,
            by=line.by,
            key_hash=f"{int(line.key, 16) ^ self._mask(line):016x}",
            up_to=up_to,
            beyond=line.beyond,
        )

    def masked(self, packed: Packed) -> Packed:
        """Return packed records whose keys are masked by a new nonce."""
        nonce = secrets.token_hex(16)
        return msgspec.structs.replace(packed, nonce=nonce, keys=self._masked(packed.keys, nonce))

    def unpacked(self, line: Packed) -> ErasedEvents:
        """Return the events that the packed records of a line cover."""
        return ErasedEvents.unpacked(msgspec.structs.replace(line, keys=self._masked(line.keys, line.nonce)))

    def _mask(self, record: ByKey | KeyLine) -> int:
        """Return 64 bits for this record alone: a known hash and its line do not reveal other hashes."""
        name = f"{record.number} {float(record.time)!r} {record.by}".encode()
        return int.from_bytes(hashlib.blake2b(name, key=self._value, digest_size=8).digest(), "little")

    def _masked(self, keys: bytes, nonce: str) -> bytes:
        """Return hashes xor the byte stream of a nonce; a second call returns the hashes again."""
        stream = hashlib.shake_256(self._value + bytes.fromhex(nonce)).digest(len(keys))
        return (int.from_bytes(keys, "little") ^ int.from_bytes(stream, "little")).to_bytes(len(keys), "little")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Lock the file at a path, which is created if it is missing, and yield its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):  # else the file was replaced meanwhile
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


NAME = "erasures.log"
COMMAND = "command"
"""The author of a record that is not from a tombstone."""
_SMALL_BYTES = 1 << 20
_AT_ONCE = 4096
_TEMPORARY = ".compacting"


class ErasureLog:
    """The part of the log that was read. Used by one thread; other processes may append or compact it at any time."""

    def __init__(self, path: Path) -> None:
        """Take the path of the file, which may be missing; `refresh` reads it."""
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.erased = ErasedEvents()
        """The events that the records cover."""
        self.count = 0
        """The number of the last record, from 1."""
        self.through = 0
        """The number of the last record that is applied everywhere; 0 without one."""
        self.store = self.holdout = 0
        """Events that were removed in total, from the store and from the holdout set."""
        self.dropped = 0
        """The highest number of a dropped record: an older checkpoint may have events that it erased."""
        self._log_starts: dict[str, int] = {}
        self._unapplied: list[Record] = []
        """The records after `through`, in order."""
        self._fresh: list[Record] = []
        """Records that were read and are not in `erased` yet."""
        self._ends: dict[str, int] = {}
        """Of the last tombstone that has them."""
        self._secret: Secret | None = None
        self._bytes = self._packed_bytes = 0
        self._head = b""
        """The first line, which differs in a file that has replaced this one."""
        self._seen: object = None
        """Size, inode and time of the file when it was last read."""

    def since(self, number: int) -> list[Record]:
        """Return the records after `number`, which is `through` or more."""
        assert number >= self.count - len(self._unapplied)
        return self._unapplied[number - (self.count - len(self._unapplied)) :]

    @property
    def is_long(self) -> bool:
        """Whether the log has enough unpacked lines to be compacted."""
        return self._bytes - self._packed_bytes > max(_SMALL_BYTES, self._packed_bytes // 2)

    def refresh(self) -> bool:
        """Read the lines that were appended since the last call, and return whether there were any.

        Raises:
            SettingsError: the file is damaged.
            DependencyError: it cannot be read.
        """
        if not self.is_behind():
            return False
        before = self.count, self._bytes
        try:
            with self.path.open("rb") as file:
                seen = _seen(os.fstat(file.fileno()))
                if (head := file.readline()) != self._head:
                    self._load_head(head)
                elif os.fstat(file.fileno()).st_size < self._bytes:
                    raise SettingsError(self._damaged("lost lines that were there"))
                file.seek(self._bytes)
                for line in file:
                    if line.endswith(b"\n"):
                        self._read_line(line)
            self._cover()
            self._seen = seen
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise DependencyError(f"{self.path} cannot be read: {exc.strerror}; its records are needed") from exc
        if self.count < before[0]:
            raise SettingsError(self._damaged("lost records that were there"))
        return (self.count, self._bytes) != before

    def contains(self, tombstone: ByKey) -> bool:
        """Return whether a tombstone is recorded; its `by` is its position."""
        partition, _, offset = tombstone.by.rpartition("@")
        return self.erased.contains_tombstone(int(tombstone.key_hash, 16), partition, int(offset))

    def is_behind(self) -> bool:
        """Return whether lines may have been appended that are not read yet; takes one system call."""
        try:
            return _seen(self.path.stat()) != self._seen
        except OSError:
            return False

    def append(self, entry: Sequence[Record] | Applied) -> list[Record]:
        """Append records, with numbers, or an `Applied`; durable when this returns. Returns the numbered records.

        Raises:
            OSError: the log cannot be written; readers see nothing of the entry, also after a crash.
            SettingsError: the log is damaged.
        """
        with locked(self.path) as descriptor:
            new = os.fstat(descriptor).st_size == 0
            self.refresh()
            secret = self._secret or Secret.read(self.path) or Secret.make(self.path)
            records = [] if isinstance(entry, Applied) else self._numbered(entry)
            lines = [entry] if isinstance(entry, Applied) else self._lines(records, secret)
            content = b"".join([b"" if self._bytes else _first(secret), *map(encode, lines)])
            os.ftruncate(descriptor, self._bytes)
            try:
                write_at(descriptor, content, self._bytes)
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, self._bytes)
                raise
            if new:
                sync_directory(self.path.parent)
        self.refresh()
        return records

    def copy(self) -> "ErasureLog":
        """Return a copy of the part that was read, for another thread."""
        new = copy.copy(self)
        new.erased, new._unapplied, new._fresh = self.erased.copy(), list(self._unapplied), []
        return new

    def compact(self, log_starts: Mapping[str, int] | None = None, through: int = 0) -> None:
        """Replace the log by one with packed records.

        Readers see the old file or the new one. Others may append most of the time; their lines are copied under the
        lock before the new file replaces the old one. A crash leaves a temporary file, which the next call overwrites.

        Args:
            log_starts: by name of the partition the first offset that may still be read. through: the number of the
            last record whose events are in no checkpoint. Applied records up to it are dropped
                if all their events are below `log_starts`.

        Raises:
            OSError: the new file cannot be written; the old one is unchanged.
            SettingsError: the log is damaged.
        """
        compacted = self.copy()
        compacted.refresh()
        if compacted._secret is None:
            return
        if dropped := compacted.erased.drop(log_starts or {}, min(through, compacted.through)):
            compacted.dropped, compacted._log_starts = max(dropped, compacted.dropped), dict(log_starts or {})
        temporary = self.path.with_name(f"{NAME}{_TEMPORARY}")
        with locked(temporary) as descriptor:
            os.ftruncate(descriptor, 0)
            write_at(descriptor, compacted._compacted(compacted._secret), 0)
            os.fsync(descriptor)
            with locked(self.path) as old:
                if os.pread(old, len(compacted._head), 0) != compacted._head:
                    return  # another process has replaced it
                since = os.pread(old, os.fstat(old).st_size - compacted._bytes, compacted._bytes)
                write_at(descriptor, since[: since.rfind(b"\n") + 1], os.fstat(descriptor).st_size)
                os.fsync(descriptor)
                temporary.replace(self.path)
                sync_directory(self.path.parent)

    def _compacted(self, secret: Secret) -> bytes:
        """Return an equivalent log: packed records, and separate lines for those that are not applied yet."""
        packed = encode(secret.masked(self.erased.packed()))
        first = self.count - len(self._unapplied)
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
        begin = len(encode(head)) + len(packed)
        head = msgspec.structs.replace(head, tail=f"{begin:020d}")
        return b"".join([encode(head), packed, *map(encode, self._lines(self._unapplied, secret))])

    def _lines(self, records: Sequence[Record], secret: Secret) -> list[Line]:
        lines: list[Line] = []
        ends: dict[str, int] | None = self._ends
        for record in records:
            lines.append(secret.line_of(record, ends))
            if isinstance(record, ByKey) and record.by != COMMAND:
                ends = record.up_to
        return lines

    def _numbered(self, records: Sequence[Record]) -> list[Record]:
        return [msgspec.structs.replace(record, number=number) for number, record in enumerate(records, self.count + 1)]

    def _load_head(self, line: bytes) -> None:
        """Load the head of a new file; packed records that were read before are not read again."""
        if not line.endswith(b"\n"):
            if self._head:
                raise SettingsError(self._damaged("lost lines that were there"))
            return
        self._bytes = 0
        head = self._decoded(line)
        if not isinstance(head, Head) or head.format != FORMAT:
            raise SettingsError(self._damaged("a first line of another release"))
        secret = self._known(head)
        if packed_are_read := 0 < self.count >= head.records and self.through >= head.through:
            self.erased.drop(head.log_starts, head.dropped)
        else:
            self._reset()
            self.count = head.records
        self._head, self._secret = line, secret
        self._packed_bytes = int(head.tail)
        self._bytes = self._packed_bytes if packed_are_read else len(line)
        self.through, self.store, self.holdout, self._ends = head.through, head.store, head.holdout, head.ends
        self.dropped, self._log_starts = head.dropped, head.log_starts

    def _known(self, head: Head) -> Secret:
        secret = Secret.read(self.path)
        if secret is None or secret.check != head.secret:
            name = self.path.with_name(SECRET_FILE)
            raise SettingsError(
                f"{name} is missing, or not the secret of {self.path}; put it back, or what was erased may come back"
            )
        return secret

    def _read_line(self, line: bytes) -> None:
        entry = self._decoded(line)
        if isinstance(entry, Applied):
            self._set_applied(entry)
        elif isinstance(entry, Packed):
            assert self._secret is not None
            self.erased = self._secret.unpacked(entry)
        elif isinstance(entry, Head):
            raise SettingsError(self._damaged("a second head"))
        else:
            self._add_record(entry)
        self._bytes += len(line)

    def _set_applied(self, entry: Applied) -> None:
        self._unapplied = self._unapplied[max(0, entry.through - (self.count - len(self._unapplied))) :]
        self.through = max(self.through, entry.through)
        self.store, self.holdout = self.store + entry.store, self.holdout + entry.holdout

    def _add_record(self, entry: KeyLine | ByRange) -> None:
        assert self._secret is not None
        record = self._secret.record_of(entry, self._ends) if isinstance(entry, KeyLine) else entry
        if isinstance(entry, KeyLine) and entry.by != COMMAND and entry.up_to is not None:
            self._ends = entry.up_to
        if record.number <= self.count:  # read from the previous file
            return
        if record.number != self.count + 1:
            raise SettingsError(self._damaged(f"record {record.number} where {self.count + 1} should be"))
        self.count += 1
        self._unapplied.append(record)
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


def _seen(status: os.stat_result) -> object:
    """Return values that change with each change of a file."""
    return status.st_size, status.st_ino, status.st_mtime_ns


def now() -> float:
    """Return the time that records carry, seconds since 1970."""
    return round(time.time(), 3)
