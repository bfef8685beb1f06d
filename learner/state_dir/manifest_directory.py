"""A directory of numbered folders, each with a manifest: the common base of checkpoints and versions.

Imports no torch.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError, damage_is, decoded
from anabranch.core.files import MOST_BYTES, check_names, digest_of_file
from learner.state_dir.folders import MANIFEST, Folder, LocalStorage, Storage

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
        self._storage = storage or LocalStorage(path)
        self.location = self._storage.location
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
        return self._storage.folder(number)

    def numbers(self) -> list[int]:
        """Return the numbers of all folders, ascending."""
        return self._storage.numbers()

    def highest(self) -> int:
        """Return the highest number of any folder, including incomplete ones and those set aside, and of `taken`."""
        return max(self._storage.highest(), self.taken)

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
            path = self._storage.local_base(manifest.base)
            if digest_of_file(path) != manifest.base:
                raise DamagedError(f"{path} does not have its digest")
        return path

    def delete(self, number: int) -> None:
        """Delete a folder, if it exists."""
        self._storage.delete(number)

    def clean(self) -> None:
        """Remove what a crash left half-written or half-deleted. Only the learner that holds the lock may call it."""
        self._storage.clean()

    def drop_copies(self) -> None:
        """Remove local copies of files, which nothing reads any more."""
        self._storage.drop_copies()

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
