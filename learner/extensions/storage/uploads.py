"""Uploads the newest checkpoint or version of a state directory, whenever the object store lacks it.

One that is replaced by a newer one before its turn is never uploaded, so that nothing queues up while the object store
is slow or away. An upload that has begun is finished first, since newer ones may come faster than one takes.
"""

import contextlib
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import BinaryIO, Generic, TypeVar

import msgspec
from typing_extensions import override

from anabranch.core.failures import DamagedError, decoded
from anabranch.learner.checkpoints.format import RANK, STATE, CheckpointManifest, Checkpoints
from anabranch.learner.errors import CheckpointError, VersionError
from anabranch.learner.object_storage.bases import BaseUploads, uploads_of
from anabranch.learner.object_storage.bucket_storage import BucketStorage
from anabranch.learner.object_storage.head import Kind
from anabranch.learner.object_storage.lease import Lease
from anabranch.learner.state_dir.folders import MANIFEST, FolderManifest, ManifestDirectory, encode_manifest
from anabranch.learner.versions.format import VERDICT, Manifest, Versions

_M = TypeVar("_M", bound=FolderManifest)
_DAMAGED = (CheckpointError, VersionError, DamagedError, FileNotFoundError)
"""Errors of a local folder that is damaged, or that the learner has just deleted."""
_ALL = 2**62
"""More records than an erasure log has."""


class FolderUploads(ABC, Generic[_M]):
    """The uploads of one kind of folder. One thread calls `advance`; any thread may read the attributes."""

    kind: Kind

    def __init__(
        self, source: ManifestDirectory[_M], target: BucketStorage, lease: Lease, bases: BaseUploads | None = None
    ) -> None:
        """Take the local folders, through an object that no other thread uses, and the bases of all kinds."""
        self._source = source
        self._bases = bases or uploads_of(target, source.path)
        self._target = target
        self._lease = lease
        self._generations: dict[int, int | None] = {}
        """The generation of each local folder, by number; None where its manifest is damaged."""
        self._clean = False
        """Whether the object store has nothing of folders that were deleted or only begun."""
        self.behind_since: float | None = None
        """Since when the object store has lacked the newest folder, by `time.monotonic`; None while it has it."""
        self.uploaded_bytes = 0

    @property
    def lag_seconds(self) -> float:
        """How long the object store has lacked the newest folder; 0 while it has it."""
        since = self.behind_since
        return 0.0 if since is None else max(0.0, time.monotonic() - since)

    def advance(self) -> bool:
        """Upload the newest folder unless it is there, delete old ones, and return whether the newest is there.

        Raises:
            OSError: the object store cannot be reached; the next call tries again.
            SecondLearnerError: another learner has taken the lease.
        """
        numbers = self._by_age()
        self._mark_behind(numbers)
        if self.behind_since is not None:
            was_clean, self._clean = self._clean, False
            self._upload(numbers[-1])
            self._clean = was_clean
            numbers = self._by_age()
            self._mark_behind(numbers)
        self._update(numbers)
        self._delete(self._stale())
        return self.behind_since is None

    @property
    def _there(self) -> Mapping[int, int]:
        """The generation that wrote each folder in the object store, by number."""
        return self._lease.head.folders(self.kind)

    def _by_age(self) -> list[int]:
        """Return the numbers of all local folders that can be read, by generation, then by number."""
        known = self._generations
        self._generations = {
            number: known[number] if number in known else self._source.generation_of(number)
            for number in self._source.numbers()
        }
        ages = [(generation, number) for number, generation in self._generations.items() if generation is not None]
        return [number for _, number in sorted(ages)]

    def _mark_behind(self, numbers: list[int]) -> None:
        """Set `behind_since`: the time of the first folder after the newest one that is there."""
        missing: int | None = None
        for number in reversed(numbers):
            if number in self._there:
                break
            missing = number
        if missing is None:
            self.behind_since = None
        elif self.behind_since is None or missing == numbers[-1]:
            self.behind_since = time.monotonic() - self._age_seconds(missing)

    def _age_seconds(self, number: int) -> float:
        try:
            return max(0.0, time.time() - self._source.manifest(number).time)
        except _DAMAGED:
            return 0.0

    def _upload(self, number: int) -> None:
        """Upload a folder. All files are opened first, so that they can be read when the folder is deleted."""
        with contextlib.ExitStack() as stack:
            try:
                manifest = self._source.manifest(number)
                folder = self._source.folder(number)
                files = {name: stack.enter_context(folder.local(name).open("rb")) for name in manifest.files}
                stack.enter_context(self._bases.holding(manifest.base))
                more = self._begin(manifest, files)
            except _DAMAGED:
                return
            try:
                with self._target.publish(number, self._lease.generation) as target:
                    for name, file in files.items():
                        self.uploaded_bytes += target.upload(name, file, manifest.files[name])
                    for name, content in more.items():
                        target.write(name, [content])
                    target.write(MANIFEST, [encode_manifest(manifest)])
            except FileExistsError:
                self._drop(number)

    def _delete(self, numbers: list[int]) -> None:
        """Delete folders that are there, and what earlier uploads and deletions have left when they failed."""
        was_clean, self._clean = self._clean, False
        for number in numbers:
            self._target.delete(number)
        if not was_clean:
            self._target.clean()
        self._bases.prune()
        self._clean = True

    @abstractmethod
    def _begin(self, manifest: _M, files: Mapping[str, BinaryIO]) -> Mapping[str, bytes]:
        """Begin to upload a folder, whose files are open; return other files of it."""

    @abstractmethod
    def _drop(self, number: int) -> None:
        """Drop what `_begin` has kept: an earlier upload is there, whose reply was lost."""

    @abstractmethod
    def _update(self, numbers: list[int]) -> None:
        """Upload what else has changed; `numbers` are the local folders."""

    @abstractmethod
    def _stale(self) -> list[int]:
        """Return the folders to delete in the object store."""


