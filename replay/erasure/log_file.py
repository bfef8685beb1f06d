"""How `erasures.log` lies on the disk: lines with a checksum, and hashes of keys that tell nobody who they are.

A line is the CRC-32C of a JSON object, a blank, and the object. The first one is the head; after it may come lines that
have all of many records packed, and then one line for each record, in order.

Who can guess a key could look for its hash: so hashes lie there under a secret of 32 bytes, in a file beside the log
that its owner alone may read.
"""

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
"""The name of the file beside the log that has the secret."""
_SECRET_BYTES = 32
_CHECK_BYTES = 8
_AT_ONCE = 1 << 20
"""Keys of a line."""
_REST_BYTES = 16


class Head(msgspec.Struct, frozen=True, kw_only=True, tag="head", tag_field="what"):
    """The first line: what the packed records were, and what they removed."""

    format: int = FORMAT
    file: str
    """Of this file alone: an inode is soon that of another one."""
    secret: str
    """By which the secret is known again."""
    tail: str = "0" * 20
    """Where the lines for single records begin, in bytes; as many digits whatever it is."""
    records: int = 0
    """The number of the last record that is packed."""
    through: int = 0
    store: int = 0
    holdout: int = 0
    ends: dict[str, int] = {}
    """Those of the last tombstone, to which lines that have none refer."""
    dropped: int = 0
    """The highest number of a record that was dropped: a checkpoint that is older may have what it erased."""
    log_starts: dict[str, int] = {}
    """Below which all lay that was dropped last: who has read the records drops the same."""


class Applied(msgspec.Struct, frozen=True, kw_only=True, tag="applied", tag_field="what"):
    """Everything that the records up to number `through` cover is gone from store, holdout set, tiers and
    checkpoints."""

    time: float
    through: int
    store: int
    """Events that were in the store."""
    holdout: int
    """Held-out events that were in the holdout set."""


class PackedLine(msgspec.Struct, frozen=True, kw_only=True, tag="packed", tag_field="what"):
    """Many records, or a part of those: `keys` under the secret and `nonce`."""

    nonce: str
    bases: list[int] = []
    rows: bytes = b""
    numbers: bytes = b""
    keys: bytes = b""
    rest: bytes = b""
    ranges: dict[int, tuple[list[int], list[int]]] = {}


class KeyLine(msgspec.Struct, frozen=True, kw_only=True, tag="key", tag_field="what", omit_defaults=True):
    """A record by key. Without `up_to` that is the one of the last tombstone before it that has one."""

    number: int
    time: float
    by: str
    key: str
    """16 hexadecimal digits, under the secret."""
    up_to: dict[str, int] | None = None
    beyond: dict[str, int] = {}


Line = Head | PackedLine | KeyLine | ByRange | Applied
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class DamagedLineError(ValueError):
    """A line that ends and is not one of ours; says what it is."""


def encode(line: Line) -> bytes:
    """Return a line as it is written."""
    text = msgspec.json.encode(line)
    return b"%08x %s\n" % (crc32c.crc32c(text), text)


def decode(line: bytes) -> Line:
    """Return what a line says; raises DamagedLineError."""
    checksum, _, text = line[:-1].partition(b" ")
    if checksum != b"%08x" % crc32c.crc32c(text):
        raise DamagedLineError("a line that does not have its checksum")
    try:
        return _decoder.decode(text)
    except UNDECODABLE as exc:
        raise DamagedLineError(f"a line of another release: {exc}") from exc


class Secret:
    """What hashes of keys are hidden by in the log."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        self.check = hashlib.blake2b(b"check", key=value, digest_size=_CHECK_BYTES).hexdigest()
        """By which the secret is known again, and which says nothing else of it."""

    @classmethod
    def read(cls, path: Path) -> "Secret | None":
        """Read the secret beside a log; None when it is not there, or was torn by a crash before it was used.

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
        return cls(value) if len(value) == _SECRET_BYTES else None

    @classmethod
    def make(cls, path: Path) -> "Secret":
        """Make a secret for the log at a path, on the disk when this returns. Raises OSError."""
        value = secrets.token_bytes(_SECRET_BYTES)
        descriptor = os.open(path.with_name(SECRET_FILE), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, value)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_directory(path.parent)
        return cls(value)

    def line_of(self, record: Record, ends: dict[str, int] | None) -> KeyLine | ByRange:
        """Return the line of a record, where `ends` are those of the last tombstone."""
        if isinstance(record, ByRange):
            return record
        hidden = f"{int(record.key_hash, 16) ^ self._mask(record):016x}"
        up_to = None if record.up_to == ends else record.up_to
        return KeyLine(
            number=record.number, time=record.time, by=record.by, key=hidden, up_to=up_to, beyond=record.beyond
        )

    def record_of(self, line: KeyLine, ends: dict[str, int]) -> ByKey:
        """Return the record of a line, where `ends` are those of the last tombstone."""
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
        """Return the lines of what many records cover."""
        first = True
        for begin in range(0, max(1, len(packed.keys)), 8 * _AT_ONCE):
            nonce = secrets.token_hex(16)
            yield PackedLine(
                nonce=nonce,
                bases=packed.bases if first else [],
                rows=packed.rows if first else b"",
                numbers=packed.numbers if first else b"",
                keys=self._hidden(packed.keys[begin : begin + 8 * _AT_ONCE], nonce),
                rest=packed.rest[begin // 8 * _REST_BYTES : (begin // 8 + _AT_ONCE) * _REST_BYTES],
                ranges=packed.ranges if first else {},
            )
            first = False

    def unpack(self, lines: Sequence[PackedLine], last: int) -> ErasedEvents:
        """Return what they cover; the records of a log that does not say their numbers count as the `last` one."""
        if not lines:
            return ErasedEvents()
        keys = b"".join(self._hidden(line.keys, line.nonce) for line in lines)
        rest = b"".join(line.rest for line in lines)
        first = lines[0]
        rows = len(first.rows) // (8 * max(1, len(first.bases)))
        numbers = first.numbers or last.to_bytes(8, "little") * rows
        packed = Packed(bases=first.bases, rows=first.rows, numbers=numbers, keys=keys, rest=rest, ranges=first.ranges)
        return ErasedEvents.unpacked(packed)

    def _mask(self, record: ByKey | KeyLine) -> int:
        """Return 64 bits that no other record has: who knows a hash, and one line of it, knows no other."""
        place = f"{record.number} {float(record.time)!r} {record.by}".encode()
        return int.from_bytes(hashlib.blake2b(place, key=self._value, digest_size=8).digest(), "little")

    def _hidden(self, keys: bytes, nonce: str) -> bytes:
        """Return hashes under a stream of bytes of their own, or those under it as they were."""
        stream = hashlib.shake_256(self._value + bytes.fromhex(nonce)).digest(len(keys))
        return (int.from_bytes(keys, "little") ^ int.from_bytes(stream, "little")).to_bytes(len(keys), "little")
