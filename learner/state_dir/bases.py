"""The bases of models: frozen weights, which versions and checkpoints name by their SHA-256 instead of holding them.

    var/bases/<sha256>/model.safetensors

Each is written once, before the first version or checkpoint that names it, and deleted when none names it any more.
Torch is imported only where tensors are read.
"""

import contextlib
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from anabranch.core.atomic_files import write_durably
from anabranch.core.failures import DamagedError, damage_is
from anabranch.core.files import digest_of_file, file_parts, sync_directory
from anabranch.learner.errors import VersionError
from anabranch.learner.state_dir.folders import BASE_FILE, BASES, SHOWN, Folder, FolderManifest, ManifestDirectory

if TYPE_CHECKING:
    from torch import Tensor

_SHA256 = re.compile("[0-9a-f]{64}")
_TEMPORARY = ".tmp-"

_M = TypeVar("_M", bound=FolderManifest)


class Bases:
    """The directory `var/bases`. One process writes it; there may be several readers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def digests(self) -> set[str]:
        """Return the SHA-256 of each base that is there; raises OSError."""
        try:
            return {path.name for path in self.path.iterdir() if _SHA256.fullmatch(path.name)}
        except FileNotFoundError:
            return set()

    def file(self, sha256: str) -> Path:
        """Return the path of a base, which need not exist; raises DamagedError where `sha256` is none."""
        if not _SHA256.fullmatch(sha256):
            raise DamagedError(f"{sha256[:200]!r} is not a SHA-256")
        return self.path / sha256 / BASE_FILE

    def checked(self, sha256: str) -> Path:
        """Return the path of a base after a check of its digest.

        Raises:
            DamagedError: it does not have its digest, is no regular file, or does not exist.
            OSError: it cannot be read for now.
        """
        path = self.file(sha256)
        try:
            digest = digest_of_file(Folder(path.parent).local(BASE_FILE))
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise DamagedError(f"{path} does not exist") from exc
        if digest != sha256:
            raise DamagedError(f"{path} does not have its digest")
        return path

    def is_intact(self, sha256: str) -> bool:
        """Return whether a base is there and has its digest; raises OSError where it cannot be read for now."""
        try:
            self.checked(sha256)
        except DamagedError:
            return False
        return True

    def tensors(self, sha256: str) -> dict[str, "Tensor"]:
        """Read a base onto the CPU, after a check of its digest.

        Raises:
            VersionError: it is missing or damaged.
            OSError: it cannot be read for now.
        """
        from anabranch.learner.state_dir.safetensors_file import TensorFile

        with damage_is(VersionError, f"its base {sha256[:SHOWN]!r} cannot be used"):
            return dict(TensorFile(self.checked(sha256)))

    def add(self, sha256: str, write: Callable[[Path], object]) -> None:
        """Add a base, or replace a damaged one; `write` writes the file, whose digest is checked.

        Raises:
            DamagedError: what was written does not have the digest.
            OSError: it cannot be written.
        """
        target, temporary = self.file(sha256), self.path / f"{_TEMPORARY}{sha256}"
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            if digest_of_file(temporary) != sha256:
                raise DamagedError(f"it does not have the digest {sha256}")
            if target.parent.is_symlink() or not target.parent.is_dir():
                target.parent.unlink(missing_ok=True)
                target.parent.mkdir()
            temporary.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        for folder in (target.parent, self.path, self.path.parent):
            sync_directory(folder)

    def write(self, sha256: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a base from the pieces of its file; raises as `add`."""
        self.add(sha256, lambda path: write_durably(path, pieces))

    def stamp(self) -> object:
        """Return a stamp that changes when a base is added or replaced; raises OSError."""
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def prune(self, named: Collection[str]) -> None:
        """Delete all bases but these, and what a crash left half-written; raises OSError."""
        leftovers = self.path.glob(f"{_TEMPORARY}*")
        for path in [*(self.path / sha256 for sha256 in self.digests() - set(named)), *leftovers]:
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
            else:
                shutil.rmtree(path)


def bases_in(state_dir: Path) -> Bases:
    """Return the bases of a state directory."""
    return Bases(state_dir / BASES)


def copy_base(directory: ManifestDirectory[_M], manifest: _M, target: Path) -> None:
    """Copy the frozen weights that a manifest names into another state directory, once."""
    bases = bases_in(target)
    if manifest.base is not None and manifest.base not in bases.digests():
        path = directory.checked_base(manifest)
        assert path is not None
        bases.write(manifest.base, file_parts(path))
