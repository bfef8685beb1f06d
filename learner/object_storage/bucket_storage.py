"""Checkpoints and versions in an object store; `head.py` has the layout, and what makes a folder exist.

Imports no torch.
"""

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
from typing_extensions import override

from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, file_parts, read_file
from anabranch.core.object_store.bucket import Bucket
from anabranch.core.temporary_files import temporary_folder
from anabranch.learner.object_storage.head import (
    BASES_PREFIX,
    OBJECTS,
    BucketHead,
    HeadReader,
    Kind,
    StoredFile,
    base_path,
    file_path,
    folder_path,
    generation_of,
    with_folder,
    without_folder,
)
from anabranch.learner.object_storage.lease import Lease
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.state_dir.folders import COPIES, MANIFEST, Folder, Storage
from anabranch.learner.versions.format import VERDICT

_FILES = "files"
Files = dict[str, StoredFile]


def _set_aside(head: BucketHead | None, kind: Kind) -> Mapping[int, int]:
    """Return the generation that wrote each folder that was set aside."""
    return head.set_aside if head is not None and kind == "checkpoints" else {}


class FolderTable:
    """The folders of a kind, with their files and manifests as far as they are known. Used by one thread."""

    def __init__(self, bucket: Bucket, kind: Kind, lease: Lease | None) -> None:
        self.bucket = bucket
        self.kind = kind
        self.location = f"{bucket.url}/{kind}"
        self.lease = lease
        self._reader, self._has_read = HeadReader(bucket), False
        self._files: dict[tuple[int, int], Files] = {}
        """The files of folders by number and generation, as far as they are known."""
        self._manifests: dict[tuple[int, int], bytes] = {}
        self.unlisted: set[int] = set()
        """Numbers that are not in the head, and may have objects or come into it by a late write."""
        self._garbage: list[str] = []
        """Paths that nothing names any more, and that are to be deleted."""

    @property
    def writer(self) -> Lease:
        """The lease of a storage that may be written."""
        assert self.lease is not None
        return self.lease

    @property
    def head(self) -> BucketHead | None:
        """The head as it was written or read last; None while there is none. Without the lease it is read once."""
        if self.lease is not None:
            return self.lease.head
        if not self._has_read:
            self._poll()
        return self._reader.contents

    def generations(self, *, latest: bool = False) -> Mapping[int, int]:
        """Return the generation that wrote each folder, by number, as far as is known without a request.

        `latest` reads the head first if it has changed, where this has not the lease.
        """
        if latest and self.lease is None:
            self._poll()
        return self.head.folders(self.kind) if self.head is not None else {}

    def files_of(self, number: int, generation: int | None = None) -> Files:
        """Return the files of a folder by name, also of one that the head does not list; raises DamagedError.

        Without `generation` it is that of the head, and the result is empty where there is none. It changes with the
        folder.
        """
        generation = self.generations().get(number) if generation is None else generation
        if generation is None:
            return {}
        if (files := self._files.get((number, generation))) is not None:
            return files
        path = folder_path(self.kind, number, generation)
        if self.kind == "checkpoints":
            try:
                files = decoded(self.bucket.read(f"{path}/{OBJECTS}", MOST_BYTES), Files)
            except FileNotFoundError as exc:
                raise DamagedError(str(exc)) from exc
        else:
            found = self.bucket.sizes(path)
            files = {each.removeprefix(f"{path}/"): StoredFile(each, size) for each, size in found.items()}
            files.pop(MANIFEST, None)
        self._files[number, generation] = files
        return files

    def set_files(self, number: int, generation: int, files: Files) -> Files:
        """Set the files of a folder that this lease writes, and return them."""
        self._files[number, generation] = files
        return files

    def manifest(self, number: int, max_bytes: int | None) -> bytes:
        """Return the contents of a manifest; with the lease each one is read once. Raises as `Bucket.read`."""
        generation = self.generations().get(number)
        if generation is None:
            raise FileNotFoundError(f"{self.location} has no {number}")
        if (content := self._manifests.get((number, generation))) is None:
            content = self.bucket.read(f"{folder_path(self.kind, number, generation)}/{MANIFEST}", max_bytes)
            self._manifests[number, generation] = content
        return content

    def write_manifest(self, number: int, generation: int, files: Files, content: bytes) -> None:
        """Write the manifest of a folder of this lease, after the list of its files."""
        path = folder_path(self.kind, number, generation)
        if self.kind == "checkpoints":
            self.bucket.write(f"{path}/{OBJECTS}", msgspec.json.encode(files))
        self.bucket.write(f"{path}/{MANIFEST}", content)
        self._manifests[number, generation] = content

    def shared(self) -> dict[str, StoredFile]:
        """Return the files that checkpoints in the head name, by digest. Those without a readable list are left out."""
        files = dict[str, StoredFile]()
        for number, generation in self.generations().items():
            with contextlib.suppress(DamagedError):
                files |= {file.sha256: file for file in self.files_of(number, generation).values() if file.sha256}
        return files

    def release(self, files: Iterable[StoredFile]) -> None:
        """Delete files that no checkpoint names any more."""
        if (used := self._used_paths()) is not None:
            self._garbage += {file.path for file in files} - used
        self._delete_garbage()

    def discard(self, number: int, generation: int) -> None:
        """Delete what a folder has that is not in the head, the manifest first, and files that nothing names."""
        path = folder_path(self.kind, number, generation)
        files = self._files.pop((number, generation), {})
        self._manifests.pop((number, generation), None)
        self._garbage.append(f"{path}/{MANIFEST}")
        if self.kind == "checkpoints":
            self._garbage.append(f"{path}/{OBJECTS}")
        self.release(files.values())

    def clean(self) -> None:
        """Delete what nothing names: of uploads and deletions that have failed, by this learner or earlier ones."""
        self.writer.update(lambda head: head)  # no earlier write of it can arrive after that
        self.unlisted.clear()
        reachable = self._reachable()
        self._files = {each: files for each, files in self._files.items() if each in reachable}
        named = {folder_path(self.kind, *each) for each in reachable}
        found = self.bucket.sizes(self.kind)
        folders = {path: "/".join(path.split("/")[:2]) for path in found}
        garbage = [path for path, folder in folders.items() if folder not in named and self._is_ours(folder)]
        if self.kind == "checkpoints" and (used := self._used_paths()) is not None:
            garbage += [path for path in self.bucket.sizes(_FILES) if path not in used and self._is_ours(path)]
        self._garbage = sorted(garbage, key=lambda path: not path.endswith(f"/{MANIFEST}"))
        self._delete_garbage()

    def delete_set_aside(self) -> None:
        """Delete the checkpoints that were set aside, and what an erasure that failed has left."""
        aside = dict(_set_aside(self.head, self.kind))
        for number, generation in aside.items():
            with contextlib.suppress(DamagedError, FileNotFoundError):
                self.files_of(number, generation)
        if aside:
            self.writer.update(lambda head: msgspec.structs.replace(head, set_aside={}))
        for number, generation in aside.items():
            self.discard(number, generation)
        self._delete_garbage()

    def _poll(self) -> None:
        self._has_read = True
        if self._reader.poll():
            self._files.clear()
            self._manifests.clear()

    def _reachable(self) -> list[tuple[int, int]]:
        return [*self.generations().items(), *_set_aside(self.head, self.kind).items()]

    def _is_ours(self, path: str) -> bool:
        """Return whether a path is of this generation or of an older one, which has ended."""
        generation = generation_of(path)
        return generation is not None and generation <= self.writer.generation

    def _used_paths(self) -> set[str] | None:
        """Return the paths that checkpoints name, also those set aside and those that may come into the head.

        None where the list of one cannot be read.
        """
        late = [files for (number, _), files in self._files.items() if number in self.unlisted]
        try:
            named = [self.files_of(*each) for each in self._reachable()]
        except DamagedError:
            return None
        return {file.path for files in [*named, *late] for file in files.values()}

    def _delete_garbage(self) -> None:
        if self._garbage:
            self.bucket.delete(self._garbage)
        self._garbage = []


