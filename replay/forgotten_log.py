"""`forgotten.log`: what was forgotten, at whose word, up to where, and what that removed.

A line is the CRC-32C of a JSON object, a blank, and the object. Lines are only ever appended, under a lock on the file,
and are on the disk when `append` returns. A line without its end was torn by a crash, before anybody was told that it
is there: it is cut off. A line that ends and does not have its checksum is damage, and is refused: what it said must
not come back in silence.
"""

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

import crc32c
import msgspec

from ingest.errors import DependencyError, SettingsError
from ingest.failure import UNDECODABLE
from replay.files import sync_directory
from replay.forgotten import ByKey, ByRange, Record

NAME = "forgotten.log"


class Applied(msgspec.Struct, frozen=True, kw_only=True, tag="applied", tag_field="what"):
    """Everything that the records up to number `through` cover is gone from store, guard set, tiers and cuts."""

    time: float
    through: int
    store: int
    """Events that were in the store."""
    guard: int
    """Held-out events that were in the guard set."""


_Line = ByKey | ByRange | Applied
_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)


class ForgottenLog:
    """The log as far as it was read. Used by one thread; other processes may append at any time."""

    def __init__(self, path: Path) -> None:
        """Take the path of the file, which need not be there; `refresh` reads it."""
        self.path = path
        self.records: list[Record] = []
        """Number n is at place n - 1."""
        self.applied: list[Applied] = []
        self._bytes = 0
        self._said_by: set[str] = set()

    @property
    def through(self) -> int:
        """The number of the last record that is known to be applied everywhere; 0 when none is."""
        return max((each.through for each in self.applied), default=0)

    def knows(self, by: str) -> bool:
        """Whether a record of this tombstone is there."""
        return by in self._said_by

    def refresh(self) -> bool:
        """Read what was appended since, and return whether there was anything.

        Raises:
            SettingsError: the file is damaged.
            DependencyError: it cannot be read.
        """
        try:
            if self.path.stat().st_size == self._bytes:
                return False
            with self.path.open("rb") as file:
                file.seek(self._bytes)
                content = file.read()
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise DependencyError(f"{self.path} cannot be read: {exc.strerror}; what it says has to be known") from exc
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines(keepends=True):
            self._take(line)
        return bool(whole)

    def is_behind(self) -> bool:
        """Whether something may have been appended that is not read yet; costs next to nothing."""
        try:
            return self.path.stat().st_size != self._bytes
        except OSError:
            return False

    def append(self, said: Sequence[Record] | Applied) -> list[Record]:
        """Write records, numbered, or what was done; it is durable when this returns.

        Raises:
            OSError: it cannot be written; nothing is there then that a reader would see after a crash.
            SettingsError: what is there is damaged.
        """
        new = not self.path.exists()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self.refresh()
            if os.fstat(descriptor).st_size < self._bytes:
                raise SettingsError(self._damaged("lost lines that were there"))
            lines: list[_Line] = [said] if isinstance(said, Applied) else list(self._numbered(said))
            content = b"".join(_encode(line) for line in lines)
            os.ftruncate(descriptor, self._bytes)
            try:
                _write(descriptor, content, self._bytes)
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, self._bytes)
                raise
            if new:
                sync_directory(self.path.parent)
        finally:
            os.close(descriptor)
        self.refresh()
        return [line for line in lines if not isinstance(line, Applied)]

    def _numbered(self, records: Sequence[Record]) -> list[Record]:
        first = len(self.records) + 1
        return [msgspec.structs.replace(record, number=first + place) for place, record in enumerate(records)]

    def _take(self, line: bytes) -> None:
        checksum, _, text = line[:-1].partition(b" ")
        if checksum != b"%08x" % crc32c.crc32c(text):
            raise SettingsError(self._damaged("a line that does not have its checksum"))
        try:
            said = _decoder.decode(text)
        except UNDECODABLE as exc:
            raise SettingsError(self._damaged(f"a line of another release: {exc}")) from exc
        if isinstance(said, Applied):
            self.applied.append(said)
        else:
            if said.number != len(self.records) + 1:
                raise SettingsError(self._damaged(f"record {said.number} where {len(self.records) + 1} should be"))
            self.records.append(said)
            if said.by != "command":
                self._said_by.add(said.by)
        self._bytes += len(line)

    def _damaged(self, what: str) -> str:
        return (
            f"{self.path} has {what} at byte {self._bytes}; put the file back from a backup, or what was forgotten "
            "could come back"
        )


def now() -> float:
    """Return the time that records carry, seconds since 1970."""
    return round(time.time(), 3)


def _encode(line: _Line) -> bytes:
    text = msgspec.json.encode(line)
    return b"%08x %s\n" % (crc32c.crc32c(text), text)


def _write(descriptor: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
