"""The storage of checkpoints and versions: numbered folders of files, each published atomically, with a manifest.

`ManifestDirectory` is the common base of checkpoints and versions. In an object store, `BucketStorage` has them. The
files that learner and serving exchange (`state.json`, reports, locks) and the disk tier are always files of the host.
Imports no torch.
"""

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from anabranch.core.atomic_files import replace_file, write_durably
from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError, damage_is, decoded
from anabranch.core.files import (
    MOST_BYTES,
    check_names,
    digest_of_file,
    file_parts,
    number_of,
    read_file,
    sync_directory,
)

MANIFEST = "manifest.json"
"""Name of the file without which a folder does not exist."""
BASES = "bases"
"""Name of the directory of bases; see `bases.py`."""
BASE_FILE = "model.safetensors"
REBUILD = "anabranch-rebuild-"
"""Prefix of the temporary folders of rebuilds, which have copies of stored events."""
SET_ASIDE = ".set-aside"
"""Suffix of directories that were set aside."""
PARTIAL = "fetching"
"""Name of the folder of files that were fetched by their digests, until their checkpoint or version is complete."""
TRACES = "traces"
"""Name of the folder of the profiler's traces."""
COPIES = "anabranch-fetched-"
"""Prefix of the temporary folders in which commands have copies of files of an object store."""


def discard_partial(state_dir: Path) -> None:
    """Delete the files of fetches that were interrupted."""
    shutil.rmtree(state_dir / PARTIAL, ignore_errors=True)


class Folder:
    """Files by name, in a directory; a name may contain a `/`. An object store's folder overrides all methods.

    All methods raise OSError, and FileNotFoundError for a missing file. Methods that read raise DamagedError where the
    name is not that of a regular file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unsynced: set[Path] = set()

    def files(self) -> Mapping[str, int]:
        """Return the size of each file by name; empty if the folder does not exist."""
        paths = (path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in paths}

    def stamp(self, name: str) -> object:
        """Return a stamp that changes when the file is replaced; None if there is no file."""
        try:
            status = (self.path / name).stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino

    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        """Return the contents of a file; raises DamagedError if it has more than `max_bytes`."""
        return read_file(self.local(name), max_bytes)

    def local(self, name: str) -> Path:
        """Return the path of a local file with the same contents, to read parts of it."""
        path = self.path / name
        for folder in {self.path, path.parent}:
            if stat.S_ISLNK(os.lstat(folder).st_mode):
                raise DamagedError(f"{folder} is a link, not a folder")
        return path

    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a new file; it is durable once the folder is published or a file in it is replaced.

        A piece may be computed when it is written: all of them may not fit into memory.
        """
        write_durably(self._new_path(name), pieces)

    def link(self, name: str, source: "Folder", other: str) -> None:
        """Add the file `other` of another folder under `name`, without a copy if possible; it outlives the source."""
        path, there = self._new_path(name), source.local(other)
        try:
            path.hardlink_to(there)
        except FileNotFoundError:
            raise
        except OSError:  # the file system has no links
            write_durably(path, file_parts(there))

    def replace(self, name: str, content: bytes) -> None:
        """Replace a file atomically, after earlier writes are durable."""
        self.sync()
        replace_file(self.path / name, content)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
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