class VersionUploads(FolderUploads[Manifest]):
    """The uploads of versions and of their verdicts. One that is deleted locally is deleted there too."""

    kind: Kind = "versions"

    def __init__(
        self,
        source: Versions,
        target: BucketStorage,
        lease: Lease,
        keep: int,
        needed: Callable[[], Collection[int] | None] = tuple,
        bases: BaseUploads | None = None,
    ) -> None:
        """Take how many versions stay, with those of an earlier state directory, and which servers need.

        While `needed` returns None, nothing is deleted.
        """
        super().__init__(source, target, lease, bases)
        self._needed = needed
        self._versions = source
        self._keep = keep
        self._inherited = set(lease.head.versions)
        """Versions in the object store that this state directory has never had."""
        self._stamps: dict[int, object] = {}
        """The stamp of each verdict that was uploaded, by number."""

    @override
    def _begin(self, manifest: Manifest, files: Mapping[str, BinaryIO]) -> Mapping[str, bytes]:
        self._stamps[manifest.number] = self._versions.verdict_stamp(manifest.number)
        return {VERDICT: self._source.folder(manifest.number).read(VERDICT)}

    @override
    def _drop(self, number: int) -> None:
        del self._stamps[number]

    @override
    def _update(self, numbers: list[int]) -> None:
        there = self._there
        self._stamps = {number: stamp for number, stamp in self._stamps.items() if number in there}
        for number in numbers:
            if number in there and (stamp := self._versions.verdict_stamp(number)) != self._stamps.get(number):
                try:
                    verdict, manifest = self._source.folder(number).read(VERDICT), self._source.manifest(number)
                except _DAMAGED:
                    continue
                self._update_verdict(manifest, verdict)
                self._stamps[number] = stamp

    def _update_verdict(self, manifest: Manifest, verdict: bytes) -> None:
        """Replace a verdict that differs, unless the version there is another learner's of the same number."""
        if hashlib.sha256(verdict).hexdigest() == self._lease.head.verdicts.get(manifest.number):
            return
        folder = self._target.folder(manifest.number)
        with contextlib.suppress(FileNotFoundError):
            if folder.read(MANIFEST) == encode_manifest(manifest):
                folder.replace(VERDICT, verdict)

    @override
    def _stale(self) -> list[int]:
        self._inherited -= self._generations.keys()
        if not (gone := sorted(self._there.keys() - self._generations.keys())):
            return []
        if (needed := self._needed()) is None:
            return []
        gone = [number for number in gone if number not in needed]
        spare = max(0, len(self._there) - self._keep)
        inherited = [number for number in gone if number in self._inherited][spare:]
        return [number for number in gone if number not in inherited]


