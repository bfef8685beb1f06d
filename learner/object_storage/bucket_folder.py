"""A folder of an object store: a version, or a checkpoint, whose files other checkpoints may share."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from typing_extensions import override

from anabranch.core.files import file_parts, read_file
from learner.object_storage.head import StoredFile, file_path, folder_path, with_folder
from learner.state_dir.folders import MANIFEST, Folder
from learner.state_dir.version import VERDICT

if TYPE_CHECKING:
    from learner.object_storage.bucket_storage import BucketStorage, Files


class BucketFolder(Folder):
    """The files of a checkpoint or of a version. Used by the thread of its storage."""

    def __init__(self, storage: "BucketStorage", number: int, begun: int | None = None) -> None:
        """Take the storage, the number, and the generation that writes a new folder, which is not in the head yet."""
        self._storage = storage
        self._number = number
        self._begun = begun
        self._new: Files | None = None if begun is None else storage.set_files(number, begun, {})
        self._shared = storage.shared() if begun is not None and storage.kind == "checkpoints" else None
        self.verdict: str | None = None
        """SHA-256 of the verdict that was written."""

    @override
    def files(self) -> Mapping[str, int]:
        files = {name: file.size for name, file in self._files().items()}
        return {**files, MANIFEST: len(self.read(MANIFEST))} if self._exists else files

    @override
    def stamp(self, name: str) -> object:
        if name == MANIFEST:
            return self.read(MANIFEST) if self._exists else None
        if name == VERDICT and self._storage.kind == "versions" and self._storage.head is not None:
            return self._storage.head.verdicts.get(self._number)
        return self._files().get(name)

    @override
    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        if name == MANIFEST and self._new is None:
            return self._storage.manifest(self._number, max_bytes)
        path = self._path(name)
        if (copy := self._copy(path)).exists():
            return read_file(copy, max_bytes)
        return self._storage.bucket.read(path, max_bytes)

    @override
    def local(self, name: str) -> Path:
        path = self._path(name)
        copy = self._copy(path)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            part = copy.with_name(f"{copy.name}.part")
            part.unlink(missing_ok=True)
            self._storage.bucket.download(path, part)
            if self._storage.kind == "versions" or name == MANIFEST:
                return part  # its contents may be replaced
            part.rename(copy)
        return copy

    def use_copy(self, name: str, whole: Path) -> None:
        """Let `local` return a local file, which is linked or moved, instead of a download."""
        copy = self._copy(self._path(name))
        copy.parent.mkdir(parents=True, exist_ok=True)
        link_or_move(whole, copy)

    @override
    def write(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        if name == MANIFEST and self._new is not None:
            self._storage.write_manifest(self._number, self._generation, self._new, b"".join(pieces))
            return
        with self._storage.spooled(pieces) as (file, sha256, _):
            self.upload(name, file, sha256)

    def upload(self, name: str, content: Path | BinaryIO, sha256: str) -> int:
        """Write a new file from a local one, and return how many bytes were sent: 0 where a checkpoint has them.

        The digest is that of the contents, and is not computed.
        """
        if self._storage.kind == "versions":
            path = f"{folder_path('versions', self._number, self._generation)}/{name}"
            self.verdict = sha256 if name == VERDICT else self.verdict
        else:
            shared = self._storage.shared() if self._shared is None else self._shared
            if (there := shared.get(sha256)) is not None:
                self._files()[name] = there
                return 0
            path = file_path(
                sha256, self._storage.writer.generation if self._begun is None else self._begun, self._number
            )
        size = content.stat().st_size if isinstance(content, Path) else os.fstat(content.fileno()).st_size
        self._storage.bucket.write(path, content)
        self._files()[name] = file = StoredFile(path, size, sha256)
        if self._shared is not None:
            self._shared[sha256] = file
        return size

    @override
    def link(self, name: str, source: Folder, other: str) -> None:
        if self._storage.kind == "versions" or not isinstance(source, BucketFolder):
            self.write(name, file_parts(source.local(other)))
        elif (file := source._files().get(other)) is None:
            raise FileNotFoundError(f"{self._storage.location}: there is no {other}")
        else:
            self._files()[name] = file

    @override
    def replace(self, name: str, content: bytes) -> None:
        before = self._files().get(name)
        if not self._exists:
            raise FileNotFoundError(f"{self._storage.location} has no {self._number}")
        if name == MANIFEST:
            self._rewrite(content)
        elif self._storage.kind == "versions":
            path = self._path(name)
            self._storage.bucket.write(path, content)
            self._files()[name] = StoredFile(path, len(content), hashlib.sha256(content).hexdigest())
            if name == VERDICT:
                self._publish_verdict(self._files()[name].sha256)
        else:
            self.write(name, [content])
            self._rewrite(self.read(MANIFEST))
            self._storage.release([before] if before is not None else [])

    @override
    def remove(self, name: str) -> None:
        if name == MANIFEST:
            self._storage.delete(self._number)
        elif (file := self._files().get(name)) is not None:
            if self._storage.kind == "versions":
                self._storage.bucket.delete([file.path])
                del self._files()[name]
            else:
                self._rewrite(self.read(MANIFEST), without=name)
                self._storage.release([file])

    @property
    def _exists(self) -> bool:
        return self._new is None and self._number in self._storage.generations()

    def _files(self) -> "Files":
        return self._storage.files_of(self._number) if self._new is None else self._new

    def _path(self, name: str) -> str:
        """Return the path of a file's contents; raises FileNotFoundError."""
        generation = self._storage.generations().get(self._number)
        if generation is not None and self._storage.kind == "versions":
            return f"{folder_path('versions', self._number, generation)}/{name}"
        if (file := self._files().get(name)) is None:
            raise FileNotFoundError(f"{self._storage.location}/{self._number} has no {name}")
        return file.path

    @property
    def _generation(self) -> int:
        """The generation of the folder's path."""
        return self._storage.generations()[self._number] if self._begun is None else self._begun

    def _copy(self, path: str) -> Path:
        """Return the path of the local copy of an object, whose own path may be no name of a file."""
        return self._storage.fetched / hashlib.sha256(path.encode()).hexdigest()

    def _rewrite(self, manifest: bytes, without: str | None = None) -> None:
        """Write the list of files and the manifest again, into the folder of this lease.

        A name that is left out stays known where that fails, so that the next attempt leaves it out.
        """
        files = {name: file for name, file in self._files().items() if name != without}
        generation = self._storage.writer.generation
        self._storage.write_manifest(self._number, generation, files, manifest)
        self._storage.move(self._number, generation, files)

    def _publish_verdict(self, sha256: str) -> None:
        generation = self._storage.generations()[self._number]
        self._storage.writer.update(lambda head: with_folder(head, "versions", self._number, generation, sha256))


def link_or_move(source: Path, to: Path) -> None:
    """Give a file a second name, or only that one where the file system has no hard links."""
    try:
        to.hardlink_to(source)
    except OSError:
        source.replace(to)