class Storage:
    """Numbered folders: subdirectories of one directory, on a file system that renames atomically.

    One process writes, others may read. All methods raise OSError. An object store's storage overrides all of them.
    """

    location: str
    """Where the folders are, for messages."""

    def __init__(self, path: Path) -> None:
        self.path, self.location = path, str(path)

    def numbers(self) -> list[int]:
        """Return the numbers of all folders, ascending."""
        return sorted(number for number in self._directories() if self._exists(number))

    def highest(self) -> int:
        """Return the highest number of any folder, complete or not; 0 when there is none.

        It may be that of a folder that was begun or deleted through this object.
        """
        aside = (number_of(path.name.removesuffix(SET_ASIDE)) or 0 for path in self.path.glob(f"*{SET_ASIDE}"))
        return max([*self._directories(), *aside], default=0)

    def folder(self, number: int) -> Folder:
        """Return a folder, which need not exist."""
        return Folder(self.path / str(number))

    @contextlib.contextmanager
    def publish(self, number: int, generation: int) -> Iterator[Folder]:
        """Yield a folder to write into, MANIFEST last; it exists and is durable once the context ends.

        After an error or a crash there is no folder, but perhaps temporary files that `clean` removes. Writers of
        several generations do not interfere.
        """
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(parents=True)
            sync_directory(self.path.parent)
        temporary = self.path / f".tmp-{generation}-{number}"
        try:
            temporary.mkdir()
            folder = Folder(temporary)
            yield folder
            folder.sync()
            temporary.rename(self.path / str(number))
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)  # the disk may be full
            raise
        sync_directory(self.path)

    def delete(self, number: int) -> None:
        """Remove a folder atomically, if it exists; `clean` removes what a crash leaves of it."""
        discarded = self.path / f".tmp-deleted-{number}"
        with contextlib.suppress(FileNotFoundError):
            (self.path / str(number)).rename(discarded)
        with contextlib.suppress(FileNotFoundError):
            if discarded.is_symlink():
                discarded.unlink()
            else:
                shutil.rmtree(discarded)

    def set_aside(self, number: int) -> None:
        """Make a folder not exist, atomically, and keep its files until `delete_set_aside`."""
        (self.path / str(number)).rename(self.path / f"{number}{SET_ASIDE}")
        sync_directory(self.path)

    def delete_set_aside(self) -> None:
        """Remove all folders that were set aside."""
        for path in self.path.glob(f"*{SET_ASIDE}"):
            shutil.rmtree(path)

    def clean(self) -> None:
        """Remove what a crash left half-written or half-deleted. Only the learner that holds the lock may call it."""
        incomplete = [self.path / str(number) for number in {*self._directories()} - {*self.numbers()}]
        for leftover in [*incomplete, *self.path.glob(".tmp-*")]:
            shutil.rmtree(leftover, ignore_errors=True)

    def local_base(self, sha256: str) -> Path:
        """Return the path of a local file that has a base; its digest is not checked."""
        return Folder(self.path.parent / BASES / sha256).local(BASE_FILE)

    def drop_copies(self) -> None:
        """Remove the local copies that `Folder.local` has made, which nothing reads any more."""

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


_T = TypeVar("_T")

SHOWN = 12
"""Characters of a digest in a sentence."""


class FolderManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every manifest has."""

    number: int
    generation: int
    """Generation of the learner that wrote the folder."""
    time: float
    """When it was written, in seconds since 1970."""
    step: int
    schema: str
    """The schema's digest."""
    files: dict[str, str]
    """SHA-256 of every file, by name."""
    base: str | None = None
    """SHA-256 of the file in `bases/` that has the frozen weights; None where the model has none."""


_M = TypeVar("_M", bound=FolderManifest)


