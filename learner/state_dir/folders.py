"""Where checkpoints and versions lie: numbered folders of files, each there whole or not at all.

An object store is one more class beside `LocalStorage`. What tells the learner and serving of each other (`state.json`,
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


class Folder(Protocol):
    """Files by names, which may have a `/` in them.

    All raise OSError, FileNotFoundError where a file is missing; what reads raises DamagedError where something else
    than a file is in its place.
    """

    def files(self) -> Mapping[str, int]:
        """Return the names and sizes of all files; none where there is no such folder."""
        ...

    def stamp(self, name: str) -> object:
        """Return what tells a file from the one that takes its place; None where there is none."""
        ...

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return the contents of a file; DamagedError where it has more than `most` bytes."""
        ...

    def local(self, name: str) -> Path:
        """Return a file of this host with the same contents, to read parts of."""
        ...

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        """Write a file that is not there yet; it survives a crash once the folder is published or one replaced."""
        ...

    def link(self, name: str, source: "Folder", other: str) -> None:
        """Make a file that has the contents of one in another folder for good, without copying where that can be."""
        ...

    def replace(self, name: str, content: bytes) -> None:
        """Replace a file atomically, once all that was written before survives a crash."""
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
        """Return the highest number of any folder, whole or not; 0 when there is none."""
        ...

    def folder(self, number: int) -> Folder:
        """Return a folder, which need not exist."""
        ...

    def publish(self, number: int, generation: int) -> AbstractContextManager[Folder]:
        """Give a folder to write into, MANIFEST last, which exists when the context ends and survives a crash.

        After an error or a crash before that there is nothing, or a leftover that `clean` removes. Writers of several
        generations do not disturb each other.
        """
        ...

    def delete(self, number: int) -> None:
        """Remove a folder, if it is there: at once it does not exist, and what a crash leaves of it is for `clean`."""
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
        """Return names and sizes, of subdirectories too."""
        found = (path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in found}

    def stamp(self, name: str) -> object:
        """Return modification time and inode."""
        try:
            found = (self.path / name).stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_ino

    def read(self, name: str, most: int | None = None) -> bytes:
        """Read a regular file."""
        return read_file(self.local(name), most)

    def local(self, name: str) -> Path:
        """Return the file itself; DamagedError where a link leads to another folder."""
        path = self.path / name
        for folder in {self.path, path.parent}:
            if stat.S_ISLNK(os.lstat(folder).st_mode):
                raise DamagedError(f"{folder} is a link, not a folder")
        return path

    def write(self, name: str, *pieces: bytes | memoryview) -> None:
        """Write a file and fsync it."""
        write_durably(self._place(name), *pieces)

    def link(self, name: str, source: Folder, other: str) -> None:
        """Make a hard link, or a copy where the file system has no links."""
        place, there = self._place(name), source.local(other)
        try:
            place.hardlink_to(there)
        except FileNotFoundError:
            raise
        except OSError:  # the file system has no links
            write_durably(place, read_file(there))

    def replace(self, name: str, content: bytes) -> None:
        """Write under another name, and rename."""
        self.sync()
        replace_file(self.path / name, content)

    def remove(self, name: str) -> None:
        """Unlink a file."""
        with contextlib.suppress(FileNotFoundError):
            self.local(name).unlink()

    def sync(self) -> None:
        """Have the names of all files that were written survive a crash of the machine."""
        while self._unsynced:
            sync_directory(self._unsynced.pop())

    def _place(self, name: str) -> Path:
        place = self.path / name
        if place.parent != self.path:
            place.parent.mkdir(exist_ok=True)
        self._unsynced |= {place.parent, self.path}
        return place


class LocalStorage:
    """Directories below one, on a file system that renames atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def numbers(self) -> list[int]:
        """Look for directories with a manifest."""
        return sorted(number for number in self._directories() if self._exists(number))

    def highest(self) -> int:
        """Look at the names of all directories."""
        return max(self._directories(), default=0)

    def folder(self, number: int) -> LocalFolder:
        """Return a directory."""
        return LocalFolder(self.path / str(number))

    @contextlib.contextmanager
    def publish(self, number: int, generation: int) -> Iterator[Folder]:
        """Give a temporary directory, fsync it, and rename it once."""
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
        """Return whether a folder has a manifest; raises OSError where that cannot be found out."""
        try:
            os.lstat(self.path / str(number) / MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True
