"""Fetches checkpoints and versions of an object store that are newer than those of the state directory."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from anabranch.core.failures import DamagedError, away_is_dependency
from anabranch.core.files import digest_of_file
from anabranch.learner.checkpoints.format import Age, CheckpointManifest, Checkpoints
from anabranch.learner.errors import CheckpointError, MisfitError, VersionError
from anabranch.learner.object_storage.bases import fetch_base
from anabranch.learner.object_storage.bucket_storage import BucketStorage, link_or_move
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.state_dir.folders import MANIFEST, PARTIAL, FolderManifest, ManifestDirectory, Storage
from anabranch.learner.versions.format import VERDICT, Versions

_THREADS = 4
_PROGRESS_SECONDS = 5.0
_WAIT_SECONDS = 1.0
_DAMAGED = (CheckpointError, VersionError, DamagedError, FileNotFoundError)

log = logging.getLogger(__name__)

_M = TypeVar("_M", bound=FolderManifest)


def fetch_checkpoint(
    source: BucketStorage, local: Checkpoints, least: Age, while_waiting: Callable[[], object] = bool
) -> bool:
    """Fetch the newest intact checkpoint that is newer than `least`, and return whether there is one.

    Damaged ones are logged. `while_waiting` is called about once a second.

    Raises:
        MisfitError: the newest one is of another schema or release.
        BucketAwayError: the object store cannot be reached.
        OSError: the state directory cannot be written.
    """
    there = Checkpoints(local.path, local.schema, 0, source)
    manifests = dict[Age, CheckpointManifest]()
    for number in there.numbers():
        with _logged(f"checkpoint {number} in {source.bucket.url}"):
            manifest = there.manifest(number)
            manifests[manifest.generation, number] = manifest
    for age in sorted(manifests, reverse=True):
        if age <= least:
            return False
        there.check(manifests[age])
        with _logged(f"checkpoint {age[1]} in {source.bucket.url}"):
            _fetch(source, local, manifests[age], manifests[age].files, while_waiting)
            return True
    return False


def fetch_versions(source: BucketStorage, local: Versions, while_waiting: Callable[[], object] = bool) -> None:
    """Fetch the newest version, and the newest that has not failed, with which the quality gate compares the next one.

    A version of the state directory is replaced where that of the object store is of a later generation. Raises as
    `fetch_checkpoint`.
    """
    there, numbers, head = Versions(local.path, source), source.numbers(), source.table.head
    if head is None:
        return
    for number in reversed(numbers):
        with _logged(f"version {number} in {source.bucket.url}"):
            verdict = there.verdict(number)
            failed = verdict is None or verdict.verdict == "fail"
            if failed and number != numbers[-1]:
                continue
            manifest = there.manifest(number)
            known = local.generation_of(number) if number in local.numbers() else None
            if known is None or known < manifest.generation:
                if manifest.base is not None:
                    fetch_base(source.bucket, head.bases, manifest.base, bases_in(local.path.parent))
                judged = {} if verdict is None else {VERDICT: head.verdicts[number]}
                _fetch(source, local, manifest, {**manifest.files, **judged}, while_waiting)
            if not failed:
                return


def copy_newest(source: BucketStorage, stored: Checkpoints, while_waiting: Callable[[], object] = bool) -> None:
    """Copy the files of the newest checkpoint, which is read next; raises as `fetch_checkpoint`."""
    number = max(stored.numbers(), key=lambda each: (stored.generation_of(each) or 0, each), default=None)
    if number is None:
        return
    folder, partial = source.folder(number), stored.path.parent / PARTIAL
    partial.mkdir(exist_ok=True)

    def fetch(name: str) -> None:
        file = files[name]
        whole = partial / file.sha256
        if not (whole.exists() and digest_of_file(whole) == file.sha256):
            _download(source, file.path, file.sha256, partial / name.replace("/", "-"))

    with _logged(f"checkpoint {number} in {source.bucket.url}"):
        files = source.table.files_of(number)
        names = {file.sha256: name for name, file in files.items()}  # each content once
        for path in partial.iterdir():
            if path.name not in names:  # of another checkpoint: there may be no space for both
                path.unlink()
        what = f"checkpoint {number} from {source.bucket.url}"
        _in_parallel(what, {name: files[name].size for name in names.values()}, fetch, while_waiting)
        for name in names.values():
            folder.use_copy(name, partial / files[name].sha256)


def _fetch(
    source: BucketStorage,
    local: ManifestDirectory[_M],
    manifest: _M,
    files: Mapping[str, str],
    while_waiting: Callable[[], object] = bool,
) -> None:
    """Write a folder with these files, by name with their digests; it replaces one of the same number."""
    number, objects = manifest.number, source.table.files_of(manifest.number)
    there, partial = _files_by_digest(local), local.path.parent / PARTIAL
    partial.mkdir(exist_ok=True)

    def fetch(name: str) -> None:
        path, digest = folder.path / name, files[name]
        for same in (there.get(digest), partial / digest):
            if same is not None:
                with contextlib.suppress(OSError, DamagedError):
                    path.hardlink_to(same)
                    if digest_of_file(path) == digest:
                        return
                path.unlink(missing_ok=True)
        link_or_move(_download(source, objects[name].path, digest, partial / name.replace("/", "-")), path)

    with Storage(local.path).publish(number, manifest.generation) as folder:
        for name in files:
            (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        what = f"{source.kind.removesuffix('s')} {number} from {source.bucket.url}"
        _in_parallel(what, {name: objects[name].size for name in files}, fetch, while_waiting)
        folder.write(MANIFEST, [source.folder(number).read(MANIFEST)])
        local.delete(number)


def fetch_file(
    source: BucketStorage,
    local: Checkpoints,
    manifest: CheckpointManifest,
    name: str,
    while_waiting: Callable[[], object] = bool,
) -> bool:
    """Fetch a file of a local checkpoint that is damaged or missing; return whether the object store has it.

    Raises:
        DependencyError: the object store cannot be reached, or the state directory cannot be written.
    """
    there, digest = Checkpoints(local.path, local.schema, 0, source), manifest.files[name]
    path, what = local.folder(manifest.number).local(name), f"{name} of checkpoint {manifest.number}"
    partial = local.path.parent / PARTIAL / name.replace("/", "-")
    with away_is_dependency(f"{what} is damaged, and cannot be fetched from {source.bucket.url}"):
        partial.parent.mkdir(exist_ok=True)
        for number in reversed(source.numbers()):
            with _logged(f"checkpoint {number} in {source.bucket.url}"):
                same = next((each for each, sha256 in there.manifest(number).files.items() if sha256 == digest), None)
                if same is None:
                    continue
                file = source.table.files_of(number)[same]
                _in_parallel(
                    f"{what} from {source.bucket.url}",
                    {name: file.size},
                    lambda _, file=file: _download(source, file.path, digest, partial).replace(path),  # type: ignore[misc]
                    while_waiting,
                )
                return True
    return False


def _download(source: BucketStorage, path: str, digest: str, to: Path) -> Path:
    """Download an object as `to`, and return the file, which has the digest as its name; raises DamagedError."""
    to.unlink(missing_ok=True)
    source.bucket.download(path, to)
    if digest_of_file(to) != digest:
        to.unlink()
        raise DamagedError(f"{path} does not have its digest")
    return to.replace(to.with_name(digest))


def _files_by_digest(local: ManifestDirectory[_M]) -> dict[str, Path]:
    """Return the files of a directory by the digests that its manifests have."""
    files = dict[str, Path]()
    for number in local.numbers():
        with contextlib.suppress(*_DAMAGED):
            files |= {sha256: local.directory(number) / name for name, sha256 in local.manifest(number).files.items()}
    return files


def _in_parallel(
    what: str, sizes: Mapping[str, int], fetch: Callable[[str], object], while_waiting: Callable[[], object]
) -> None:
    """Fetch files by name, in a few threads, and log the progress of a long time; raises the first error."""
    total, done, logged = sum(sizes.values()), 0, time.monotonic()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="fetch") as pool:
        names = {pool.submit(fetch, name): name for name in sizes}
        try:
            left = set(names)
            while left:
                ended, left = wait(left, _WAIT_SECONDS, FIRST_COMPLETED)
                for each in ended:
                    each.result()
                    done += sizes[names[each]]
                while_waiting()
                if time.monotonic() - logged > _PROGRESS_SECONDS:
                    logged = time.monotonic()
                    log.info("fetching %s: %.0f of %.0f MB", what, done / 1e6, total / 1e6)
        finally:
            pool.shutdown(cancel_futures=True)
    log.info("fetched %s: %.1f MB", what, total / 1e6)


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log that something is damaged, and go on."""
    try:
        yield
    except MisfitError:
        raise
    except _DAMAGED as exc:
        log.warning("%s is damaged, and not fetched: %s", what, exc)