class BucketStorage(Storage):
    """The checkpoints or the versions of a prefix. Used by one thread.

    With the lease, what exists is known without a request; only such a storage may be written. Without it, `numbers`
    reads the head if it has changed.

    What is written has the generation of the lease in its path. All methods raise BucketAwayError, an OSError, where
    the object store cannot be reached; those that write raise SecondLearnerError once another learner has the lease.
    """

    def __init__(self, bucket: Bucket, kind: Kind, fetched: Path, lease: Lease | None = None) -> None:
        """Take the objects, the folder of local copies, which need not exist, and the lease of a writer."""
        self.bucket = bucket
        self.kind = kind
        self.location = f"{bucket.url}/{kind}"
        self.fetched = fetched
        self.table = FolderTable(bucket, kind, lease)
        self._last = (0, 0)
        """Generation and number of the folder that was begun last."""
        self._highest = 0
        """The highest number that was begun or deleted."""

    @override
    def numbers(self) -> list[int]:
        return sorted(self.table.generations(latest=True))

    @override
    def highest(self) -> int:
        return max(self._highest, *self.table.generations(), *_set_aside(self.table.head, self.kind), 0)

    @override
    def folder(self, number: int) -> "BucketFolder":
        return BucketFolder(self, number)

    @override
    @contextlib.contextmanager
    def publish(self, number: int, generation: int) -> Iterator["BucketFolder"]:
        if (self.table.writer.generation, number) <= self._last:
            # Late requests of the earlier attempt must not hit this one's: no path is written again.
            self.table.writer.update(lambda head: msgspec.structs.replace(head, generation=head.generation + 1))
        if number in self.table.generations():
            raise FileExistsError(f"{self.location} has {number} already")
        self._last = begun, _ = self.table.writer.generation, number
        self._highest = max(self._highest, number)
        folder = BucketFolder(self, number, begun)
        self.table.unlisted.add(number)
        try:
            yield folder
        except Exception:
            with contextlib.suppress(OSError):
                self.table.discard(number, begun)
                self.table.unlisted.discard(number)
            raise
        self.table.writer.update(lambda head: with_folder(head, self.kind, number, begun, folder.verdict))
        self.table.unlisted.discard(number)

    @override
    def delete(self, number: int) -> None:
        if (generation := self.table.generations().get(number)) is not None:
            with contextlib.suppress(DamagedError, FileNotFoundError):
                self.table.files_of(number)  # while the head has it
            self._highest = max(self._highest, number)
            self.table.unlisted.add(number)
            self.table.writer.update(lambda head: without_folder(head, self.kind, number))
            self.table.unlisted.discard(number)
            self.table.discard(number, generation)

    @override
    def set_aside(self, number: int) -> None:
        if (generation := self.table.generations().get(number)) is None:
            raise FileNotFoundError(f"{self.location} has no {number}")
        if self.kind == "versions":
            self.delete(number)
            return

        def aside(head: BucketHead) -> BucketHead:
            less = without_folder(head, self.kind, number)
            return msgspec.structs.replace(less, set_aside={**head.set_aside, number: generation})

        self.table.writer.update(aside)

    @override
    def delete_set_aside(self) -> None:
        self.table.delete_set_aside()

    @override
    def clean(self) -> None:
        self.table.clean()

    @override
    def local_base(self, sha256: str) -> Path:
        copy = self.fetched / BASES_PREFIX / sha256
        if not copy.exists():
            if (head := self.table.head) is None or (generation := head.bases.get(sha256)) is None:
                raise FileNotFoundError(f"{self.bucket.url} has no base {sha256[:200]!r}")
            copy.parent.mkdir(parents=True, exist_ok=True)
            part = copy.with_suffix(".part")
            self.bucket.download(base_path(sha256, generation), part)
            part.rename(copy)
        return copy

    @override
    def drop_copies(self) -> None:
        shutil.rmtree(self.fetched, ignore_errors=True)


