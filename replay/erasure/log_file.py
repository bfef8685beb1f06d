"""The format of `erasures.log`: lines with a checksum, and hashes of keys that are masked by a secret.

A line is the CRC-32C of a JSON object, a space, and the object. The first line is the head. Lines with many packed
records may follow, and then one line for each further record, in order.

A reader who can guess a key could search for its hash. So hashes are masked by a secret of 32 bytes, in a file next to
the log that only its owner may read.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import crc32c
import msgspec

from anabranch.core.errors import DependencyError
from anabranch.core.failures import UNDECODABLE
from anabranch.core.files import sync_directory
from replay.erasure.erased_events import ByKey, ByRange, ErasedEvents, Packed, Record

FORMAT = 3
SECRET_FILE = "erasures.key"  # noqa: S105 its name
"""The name of the file with the secret, next to the log."""
SECRET_BYTES = 32
_CHECK_BYTES = 8
_AT_ONCE = 1 << 20
"""Keys of a line."""
_REST_BYTES = 16


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


class PackedLine(msgspec.Struct, frozen=True, kw_only=True, tag="packed", tag_field="what"):
    """All or a part of many records; `keys` are masked by the secret and `nonce`."""

    nonce: str
    bases: list[int] = []
    rows: bytes = b""
    numbers: bytes = b""
    keys: bytes = b""
    rest: bytes = b""
    ranges: dict[int, tuple[list[int], list[int]]] = {}


class KeyLine(msgspec.Struct, frozen=True, kw_only=True, tag="key", tag_field="what", omit_defaults=True):
    """A record by key. Without `up_to` it has the ends of the last tombstone before it with `up_to`."""

    number: int
    time: float
    by: str
    key: str
    """16 hexadecimal digits, masked by the secret."""
    up_to: dict[str, int] | None = None
    beyond: dict[str, int] = {}


Line = Head | PackedLine | KeyLine | ByRange | Applied
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

    def pack(self, packed: Packed) -> Iterator[PackedLine]:
        """Yield the lines of packed records."""
        first = True
        for begin in range(0, max(1, len(packed.keys)), 8 * _AT_ONCE):
            nonce = secrets.token_hex(16)
            yield PackedLine(
                nonce=nonce,
                bases=packed.bases if first else [],
                rows=packed.rows if first else b"",
                numbers=packed.numbers if first else b"",
                keys=self._masked(packed.keys[begin : begin + 8 * _AT_ONCE], nonce),
                rest=packed.rest[begin // 8 * _REST_BYTES : (begin // 8 + _AT_ONCE) * _REST_BYTES],
                ranges=packed.ranges if first else {},
            )
            first = False

    def unpack(self, lines: Sequence[PackedLine], last: int) -> ErasedEvents:
        """Return the events that packed lines cover; records without numbers get the number `last`."""
        if not lines:
            return ErasedEvents()
        keys = b"".join(self._masked(line.keys, line.nonce) for line in lines)
        rest = b"".join(line.rest for line in lines)
        first = lines[0]
        rows = len(first.rows) // (8 * max(1, len(first.bases)))
        numbers = first.numbers or last.to_bytes(8, "little") * rows
        packed = Packed(bases=first.bases, rows=first.rows, numbers=numbers, keys=keys, rest=rest, ranges=first.ranges)
        return ErasedEvents.unpacked(packed)

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
