"""Copies versions of an object store into the local versions directory, where the swap finds them.

A version without a verdict is not served: its manifest comes first, its weights second, its verdict last. Nothing is
synced to the disk, which would take longer than the rest: what a power cut leaves is checked at the next start.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, check_names, digest_of_file
from anabranch.core.object_store.bucket import Bucket
from anabranch.learner.object_storage.bases import fetch_base
from anabranch.learner.object_storage.head import folder_path
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.state_dir.folders import MANIFEST, Storage
from anabranch.learner.versions.format import VERDICT, Manifest, RegistryState, Verdict, Versions
from anabranch.learner.versions.named_bases import prune_bases

WITHHELD = Verdict("fail", ["this server may not serve it: it is judged on canaries first, or is another learner's"])
"""The local verdict of a version that other servers may serve."""
_LOCK = "follower.lock"
_KEPT = 4
"""The newest versions whose weights are kept, besides those that `state.json` names."""
_KEPT_MANIFESTS = 20
_LOCK_PAUSE_SECONDS = 0.05


class VersionCache:
    """The local copies of versions; processes exclude each other by `locked`. Used by one thread at a time."""

    def __init__(self, bucket: Bucket, versions: Versions) -> None:
        self._bucket = bucket
        self._versions = versions
        self._storage = Storage(versions.path)
        self._parts: dict[int, tuple[set[str], str | None]] = {}
        """The names of the files of each local version, and its base."""
        self._bases = bases_in(versions.path.parent)
        self._checked_bases: set[str] = set()
        """Bases that are here, and have their digests."""

    @contextlib.contextmanager
    def locked(self, patience: timedelta | None = None) -> Iterator[None]:
        """Keep other processes of this host from copying versions.

        Raises:
            TimeoutError: another one has copied for longer than `patience`; None waits until it ends.
            OSError: the directory cannot be written.
        """
        self._versions.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._versions.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if patience is None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            else:
                _lock_within(descriptor, patience)
            yield
        finally:
            os.close(descriptor)

    def numbers(self) -> list[int]:
        """Return the numbers of all local versions, with weights or without, ascending."""
        return self._versions.numbers()

    def is_complete(self, number: int) -> bool:
        """Return whether the weights of a version are here."""
        folder = self._versions.folder(number)
        with contextlib.suppress(FileNotFoundError, DamagedError):
            if number not in self._parts:
                manifest = decoded(folder.read(MANIFEST, MOST_BYTES), Manifest)
                self._parts[number] = set(manifest.files), manifest.base
            files, base = self._parts[number]
            has_base = base is None or self._bases.file(base).exists()
            return has_base and all(folder.stamp(name) is not None for name in files)
        return False

    def is_intact(self, number: int, generation: int) -> bool:
        """Return whether a local version is that of the object store, as far as it is here; raises as `add`."""
        content, folder = self._read(number, generation, MANIFEST), self._versions.directory(number)
        manifest = decoded(content, Manifest)
        files = manifest.files
        check_names(files)
        if manifest.base is not None and self._bases.file(manifest.base).exists() and not self._has(manifest.base):
            return False
        return self._versions.folder(number).read(MANIFEST, MOST_BYTES) == content and all(
            digest_of_file(folder / name) == digest for name, digest in files.items() if (folder / name).exists()
        )

    def add(self, number: int, generation: int) -> None:
        """Copy the manifest of a version that is not here.

        Args:
            number: of the version.
            generation: that wrote it into the object store.

        Raises:
            FileNotFoundError: it was deleted meanwhile.
            BucketAwayError: the object store cannot be reached.
            OSError: it cannot be written here.
            DamagedError: it is not the manifest of this version.
        """
        content = self._read(number, generation, MANIFEST)
        manifest = decoded(content, Manifest)
        if manifest.number != number:
            raise DamagedError(f"{self._url(number, generation)}: its manifest is that of version {manifest.number}")
        check_names(manifest.files)
        if {MANIFEST, VERDICT} & manifest.files.keys():
            raise DamagedError(f"{self._url(number, generation)}: its manifest names {MANIFEST} or {VERDICT}")
        arriving = self._versions.path / f".tmp-{number}"
        shutil.rmtree(arriving, ignore_errors=True)
        arriving.mkdir()
        (arriving / MANIFEST).write_bytes(content)
        arriving.rename(self._versions.directory(number))
        self._parts[number] = set(manifest.files), manifest.base

    def complete(self, number: int, generation: int, bases: Mapping[str, int]) -> None:
        """Copy the weights of a version whose manifest is here, piece by piece, and its base first; raises as `add`.

        `bases` are those of the head.
        """
        manifest = self._versions.manifest(number)
        if manifest.base is not None and not self._has(manifest.base):
            fetch_base(self._bucket, bases, manifest.base, self._bases)
            self._checked_bases.add(manifest.base)
        for name, digest in manifest.files.items():
            arriving = self._versions.path / f".tmp-{number}-{name}"
            arriving.unlink(missing_ok=True)
            try:
                self._bucket.download(f"{folder_path('versions', number, generation)}/{name}", arriving)
                if digest_of_file(arriving) != digest:
                    raise DamagedError(f"{self._url(number, generation)}/{name} does not have its digest")
                arriving.rename(self._versions.directory(number) / name)
            finally:
                arriving.unlink(missing_ok=True)

    def _has(self, base: str) -> bool:
        """Return whether a base is here; its digest is checked once."""
        if base not in self._checked_bases and self._bases.is_intact(base):
            self._checked_bases.add(base)
        return base in self._checked_bases and self._bases.file(base).exists()

    def read_verdict(self, number: int, generation: int) -> Verdict | None:
        """Return the verdict of a version in the object store; None where it has none yet. Raises as `add`."""
        try:
            return decoded(self._read(number, generation, VERDICT), Verdict)
        except FileNotFoundError:
            return None

    def judge(self, number: int, verdict: Verdict) -> None:
        """Write the verdict of a local version, unless it has it; it may be served from now on. Raises OSError."""
        folder = self._versions.folder(number)
        content = msgspec.json.encode(verdict)
        if folder.stamp(VERDICT) is None or folder.read(VERDICT, MOST_BYTES) != content:
            replace_file(self._versions.directory(number) / VERDICT, content, durable=False)

    def withdraw(self, number: int) -> None:
        """Withdraw a local version; one without a verdict is not served as it is. Raises OSError."""
        if self._versions.folder(number).stamp(VERDICT) is not None:
            self.judge(number, WITHHELD)

    def delete(self, number: int) -> None:
        """Delete a local version; raises OSError."""
        self._parts.pop(number, None)
        self._versions.delete(number)

    def prune(self, state: RegistryState, latest: int, kept: Collection[int | None]) -> None:
        """Delete old local versions, except those that this server needs; raises OSError.

        Args:
            state: names versions that are kept.
            latest: the newest version in the object store: those above it are of a learner whose state was lost.
            kept: versions that are kept as well.
        """
        numbers = self.numbers()
        current = [number for number in numbers if number <= latest]
        complete = [number for number in current if self.is_complete(number)]
        needed = {state.serving, state.previous, state.pinned, state.promoted, *kept, *complete[-_KEPT:]}
        needed |= set(current[-_KEPT_MANIFESTS:]) - set(complete)
        for number in numbers:
            if number not in needed:
                self.delete(number)
        if len(self._bases.digests()) > 1:
            prune_bases(self._versions.path.parent, None)

    def clean(self) -> None:
        """Remove what a crash left half-copied; raises OSError."""
        self._storage.clean()
        for path in self._versions.path.glob(".tmp-*"):
            path.unlink(missing_ok=True)

    def _read(self, number: int, generation: int, name: str) -> bytes:
        return self._bucket.read(f"{folder_path('versions', number, generation)}/{name}", MOST_BYTES)

    def _url(self, number: int, generation: int) -> str:
        return f"{self._bucket.url}/{folder_path('versions', number, generation)}"


def _lock_within(descriptor: int, patience: timedelta) -> None:
    deadline = time.monotonic() + patience.total_seconds()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError("another process of this host copies a version") from None
            time.sleep(_LOCK_PAUSE_SECONDS)
        else:
            return
