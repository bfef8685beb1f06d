"""The storage of checkpoints and versions: numbered folders of files, each published atomically.

An object store would be another implementation of `Storage`. The files that learner and serving exchange (`state.json`,
reports, locks) and the disk tier are always files of the host.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from anabranch.core.atomic_files import replace_file, write_durably
from anabranch.core.failures import DamagedError
from anabranch.core.files import file_parts, number_of, read_file, sync_directory

MANIFEST = "manifest.json"
"""Name of the file without which a folder does not exist."""
BASES = "bases"
"""Name of the directory of bases; see `bases.py`."""
BASE_FILE = "model.safetensors"
SET_ASIDE = ".set-aside"
"""Suffix of directories that were set aside."""


class Folder(Protocol):
    """Files by name; a name may contain a `/`.

    All methods raise OSError, and FileNotFoundError for a missing file. Methods that read raise DamagedError where the
    name is not that of a regular file.
    """

    def files(self) -> Mapping[str, int]:
        """Return the size of each file by name; empty if the folder does not exist."""
        ...

    def stamp(self, name: str) -> object:
        """Return a stamp that changes when the file is replaced; None if there is no file."""
        ...

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return the contents of a file; raises DamagedError if it has more than `max_bytes`."""
        ...

    def local(self, name: str) -> Path:
        """Return the path of a local file with the same contents, to read parts of it."""
        ...

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a new file; it is durable once the folder is published or a file in it is replaced.

        A piece may be computed when it is written: all of them may not fit into memory.
        """
        ...

    def link(self, name: str, source: "Folder", other: str) -> None:
        """Add the file `other` of another folder under `name`, without a copy if possible; it outlives the source."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Replace a file atomically, after earlier writes are durable."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        ...


class Storage(Protocol):
    """Numbered folders. One process writes, others may read. All methods raise OSError."""

    location: str
    """Where the folders are, for messages."""

    def numbers(self) -> list[int]:
        """Return the numbers of all folders, ascending."""
        ...

    def highest(self) -> int:
        """Return the highest number of any folder, complete or not; 0 when there is none.

        It may be that of a folder that was begun or deleted through this object.
        """
        ...

    def folder(self, number: int) -> Folder:
        """Return a folder, which need not exist."""
        ...

    def publish(self, number: int, generation: int) -> AbstractContextManager[Folder]:
        """Yield a folder to write into, MANIFEST last; it exists and is durable once the context ends.

        After an error or a crash there is no folder, but perhaps temporary files that `clean` removes. Writers of
        several generations do not interfere.
        """
        ...

    def delete(self, number: int) -> None:
        """Remove a folder atomically, if it exists; `clean` removes what a crash leaves of it."""
        ...

    def set_aside(self, number: int) -> None:
        """Make a folder not exist, atomically, and keep its files until `delete_set_aside`."""
        ...

    def delete_set_aside(self) -> None:
        """Remove all folders that were set aside."""
        ...

    def clean(self) -> None:
        """Remove what a crash left half-written or half-deleted."""
        ...

    def local_base(self, sha256: str) -> Path:
        """Return the path of a local file that has a base; its digest is not checked."""
        ...

    def drop_copies(self) -> None:
        """Remove the local copies that `Folder.local` has made, which nothing reads any more."""
        ...


class LocalFolder(Folder):
    """A directory of a local file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unsynced: set[Path] = set()

    @override
    def files(self) -> Mapping[str, int]:
        paths = (path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in paths}

    @override
    def stamp(self, name: str) -> object:
        try:
            status = (self.path / name).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino

    @override
    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        return read_file(self.local(name), max_bytes)

    @override
    def local(self, name: str) -> Path:
        path = self.path / name
        for folder in {self.path, path.parent}:
            if stat.S_ISLNK(os.lstat(folder).st_mode):
                raise DamagedError(f"{folder} is a link, not a folder")
        return path

    @override
    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        write_durably(self._new_path(name), pieces)

    @override
    def link(self, name: str, source: Folder, other: str) -> None:
        path, there = self._new_path(name), source.local(other)
        try:
            path.hardlink_to(there)
        except FileNotFoundError:
            raise
        except OSError:  # the file system has no links
            write_durably(path, file_parts(there))

    @override
    def replace(self, name: str, content: bytes) -> None:
        self.sync()
        replace_file(self.path / name, content)

    @override
    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.local(name).unlink()

    def sync(self) -> None:
        """Fsync the directories of all written files, so that their names are durable."""
        while self._unsynced:
            sync_directory(self._unsynced.pop())

    def _new_path(self, name: str) -> Path:
        path = self.path / name
        if path.parent != self.path:
            path.parent.mkdir(exist_ok=True)
        self._unsynced |= {path.parent, self.path}
        return path


class LocalStorage(Storage):
    """Subdirectories of one directory, on a file system that renames atomically."""

    def __init__(self, path: Path) -> None:
        self.path, self.location = path, str(path)

    @override
    def numbers(self) -> list[int]:
        return sorted(number for number in self._directories() if self._exists(number))

    @override
    def highest(self) -> int:
        aside = (number_of(path.name.removesuffix(SET_ASIDE)) or 0 for path in self.path.glob(f"*{SET_ASIDE}"))
        return max([*self._directories(), *aside], default=0)

    @override
    def folder(self, number: int) -> LocalFolder:
        return LocalFolder(self.path / str(number))

    @override
    @contextlib.contextmanager
    def publish(self, number: int, generation: int) -> Iterator[LocalFolder]:
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(parents=True)
            sync_directory(self.path.parent)
        temporary = self.path / f".tmp-{generation}-{number}"
        try:
            temporary.mkdir()
            folder = LocalFolder(temporary)
            yield folder
            folder.sync()
            temporary.rename(self.path / str(number))
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)  # the disk may be full
            raise
        sync_directory(self.path)

    @override
    def delete(self, number: int) -> None:
        discarded = self.path / f".tmp-deleted-{number}"
        with contextlib.suppress(FileNotFoundError):
            (self.path / str(number)).rename(discarded)
        with contextlib.suppress(FileNotFoundError):
            if discarded.is_symlink():
                discarded.unlink()
            else:
                shutil.rmtree(discarded)

    @override
    def set_aside(self, number: int) -> None:
        (self.path / str(number)).rename(self.path / f"{number}{SET_ASIDE}")
        sync_directory(self.path)

    @override
    def delete_set_aside(self) -> None:
        for path in self.path.glob(f"*{SET_ASIDE}"):
            shutil.rmtree(path)

    @override
    def clean(self) -> None:
        incomplete = [self.path / str(number) for number in {*self._directories()} - {*self.numbers()}]
        for leftover in [*incomplete, *self.path.glob(".tmp-*")]:
            shutil.rmtree(leftover, ignore_errors=True)

    @override
    def local_base(self, sha256: str) -> Path:
        return LocalFolder(self.path.parent / BASES / sha256).local(BASE_FILE)

    @override
    def drop_copies(self) -> None:
        """There are none."""

    def _directories(self) -> list[int]:
        try:
            return [number for entry in self.path.iterdir() if (number := number_of(entry.name)) is not None]
        except FileNotFoundError:
            return []

    def _exists(self, number: int) -> bool:
        """Return whether a folder has a manifest; raises OSError where it cannot be checked."""
        try:
            os.lstat(self.path / str(number) / MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True