class BucketFolder(Folder):
    """The files of a checkpoint or of a version. Used by the thread of its storage."""

    def __init__(self, storage: BucketStorage, number: int, begun: int | None = None) -> None:
        """Take the storage, the number, and the generation that writes a new folder, which is not in the head yet."""
        self._storage = storage
        self._table = storage.table
        self._number = number
        self._begun = begun
        self._new: Files | None = None if begun is None else storage.table.set_files(number, begun, {})
        self._shared = storage.table.shared() if begun is not None and storage.kind == "checkpoints" else None
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
        if name == VERDICT and self._table.kind == "versions" and self._table.head is not None:
            return self._table.head.verdicts.get(self._number)
        return self._files().get(name)

    @override
    def read(self, name: str, max_bytes: int | None = None) -> bytes:
        if name == MANIFEST and self._new is None:
            return self._table.manifest(self._number, max_bytes)
        path = self._path(name)
        if (copy := self._copy(path)).exists():
            return read_file(copy, max_bytes)
        return self._table.bucket.read(path, max_bytes)

    @override
    def local(self, name: str) -> Path:
        path = self._path(name)
        copy = self._copy(path)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            part = copy.with_name(f"{copy.name}.part")
            part.unlink(missing_ok=True)
            self._table.bucket.download(path, part)
            if self._table.kind == "versions" or name == MANIFEST:
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
            self._table.write_manifest(self._number, self._generation, self._new, b"".join(pieces))
            return
        with self._spooled(pieces) as (file, sha256):
            self.upload(name, file, sha256)

    def upload(self, name: str, content: Path | BinaryIO, sha256: str) -> int:
        """Write a new file from a local one, and return how many bytes were sent: 0 where a checkpoint has them.

        The digest is that of the contents, and is not computed.
        """
        if self._table.kind == "versions":
            path = f"{folder_path('versions', self._number, self._generation)}/{name}"
            self.verdict = sha256 if name == VERDICT else self.verdict
        else:
            shared = self._table.shared() if self._shared is None else self._shared
            if (there := shared.get(sha256)) is not None:
                self._files()[name] = there
                return 0
            path = file_path(
                sha256, self._table.writer.generation if self._begun is None else self._begun, self._number
            )
        size = content.stat().st_size if isinstance(content, Path) else os.fstat(content.fileno()).st_size
        self._table.bucket.write(path, content)
        self._files()[name] = file = StoredFile(path, size, sha256)
        if self._shared is not None:
            self._shared[sha256] = file
        return size

    @override
    def link(self, name: str, source: Folder, other: str) -> None:
        if self._table.kind == "versions" or not isinstance(source, BucketFolder):
            self.write(name, file_parts(source.local(other)))
        elif (file := source._files().get(other)) is None:
            raise FileNotFoundError(f"{self._table.location}: there is no {other}")
        else:
            self._files()[name] = file

    @override
    def replace(self, name: str, content: bytes) -> None:
        before = self._files().get(name)
        if not self._exists:
            raise FileNotFoundError(f"{self._table.location} has no {self._number}")
        if name == MANIFEST:
            self._rewrite(content)
        elif self._table.kind == "versions":
            path = self._path(name)
            self._table.bucket.write(path, content)
            self._files()[name] = StoredFile(path, len(content), hashlib.sha256(content).hexdigest())
            if name == VERDICT:
                digest, generation = self._files()[name].sha256, self._generation
                self._table.writer.update(lambda head: with_folder(head, "versions", self._number, generation, digest))
        else:
            self.write(name, [content])
            self._rewrite(self.read(MANIFEST))
            self._table.release([before] if before is not None else [])

    @override
    def remove(self, name: str) -> None:
        if name == MANIFEST:
            self._storage.delete(self._number)
        elif (file := self._files().get(name)) is not None:
            if self._table.kind == "versions":
                self._table.bucket.delete([file.path])
                del self._files()[name]
            else:
                self._rewrite(self.read(MANIFEST), without=name)
                self._table.release([file])

    @property
    def _exists(self) -> bool:
        return self._new is None and self._number in self._table.generations()

    def _files(self) -> Files:
        return self._table.files_of(self._number) if self._new is None else self._new

    def _path(self, name: str) -> str:
        """Return the path of a file's contents; raises FileNotFoundError."""
        generation = self._table.generations().get(self._number)
        if generation is not None and self._table.kind == "versions":
            return f"{folder_path('versions', self._number, generation)}/{name}"
        if (file := self._files().get(name)) is None:
            raise FileNotFoundError(f"{self._table.location}/{self._number} has no {name}")
        return file.path

    @property
    def _generation(self) -> int:
        """The generation of the folder's path."""
        return self._table.generations()[self._number] if self._begun is None else self._begun

    def _copy(self, path: str) -> Path:
        """Return the path of the local copy of an object, whose own path may be no name of a file."""
        return self._storage.fetched / hashlib.sha256(path.encode()).hexdigest()

    def _rewrite(self, manifest: bytes, without: str | None = None) -> None:
        """Write the list of files and the manifest again, into the folder of this lease.

        A name that is left out stays known where that fails, so that the next attempt leaves it out.
        """
        files = {name: file for name, file in self._files().items() if name != without}
        generation = self._table.writer.generation
        self._table.write_manifest(self._number, generation, files, manifest)
        before = self._table.generations()[self._number]
        if before != generation:
            self._table.writer.update(lambda head: with_folder(head, self._table.kind, self._number, generation, None))
        self._table.set_files(self._number, generation, files)
        if before != generation:
            self._table.discard(self._number, before)

    @contextlib.contextmanager
    def _spooled(self, pieces: Iterable[bytes | memoryview]) -> Iterator[tuple[BinaryIO, str]]:
        """Yield a temporary file with these contents, and their SHA-256."""
        digest = hashlib.sha256()
        self._storage.fetched.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._storage.fetched) as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
            file.seek(0)
            yield file, digest.hexdigest()


def link_or_move(source: Path, to: Path) -> None:
    """Give a file a second name, or only that one where the file system has no hard links."""
    try:
        to.hardlink_to(source)
    except OSError:
        source.replace(to)


def storage_to_read(settings: StorageSettings | None, kind: Kind) -> Storage | None:
    """Return where a command reads checkpoints or versions; None where the state directory has them."""
    if settings is None or settings.mode == "mirror":
        return None
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return BucketStorage(settings.bucket, kind, stack.enter_context(temporary_folder(COPIES)) / kind)
