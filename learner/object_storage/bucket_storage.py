"""Checkpoints and versions in an object store; `head.py` has the layout, and what makes a folder exist.

Imports no torch.
"""

import atexit
import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec
from typing_extensions import override

from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES
from anabranch.core.object_store.bucket import Bucket
from anabranch.core.temporary_files import temporary_folder
from learner.object_storage.bucket_folder import BucketFolder
from learner.object_storage.config import StorageSettings
from learner.object_storage.head import (
    BASES_PREFIX,
    OBJECTS,
    BucketHead,
    HeadReader,
    Kind,
    StoredFile,
    base_path,
    folder_path,
    generation_of,
    with_folder,
    without_folder,
)
from learner.object_storage.lease import Lease
from learner.state_dir.folders import MANIFEST, Storage

FETCHED = "anabranch-fetched-"
"""Prefix of the temporary folders in which commands have copies of files of an object store."""
_FILES = "files"
Files = dict[str, StoredFile]


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
        self.lease = lease
        self._reader, self._has_read = HeadReader(bucket), False
        self._files: dict[tuple[int, int], Files] = {}
        """The files of folders by number and generation, as far as they are known."""
        self._manifests: dict[tuple[int, int], bytes] = {}
        self._unlisted: set[int] = set()
        """Numbers that are not in the head, and may have objects or come into it by a late write."""
        self._last = (0, 0)
        """Generation and number of the folder that was begun last."""
        self._highest = 0
        """The highest number that was begun or deleted."""
        self._garbage: list[str] = []
        """Paths that nothing names any more, and that are to be deleted."""

    @override
    def numbers(self) -> list[int]:
        if self.lease is None:
            self._poll()
        return sorted(self.generations())

    @override
    def highest(self) -> int:
        return max(self._highest, *self.generations(), *self._set_aside(), 0)

    @override
    def folder(self, number: int) -> BucketFolder:
        return BucketFolder(self, number)

    @override
    @contextlib.contextmanager
    def publish(self, number: int, generation: int) -> Iterator[BucketFolder]:
        if (self.writer.generation, number) <= self._last:
            # Late requests of the earlier attempt must not hit this one's: no path is written again.
            self.writer.update(lambda head: msgspec.structs.replace(head, generation=head.generation + 1))
        if number in self.generations():
            raise FileExistsError(f"{self.location} has {number} already")
        self._last = begun, _ = self.writer.generation, number
        self._highest = max(self._highest, number)
        folder = BucketFolder(self, number, begun)
        self._unlisted.add(number)
        try:
            yield folder
        except Exception:
            with contextlib.suppress(OSError):
                self._discard(number, begun)
                self._unlisted.discard(number)
            raise
        self.writer.update(lambda head: with_folder(head, self.kind, number, begun, folder.verdict))
        self._unlisted.discard(number)

    @override
    def delete(self, number: int) -> None:
        if (generation := self.generations().get(number)) is not None:
            with contextlib.suppress(DamagedError, FileNotFoundError):
                self.files_of(number)  # while the head has it
            self._highest = max(self._highest, number)
            self._unlisted.add(number)
            self.writer.update(lambda head: without_folder(head, self.kind, number))
            self._unlisted.discard(number)
            self._discard(number, generation)

    @override
    def set_aside(self, number: int) -> None:
        if (generation := self.generations().get(number)) is None:
            raise FileNotFoundError(f"{self.location} has no {number}")
        if self.kind == "versions":
            self.delete(number)
            return

        def aside(head: BucketHead) -> BucketHead:
            less = without_folder(head, self.kind, number)
            return msgspec.structs.replace(less, set_aside={**head.set_aside, number: generation})

        self.writer.update(aside)

    @override
    def delete_set_aside(self) -> None:
        aside = dict(self._set_aside())
        for number, generation in aside.items():
            with contextlib.suppress(DamagedError, FileNotFoundError):
                self._loaded(number, generation)
        if aside:
            self.writer.update(lambda head: msgspec.structs.replace(head, set_aside={}))
        for number, generation in aside.items():
            self._discard(number, generation)
        self._delete_garbage()  # of an erasure that failed

    @override
    def clean(self) -> None:
        self.writer.update(lambda head: head)  # no earlier write of it can arrive after that
        self._unlisted.clear()
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
        return self._reader.head

    def _poll(self) -> None:
        self._has_read = True
        if self._reader.poll():
            self._files.clear()
            self._manifests.clear()

    def generations(self) -> Mapping[int, int]:
        """Return the generation that wrote each folder, by number, as far as is known without a request."""
        return self.head.folders(self.kind) if self.head is not None else {}

    def verdicts(self) -> Mapping[int, str]:
        """Return the SHA-256 of the verdict of each version, by number."""
        return self.head.verdicts if self.head is not None else {}

    def bases(self) -> Mapping[str, int]:
        """Return the generation that wrote each base, by its SHA-256."""
        return self.head.bases if self.head is not None else {}

    def files_of(self, number: int) -> Files:
        """Return the files of a folder by name, empty where there is none; raises DamagedError.

        The result changes with the folder.
        """
        generation = self.generations().get(number)
        return {} if generation is None else self._loaded(number, generation)

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

    def move(self, number: int, generation: int, files: Files) -> None:
        """Let the head name the folder of this generation, after `write_manifest`, in place of another one's."""
        before = self.generations()[number]
        if before != generation:
            self.writer.update(lambda head: with_folder(head, self.kind, number, generation, None))
        self.set_files(number, generation, files)
        if before != generation:
            self._discard(number, before)

    def shared(self) -> dict[str, StoredFile]:
        """Return the files that checkpoints in the head name, by digest. Those without a readable list are left out."""
        files = dict[str, StoredFile]()
        for number, generation in self.generations().items():
            with contextlib.suppress(DamagedError):
                files |= {file.sha256: file for file in self._loaded(number, generation).values() if file.sha256}
        return files

    @override
    def local_base(self, sha256: str) -> Path:
        copy = self.fetched / BASES_PREFIX / sha256
        if not copy.exists():
            if (generation := self.bases().get(sha256)) is None:
                raise FileNotFoundError(f"{self.bucket.url} has no base {sha256[:200]!r}")
            copy.parent.mkdir(parents=True, exist_ok=True)
            part = copy.with_suffix(".part")
            self.bucket.download(base_path(sha256, generation), part)
            part.rename(copy)
        return copy

    @override
    def drop_copies(self) -> None:
        shutil.rmtree(self.fetched, ignore_errors=True)

    def release(self, files: Iterable[StoredFile]) -> None:
        """Delete files that no checkpoint names any more."""
        if (used := self._used_paths()) is not None:
            self._garbage += {file.path for file in files} - used
        self._delete_garbage()

    @contextlib.contextmanager
    def spooled(self, pieces: Iterable[bytes | memoryview]) -> Iterator[tuple[BinaryIO, str, int]]:
        """Yield a temporary file with these contents, their SHA-256 and their size in bytes."""
        digest, size = hashlib.sha256(), 0
        self.fetched.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.fetched) as file:
            for piece in pieces:
                digest.update(piece)
                size += len(piece)
                file.write(piece)
            file.seek(0)
            yield file, digest.hexdigest(), size

    def _set_aside(self) -> Mapping[int, int]:
        return self.head.set_aside if self.head is not None and self.kind == "checkpoints" else {}

    def _reachable(self) -> list[tuple[int, int]]:
        return [*self.generations().items(), *self._set_aside().items()]

    def _is_ours(self, path: str) -> bool:
        """Return whether a path is of this generation or of an older one, which has ended."""
        generation = generation_of(path)
        return generation is not None and generation <= self.writer.generation

    def _used_paths(self) -> set[str] | None:
        """Return the paths that checkpoints name, also those set aside and those that may come into the head.

        None where the list of one cannot be read.
        """
        late = [files for (number, _), files in self._files.items() if number in self._unlisted]
        try:
            named = [self._loaded(*each) for each in self._reachable()]
        except DamagedError:
            return None
        return {file.path for files in [*named, *late] for file in files.values()}

    def _loaded(self, number: int, generation: int) -> Files:
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

    def _discard(self, number: int, generation: int) -> None:
        """Delete what a folder has that is not in the head, the manifest first, and files that nothing names."""
        path = folder_path(self.kind, number, generation)
        files = self._files.pop((number, generation), {})
        self._manifests.pop((number, generation), None)
        self._garbage.append(f"{path}/{MANIFEST}")
        if self.kind == "checkpoints":
            self._garbage.append(f"{path}/{OBJECTS}")
        self.release(files.values())

    def _delete_garbage(self) -> None:
        if self._garbage:
            self.bucket.delete(self._garbage)
        self._garbage = []


def storage_to_read(settings: StorageSettings | None, kind: Kind) -> Storage | None:
    """Return where a command reads checkpoints or versions; None where the state directory has them."""
    if settings is None or settings.mode == "mirror":
        return None
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return BucketStorage(settings.bucket, kind, stack.enter_context(temporary_folder(FETCHED)) / kind)
