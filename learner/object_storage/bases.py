"""Bases, which checkpoints and versions name: uploads those that some name, deletes the others, fetches one."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from anabranch.core.failures import DamagedError
from anabranch.core.object_store.bucket import Bucket
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.object_storage.bucket_storage import BucketStorage
from anabranch.learner.object_storage.head import BASES_PREFIX, BucketHead, base_path, generation_of
from anabranch.learner.state_dir.bases import Bases
from anabranch.learner.versions.format import Versions
from anabranch.learner.versions.named_bases import named_bases


class BaseUploads:
    """The bases of the prefix of a lease. Any thread may use it.

    A base exists if `head.json` lists it: its object is written first, and deleted last.
    """

    def __init__(self, storage: BucketStorage, bases: Bases) -> None:
        """Take a storage that has the lease, and the bases of the state directory."""
        self._bucket, self._lease, self._bases = storage.bucket, storage.table.writer, bases
        # Objects that no other thread uses: with the lease, they know without a request what exists.
        versions = BucketStorage(self._bucket, "versions", storage.fetched, self._lease)
        checkpoints = BucketStorage(self._bucket, "checkpoints", storage.fetched, self._lease)
        self._versions = Versions(bases.path, versions)
        self._checkpoints = Checkpoints(bases.path, "", 0, checkpoints)
        self._lock = threading.Lock()
        self._held = Counter[str]()
        """Bases of folders that may not be in the head yet."""
        self._clean = False
        """Whether the object store has no objects that the head does not list."""
        self.uploaded_bytes = 0

    @contextlib.contextmanager
    def holding(self, sha256: str | None) -> Iterator[None]:
        """Upload a base unless it is there, and keep it while the block writes what names it.

        Raises:
            DamagedError: that of the state directory is damaged or missing.
            OSError: the object store cannot be reached.
            SecondLearnerError: another learner has taken the lease.
        """
        if sha256 is None:
            yield
            return
        with self._lock:
            if sha256 not in self._lease.head.bases:
                self._upload(sha256)
            self._held[sha256] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[sha256] -= 1

    def keep(self, sha256: str | None) -> None:
        """Upload a base unless it is there, and keep it while this process runs; raises as `holding`."""
        if sha256 is not None:
            with self.holding(sha256), self._lock:
                self._held[sha256] += 1

    def _upload(self, sha256: str) -> None:
        path, generation = self._bases.checked(sha256), self._lease.generation
        self._clean = False
        self._bucket.write(base_path(sha256, generation), path)
        self._lease.update(lambda head: _with_bases(head, {**head.bases, sha256: generation}))
        self.uploaded_bytes += path.stat().st_size

    def prune(self) -> None:
        """Delete the bases that nothing names, and what uploads that failed have left; raises as `holding`."""
        with self._lock:
            head = self._lease.head
            unused = {sha256 for sha256 in head.bases if not self._held[sha256]}
            if unused and len(head.bases) > 1 and not head.set_aside:
                kept = head.bases.keys() - (unused - named_bases(self._versions) - named_bases(self._checkpoints))
                if len(kept) < len(head.bases):
                    self._clean = False
                    self._lease.update(
                        lambda head: _with_bases(
                            head, {name: each for name, each in head.bases.items() if name in kept}
                        )
                    )
            if not self._clean and head.bases:
                self._delete_garbage()
                self._clean = True

    def _delete_garbage(self) -> None:
        listed = {base_path(*each) for each in self._lease.head.bases.items()}
        found = (path for path in self._bucket.sizes(BASES_PREFIX) if path not in listed)
        generation = self._lease.generation
        garbage = [path for path in found if (written := generation_of(path)) is not None and written <= generation]
        if garbage:
            self._bucket.delete(garbage)


def _with_bases(head: BucketHead, bases: dict[str, int]) -> BucketHead:
    return msgspec.structs.replace(head, bases=bases)


def uploads_of(storage: BucketStorage, state_dir_folder: Path) -> BaseUploads:
    """Return the uploads of the bases that are next to a folder of versions or of checkpoints."""
    return BaseUploads(storage, Bases(state_dir_folder.parent / BASES_PREFIX))


def fetch_base(bucket: Bucket, listed: Mapping[str, int], sha256: str, bases: Bases) -> None:
    """Fetch a base unless it is in the state directory and intact.

    Args:
        bucket: the object store.
        listed: the bases in its head, with the generation that wrote each.
        sha256: of the base.
        bases: of the state directory.

    Raises:
        DamagedError: the object store does not have it, or it is damaged there.
        BucketAwayError: the object store cannot be reached.
        OSError: it cannot be written.
    """
    if bases.is_intact(sha256):
        return
    if (generation := listed.get(sha256)) is None:
        raise DamagedError(f"{bucket.url} has no base {sha256[:200]!r}")
    path = base_path(sha256, generation)
    try:
        bases.add(sha256, lambda to: bucket.download(path, to))
    except (DamagedError, FileNotFoundError) as exc:
        raise DamagedError(f"{bucket.url}/{path} cannot be used: {exc}") from exc
