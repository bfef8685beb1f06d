"""Storage of checkpoints and versions: numbered folders of files, each published completely or not at all.

An object store would be another class like `LocalStorage`. The files that learner and serving exchange (`state.json`,
reports, locks) and the disk tier are files of the host in any case.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from anabranch.core.atomic_files import replace_file, write_durably
from anabranch.core.failures import DamagedError
from anabranch.core.files import number_of, read_file, sync_directory

MANIFEST = "manifest.json"
"""The file without which a folder does not exist."""
SET_ASIDE = ".set-aside"
"""Suffix of directories that were set aside."""


class Folder(Protocol):
    """Files by names, which may have a `/` in them.

    All methods raise OSError, FileNotFoundError where a file is missing; those that read raise DamagedError where
    something other than a file has its name.
    """

    def files(self) -> Mapping[str, int]:
        """Return the names and sizes of all files; none where there is no such folder."""
        ...

    def stamp(self, name: str) -> object:
        """Return a stamp that changes when the file is replaced; None where there is no file."""
        ...

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return the contents of a file; DamagedError where it has more than `max_bytes`."""
        ...

    def local(self, name: str) -> Path:
        """Return the path of a local file with the same contents, for reading parts of it."""
        ...

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        """Write a new file; it survives a crash once the folder is published or a file in it is replaced."""
        ...

    def link(self, name: str, source: "Folder", other: str) -> None:
        """Make a file with the contents of one in another folder, permanently, and without copying if possible."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Replace a file atomically, after earlier writes survive a crash."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        ...


class Storage(Protocol):
    """Numbered folders. One process writes, others may read; all raise OSError."""

    def numbers(self) -> list[int]:
        """Return the numbers of all folders that exist, rising."""
        ...

    def highest(self) -> int:
        """Return the highest number of any folder, complete or not; 0 when there is none."""
        ...

    def folder(self, number: int) -> Folder:
        """Return a folder, which need not exist."""
        ...

    def publish(self, number: int, generation: int) -> AbstractContextManager[Folder]:
        """Yield a folder to write into, MANIFEST last; it exists when the context ends, and survives a crash.

        After an earlier error or crash there is no folder, or a leftover that `clean` removes. Writers of several
        generations do not interfere.
        """
        ...

    def delete(self, number: int) -> None:
        """Remove a folder, if it is there, atomically; `clean` removes what a crash leaves of it."""
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


class LocalFolder:
    """A directory of a file system of this host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unsynced: set[Path] = set()

    def files(self) -> Mapping[str, int]:
        """Return names and sizes, including files in subdirectories."""
        paths = (path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in paths}

    def stamp(self, name: str) -> object:
        """Return modification time and inode."""
        try:
            status = (self.path / name).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Read a regular file."""
        return read_file(self.local(name), max_bytes)

    def local(self, name: str) -> Path:
        """Return the file itself; DamagedError where a link leads to another folder."""
        path = self.path / name
        for folder in {self.path, path.parent}:
            if stat.S_ISLNK(os.lstat(folder).st_mode):
                raise DamagedError(f"{folder} is a link, not a folder")
        return path

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        """Write a file and fsync it."""
        write_durably(self._new_path(name), *pieces)

    def link(self, name: str, source: Folder, other: str) -> None:
        """Make a hard link, or a copy where the file system has no links."""
        path, there = self._new_path(name), source.local(other)
        try:
            path.hardlink_to(there)
        except FileNotFoundError:
            raise
        except OSError:  # the file system has no links
            write_durably(path, read_file(there))

    def replace(self, name: str, content: bytes) -> None:
        """Write under another name, and rename."""
        self.sync()
        replace_file(self.path / name, content)

    def remove(self, name: str) -> None:
        """Unlink a file."""
        with contextlib.suppress(FileNotFoundError):
            self.local(name).unlink()

    def sync(self) -> None:
        """Fsync the directories of all written files, so that their names survive a crash of the machine."""
        while self._unsynced:
            sync_directory(self._unsynced.pop())

    def _new_path(self, name: str) -> Path:
        path = self.path / name
        if path.parent != self.path:
            path.parent.mkdir(exist_ok=True)
        self._unsynced |= {path.parent, self.path}
        return path


class LocalStorage:
    """Directories below one, on a file system that renames atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def numbers(self) -> list[int]:
        """Return the numbers of directories with a manifest."""
        return sorted(number for number in self._directories() if self._exists(number))

    def highest(self) -> int:
        """Return the highest number of any directory, also of those set aside."""
        aside = (number_of(path.name.removesuffix(SET_ASIDE)) or 0 for path in self.path.glob(f"*{SET_ASIDE}"))
        return max([*self._directories(), *aside], default=0)

    def folder(self, number: int) -> LocalFolder:
        """Return a directory."""
        return LocalFolder(self.path / str(number))

    @contextlib.contextmanager
    def publish(self, number: int, generation: int) -> Iterator[Folder]:
        """Yield a temporary directory, fsync it, and rename it."""
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
            shutil.rmtree(temporary, ignore_errors=True)  # a disk that is full should not stay so
            raise
        sync_directory(self.path)

    def delete(self, number: int) -> None:
        """Rename a directory, and remove what is in it."""
        discarded = self.path / f".tmp-deleted-{number}"
        with contextlib.suppress(FileNotFoundError):
            (self.path / str(number)).rename(discarded)
        with contextlib.suppress(FileNotFoundError):
            if discarded.is_symlink():
                discarded.unlink()
            else:
                shutil.rmtree(discarded)

    def set_aside(self, number: int) -> None:
        """Rename a directory from `<number>` to `<number>.set-aside`."""
        (self.path / str(number)).rename(self.path / f"{number}{SET_ASIDE}")
        sync_directory(self.path)

    def delete_set_aside(self) -> None:
        """Remove all directories `<number>.set-aside`."""
        for path in self.path.glob(f"*{SET_ASIDE}"):
            shutil.rmtree(path)

    def clean(self) -> None:
        """Remove temporary directories, and those without a manifest."""
        halves = [self.path / str(number) for number in {*self._directories()} - {*self.numbers()}]
        for leftover in [*halves, *self.path.glob(".tmp-*")]:
            shutil.rmtree(leftover, ignore_errors=True)

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