class ManifestDirectory(Generic[_M]):
    """Numbered folders with manifests. One process writes them; there may be several readers.

    Methods that read raise `_error` for a damaged folder, and OSError where the operating system cannot read it.
    """

    _kind: str
    """What messages call a folder."""
    _manifest_type: type[_M]
    _error: type[SettingsError]
    _prefix = ""
    """Prefix of the names of all files."""

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        self.path = path
        self.storage = storage or Storage(path)
        self.location = self.storage.location
        """Where the folders are, for messages."""
        self.taken = 0
        """The highest number that is used elsewhere, and not again here."""
        self.base: str | None = None
        """The base that new folders name."""

    def directory(self, number: int) -> Path:
        """Return the path of a folder on a local file system."""
        return self.path / str(number)

    def folder(self, number: int) -> Folder:
        """Return the files of a folder, which need not exist."""
        return self.storage.folder(number)

    def numbers(self) -> list[int]:
        """Return the numbers of all folders, ascending."""
        return self.storage.numbers()

    def highest(self) -> int:
        """Return the highest number of any folder, including incomplete ones and those set aside, and of `taken`."""
        return max(self.storage.highest(), self.taken)

    def generation(self) -> int:
        """Return the latest generation of a learner that wrote a folder; 0 when there is none."""
        return max((self.generation_of(number) or 0 for number in self.numbers()), default=0)

    def generation_of(self, number: int) -> int | None:
        """Return the generation of the learner that wrote a folder; None when its manifest is damaged."""
        try:
            return self.manifest(number).generation
        except self._error:
            return None

    def manifest(self, number: int) -> _M:
        """Read a manifest."""
        manifest = self._document(number, MANIFEST, self._manifest_type)
        with damage_is(self._error, f"{self._kind} {number}: {self.location}/{number}/{MANIFEST} cannot be used"):
            if manifest.number != number:
                raise DamagedError(f"it is that of {self._kind} {manifest.number}")
            check_names(manifest.files, self._prefix)
        return manifest

    def read(self, manifest: _M, name: str) -> bytes:
        """Read a file, and check its digest."""
        path = f"{self.location}/{manifest.number}/{name}"
        with damage_is(self._error, f"{self._kind} {manifest.number}: cannot read {path}"):
            content = self.folder(manifest.number).read(name)
        if hashlib.sha256(content).hexdigest() != manifest.files[name]:
            raise self._error(f"{self._kind} {manifest.number}: {path} does not have its digest")
        return content

    def checked(self, manifest: _M, name: str) -> Path:
        """Return the local path of a file after checking its digest, without reading all of it into memory."""
        path = f"{self.location}/{manifest.number}/{name}"
        with damage_is(self._error, f"{self._kind} {manifest.number}: cannot read {path}"):
            local = self.folder(manifest.number).local(name)
            digest = digest_of_file(local)
        if digest != manifest.files[name]:
            raise self._error(f"{self._kind} {manifest.number}: {path} does not have its digest")
        return local

    def checked_base(self, manifest: _M) -> Path | None:
        """Return the local path of the base of a folder after checking its digest; None where it names none."""
        if manifest.base is None:
            return None
        with damage_is(
            self._error, f"{self._kind} {manifest.number}: its base {manifest.base[:SHOWN]!r} cannot be used"
        ):
            check_names([manifest.base])
            path = self.storage.local_base(manifest.base)
            if digest_of_file(path) != manifest.base:
                raise DamagedError(f"{path} does not have its digest")
        return path

    def delete(self, number: int) -> None:
        """Delete a folder, if it exists."""
        self.storage.delete(number)

    def _document(self, number: int, name: str, kind: type[_T]) -> _T:
        """Read a file of JSON that has no digest."""
        path = f"{self.location}/{number}/{name}"
        with damage_is(self._error, f"{self._kind} {number}: {path} cannot be read"):
            try:
                content = self.folder(number).read(name, MOST_BYTES)
            except FileNotFoundError as exc:
                raise self._error(f"{self._kind} {number}: {path} does not exist") from exc
            return decoded(content, kind)


def last_of_hours(hours: Mapping[int, int], keep: int, now: float) -> set[int]:
    """Return the last folder of each of the newest hours; `hours` has that of each, in the order of their making.

    Those of an hour to come, of a clock that was ahead, do not count; `now` is in seconds. If all are, `now` is what
    is wrong, and each counts.
    """
    last = {hour: number for number, hour in hours.items()}
    past = [hour for hour in sorted(last) if hour <= now // 3600] or sorted(last)
    return {last[hour] for hour in past[max(0, len(past) - keep) :]} if keep else set()


def other_base(actual: str | None, expected: str | None) -> str | None:
    """Return how the base of a checkpoint or version differs from that of the model, for a sentence; None if equal."""
    if actual == expected:
        return None
    named = ["no frozen weights" if base is None else f"the base {base[:SHOWN]!r}" for base in (actual, expected)]
    return f"was trained with {named[0]}, and [model] has {named[1]} now"


def encode_manifest(manifest: FolderManifest) -> bytes:
    """Return the JSON of a manifest, indented."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)
