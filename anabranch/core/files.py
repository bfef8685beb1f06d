"""Reads files of the state directory safely, and makes their folders durable."""

import contextlib
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from anabranch.core.failures import DamagedError

MOST_BYTES = 256 * 2**20
"""The largest manifest or report; a larger file is damaged."""
_PART_BYTES = 2**20
MOST_NUMBER = 10**18 - 1
"""The highest number of a folder."""
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")
_NAME = re.compile("[A-Za-z0-9._-]{1,200}")
"""File systems take 255 bytes, and a temporary name is longer."""


def sync_directory(path: Path) -> None:
    """Fsync a directory: files that were created or renamed in it survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without blocking on a FIFO, and return its descriptor.

    Raises:
        DamagedError: the path is a link, a directory, a FIFO or a device.
        OSError: the file cannot be opened.
    """
    _check_regular(path, os.lstat(path))
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor))  # the file may have been replaced
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(path: Path, limit: int | None = None) -> bytes:
    """Return the contents of a regular file.

    Raises:
        DamagedError: it is no regular file, or has more than `limit` bytes.
        OSError: it cannot be read; FileNotFoundError where it is missing.
    """
    with os.fdopen(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise DamagedError(f"{path} has {size} bytes, more than {limit}")
        try:
            return file.read(size)
        except OSError as exc:
            exc.filename = str(path)  # a descriptor's error has no name
            raise


def file_parts(path: Path) -> Iterator[bytes]:
    """Yield the contents of a regular file in parts of at most 1 MB; raises as `read_file`."""
    with os.fdopen(open_file(path), "rb") as file:
        try:
            while part := file.read(_PART_BYTES):
                yield part
        except OSError as exc:
            exc.filename = str(path)  # a descriptor's error has no name
            raise


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a regular file; raises DamagedError where it is none, and OSError."""
    digest = hashlib.sha256()
    for part in file_parts(path):
        digest.update(part)
    return digest.hexdigest()


def write_at(descriptor: int, content: bytes, offset: int) -> None:
    """Write all of `content` at an offset; a single call of the system may write less. Raises OSError."""
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


def existing_folder(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def used_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # a process has just deleted it
            continue
    return total


def stamp_of(path: Path) -> object:
    """Return a value that changes when a file is replaced or changed; None where it is missing or cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Lock a file, which is created if it is missing, against other processes and this one; must not be nested.

    Raises OSError where it cannot be created.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def number_of(name: str) -> int | None:
    """Return a folder's name as a number; None if it is none."""
    return int(name) if _NUMBER.fullmatch(name) else None


def check_names(names: Iterable[str], folder: str = "") -> None:
    """Raise DamagedError unless all are names of files in one folder, `folder` (such as "rank-0/") or that itself."""
    for name in names:
        last = name.removeprefix(folder)
        if not name.startswith(folder) or not _NAME.fullmatch(last) or last in (".", ".."):
            raise DamagedError(f"{name[:200]!r} is not the name of a file below it")


def _check_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError(f"{path} is not a regular file")