class _ErasedCount(msgspec.Struct):
    """The part of a checkpoint's state that says which erasures it has applied."""

    erased: int = 0


class CheckpointUploads(FolderUploads[CheckpointManifest]):
    """The uploads of checkpoints, of which the newest ones stay.

    Those with events that were erased since are deleted once there is one without. No checkpoint is replaced.
    """

    kind: Kind = "checkpoints"

    def __init__(
        self,
        source: Checkpoints,
        target: BucketStorage,
        lease: Lease,
        keep: int,
        erased: int,
        bases: BaseUploads | None = None,
    ) -> None:
        """Take how many checkpoints to keep, and the last record of the erasure log that is applied everywhere."""
        super().__init__(source, target, lease, bases)
        self._keep = keep
        self._stored = Checkpoints(source.path, "", 0, target)
        self._erased = dict[int, int]()
        """The last record of the erasure log that each checkpoint there, or on its way there, has applied.

        One that is missing is read when there are erasures; until then it counts as 0.
        """
        self._erase_through = erased
        self._discard = False
        """Whether checkpoints that were set aside have to be deleted."""

    def erase(self, through: int) -> None:
        """Delete checkpoints that were made before this record, once there is a later one. Any thread may call it."""
        self._erase_through = max(self._erase_through, through)
        self._discard = True

    def is_clean_of(self, through: int) -> bool:
        """Return whether no checkpoint there, or on its way, was made before this record. Any thread may call it."""
        erased = self._erased.copy()
        return not self._lease.head.set_aside and all(
            erased.get(number, 0) >= through for number in {*self._there, *erased}
        )

    @override
    def advance(self) -> bool:
        done, there = super().advance(), self._there
        self._erased = {number: erased for number, erased in self._erased.items() if number in there}
        return done

    @override
    def _mark_behind(self, numbers: list[int]) -> None:
        super()._mark_behind(numbers)
        if self.behind_since is not None:
            self._erased[numbers[-1]] = 0  # before its files are opened, which an erasure replaces

    @override
    def _begin(self, manifest: CheckpointManifest, files: Mapping[str, BinaryIO]) -> Mapping[str, bytes]:
        state = files[f"{RANK}/{STATE}"]
        self._erased[manifest.number] = _erased_in(manifest, state.read())
        state.seek(0)
        return {}

    @override
    def _drop(self, number: int) -> None:
        del self._erased[number]

    @override
    def _update(self, numbers: list[int]) -> None:
        for number in self._there.keys() - self._erased.keys() if self._erase_through else ():
            self._erased[number] = self._erased_there(number)
        if self._discard:
            self._discard = False
            try:
                self._target.delete_set_aside()
            except OSError:
                self._discard = True
                raise

    def _erased_there(self, number: int) -> int:
        try:
            manifest = self._stored.manifest(number)
            return _erased_in(manifest, self._target.folder(number).read(f"{RANK}/{STATE}"))
        except _DAMAGED:
            return 0

    @override
    def _stale(self) -> list[int]:
        by_age = [number for _, number in sorted((generation, number) for number, generation in self._there.items())]
        old = by_age[: -self._keep]
        if by_age and self._erased.get(by_age[-1], 0) >= self._erase_through:
            old += [number for number in by_age[-self._keep :] if self._erased.get(number, 0) < self._erase_through]
        return old


def _erased_in(manifest: CheckpointManifest, state: bytes) -> int:
    """Return the last record of the erasure log that a checkpoint has applied."""
    return _ALL if manifest.begins else decoded(state, _ErasedCount).erased
