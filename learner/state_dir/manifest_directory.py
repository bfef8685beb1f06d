"""A directory of numbered folders, each with a manifest: the common base of checkpoints and versions.

Imports no torch.
"""

import hashlib
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError, damage_is, decoded
from anabranch.core.files import MOST_BYTES, check_names
from learner.state_dir.folders import MANIFEST, Folder, LocalStorage, Storage

_T = TypeVar("_T")


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
        """Return the highest number of any folder, including incomplete ones and those set aside; 0 without one."""
        return self._storage.highest()

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
        with damage_is(self._error, f"{self._kind} {number}: {self.directory(number) / MANIFEST} cannot be used"):
            if manifest.number != number:
                raise DamagedError(f"it is that of {self._kind} {manifest.number}")
            check_names(manifest.files, self._prefix)
        return manifest

    def read(self, manifest: _M, name: str) -> bytes:
        """Read a file, and check its digest."""
        path = self.directory(manifest.number) / name
        with damage_is(self._error, f"{self._kind} {manifest.number}: cannot read {path}"):
            content = self.folder(manifest.number).read(name)
        if hashlib.sha256(content).hexdigest() != manifest.files[name]:
            raise self._error(f"{self._kind} {manifest.number}: {path} does not have its digest")
        return content

    def delete(self, number: int) -> None:
        """Delete a folder, if it exists."""
        self._storage.delete(number)

    def clean(self) -> None:
        """Remove what a crash left half-written or half-deleted. Only the learner that holds the lock may call it."""
        self._storage.clean()

    def _document(self, number: int, name: str, kind: type[_T]) -> _T:
        """Read a file of JSON that has no digest."""
        path = self.directory(number) / name
        with damage_is(self._error, f"{self._kind} {number}: {path} cannot be read"):
            try:
                content = self.folder(number).read(name, MOST_BYTES)
            except FileNotFoundError as exc:
                raise self._error(f"{self._kind} {number}: {path} does not exist") from exc
            return decoded(content, kind)


def encode_manifest(manifest: FolderManifest) -> bytes:
    """Return the JSON of a manifest, indented."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)
