"""Opens checkpoints and versions where `[storage]` has them, for a process that writes them.

The file `storage-holder` of a state directory has its id for the lease, and whether its state is in an object store.
The id is that of one directory of one running system. A copy has another one, on another disk or another host: the lock
of the original does not prove that its learner has ended.
"""

import contextlib
import functools
import hashlib
import platform
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError, decoded, state_errors
from anabranch.core.files import MOST_BYTES, read_file
from anabranch.core.object_store.bucket import Bucket
from anabranch.core.object_store.conditional_writes import check_conditional_writes
from anabranch.core.stream_secret import SECRET_BYTES, SECRET_FILE, StreamSecret
from anabranch.learner.checkpoints.format import Age, Checkpoints, newest_age
from anabranch.learner.errors import StorageError
from anabranch.learner.object_storage.bases import BaseUploads, uploads_of
from anabranch.learner.object_storage.bucket_storage import BucketStorage
from anabranch.learner.object_storage.erasure_upload import ErasureUpload, fetch_erasures
from anabranch.learner.object_storage.fetching import copy_newest, fetch_checkpoint, fetch_file, fetch_versions
from anabranch.learner.object_storage.head import HeadReader
from anabranch.learner.object_storage.lease import NOBODY, Lease, PrefixOwner
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.state_dir.folders import discard_partial
from anabranch.learner.state_dir.lock import write_generation
from anabranch.learner.versions.format import Versions

HOLDER = "storage-holder"
"""Name of the file."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
SECRET = "secret"  # noqa: S105 a path
"""Path of the object with the secret of the state directory: other hosts hold out and keep the same events."""
FETCHED = "fetched"
"""Name of the folder of local copies of objects, which a learner makes when it needs them."""
_LOCAL = ("file", "memory")
"""Schemes of URLs on this host."""


@dataclass(frozen=True)
class LeasedStorage:
    """The state in an object store, of the process that holds the lease."""

    lease: Lease
    checkpoints: BucketStorage
    versions: BucketStorage
    bases: BaseUploads
    only: bool
    """Whether the state directory has no checkpoints and versions."""


@contextlib.contextmanager
def lease_storage(
    settings: StorageSettings,
    state_dir: Path,
    generation: int,
    stop: threading.Event | None = None,
    owner: PrefixOwner = NOBODY,
) -> Iterator[LeasedStorage]:
    """Hold the lease while the block runs; the generation of the state directory becomes that of the lease.

    Args:
        settings: of the object store.
        state_dir: the state directory, whose lock is held.
        generation: of its holder.
        stop: ends the wait for another holder of the lease.
        owner: the pipeline; the prefix of another one is refused.

    Raises:
        SecondLearnerError: another learner holds the lease.
        DependencyError: the object store cannot be reached.
        StorageError: its state cannot be used.
        SettingsError: it lacks conditional writes.
    """
    fetched = state_dir / FETCHED
    shutil.rmtree(fetched, ignore_errors=True)
    if urlsplit(settings.url).scheme not in _LOCAL:  # there, the comparison is this program's
        HeadReader(settings.quick_bucket).poll()  # before anything is written there
        check_conditional_writes(settings.quick_bucket)
    lease = Lease(settings.quick_bucket, settings.lease, holder_of(state_dir), owner)
    bucket, only = settings.bucket, settings.mode == "only"
    write_generation(state_dir, lease.acquire(generation - 1, stop))
    with lease:
        checkpoints = BucketStorage(bucket, "checkpoints", fetched / "checkpoints", lease)
        versions = BucketStorage(bucket, "versions", fetched / "versions", lease)
        yield LeasedStorage(lease, checkpoints, versions, uploads_of(versions, state_dir / "versions"), only)


def stored_versions(
    state_dir: Path, held: LeasedStorage | None, while_waiting: Callable[[], object] = bool, base: str | None = None
) -> Versions:
    """Return the versions that a learner writes on a base; the newest of the object store are fetched.

    Raises:
        DependencyError: the object store cannot be reached.
    """
    versions = Versions(state_dir / "versions", held.versions if held is not None and held.only else None)
    versions.base = base
    if held is not None and held.only:
        with state_errors(f"the frozen weights of the model cannot be written to {held.versions.bucket.url}"):
            held.bases.keep(base)
    if held is None or held.only:
        return versions
    versions.taken = held.versions.highest()
    with state_errors(f"the versions of {held.versions.location} cannot be written to {versions.path}"):
        versions.storage.clean()  # of a start that was killed while it fetched
        fetch_versions(held.versions, versions, while_waiting)
    return versions


def stored_checkpoints(
    state_dir: Path, schema: str, generation: int, held: LeasedStorage | None, base: str | None = None
) -> Checkpoints:
    """Return the checkpoints that a learner writes on a base.

    Raises:
        SettingsError: in mode `only` the state directory has newer ones, which would be lost.
    """
    local = Checkpoints(state_dir / "checkpoints", schema, generation)
    local.base = base
    if held is None:
        return local
    if not held.only:
        local.taken = held.checkpoints.highest()
        return local
    stored = Checkpoints(local.path, schema, generation, held.checkpoints)
    stored.base = base
    if newest_age(local) > newest_age(stored):
        raise SettingsError(
            f'storage.mode = "only" does not go with the checkpoints in {local.path}, which are newer than those of '
            f'{stored.location}: start once with storage.mode = "mirror", which uploads them, or move them away'
        )
    return stored


@contextlib.contextmanager
def fetching_checkpoints(
    held: LeasedStorage | None, checkpoints: Checkpoints, while_waiting: Callable[[], object] = bool
) -> Iterator[Callable[[Age], bool]]:
    """Yield a function for a start: it fetches the newest checkpoint if it is newer than an age, and returns whether.

    In mode `only` the files of the newest are copied first, and it fetches nothing. Files of the state directory that
    are damaged or missing are fetched when they are read. What was fetched by a start that was interrupted is used.
    Raises as `fetch_checkpoint`.
    """
    if held is None:
        yield lambda _: False
        return
    if held.only:
        copy_newest(held.checkpoints, checkpoints, while_waiting)
        yield lambda _: False
    else:
        source = held.checkpoints
        checkpoints.storage.clean()
        checkpoints.fetch_again = functools.partial(fetch_file, source, checkpoints, while_waiting=while_waiting)
        yield lambda least: fetch_checkpoint(source, checkpoints, least, while_waiting)
    discard_partial(checkpoints.path.parent)


@contextlib.contextmanager
def checkpoints_to_write(
    settings: StorageSettings | None, state_dir: Path, schema: str, generation: int, owner: PrefixOwner = NOBODY
) -> Iterator[Checkpoints]:
    """Yield the checkpoints from which a command erases; in mode `only` it holds the lease, and stores the log too.

    Raises as `lease_storage`.
    """
    if settings is None or settings.mode == "mirror":
        yield Checkpoints(state_dir / "checkpoints", schema, 0)
        return
    with lease_storage(settings, state_dir, generation, owner=owner) as held:
        fetch_erasures(held.checkpoints.bucket, state_dir)
        yield Checkpoints(state_dir / "checkpoints", schema, 0, held.checkpoints)
        ErasureUpload(state_dir, held.checkpoints.bucket, held.lease).advance()


def fetch_secret(bucket: Bucket, state_dir: Path) -> None:
    """Let a state directory without a secret have that of the object store, if it has one. The lease must be held.

    Raises:
        BucketAwayError: the object store cannot be reached.
        StorageError: both have a secret, and not the same, or what the object store has is none.
    """
    try:
        there, here = bucket.read(SECRET, SECRET_BYTES), StreamSecret.read(state_dir)
    except FileNotFoundError:
        return
    except DamagedError as exc:
        raise StorageError(str(exc)) from exc
    if len(there) != SECRET_BYTES:
        raise StorageError(f"{bucket.url}/{SECRET} has {len(there)} bytes, and not the {SECRET_BYTES} of a secret")
    if here is None:
        StreamSecret(there).write(state_dir)
    elif here.value != there:
        raise StorageError(
            f"{state_dir / SECRET_FILE} is not the secret that {bucket.url} has: they are of two pipelines, or one was "
            f"begun again; use another storage.url or state_dir, or move {SECRET_FILE} and the checkpoints of "
            "state_dir away to go on with what the object store has"
        )


def fetch_small_files(bucket: Bucket, copy: Path) -> None:
    """Let a copy of a state directory have the erasures of the object store, and its secret if it has none."""
    fetch_erasures(bucket, copy)
    if not (copy / SECRET_FILE).exists():
        fetch_secret(bucket, copy)


def upload_secret(bucket: Bucket, secret: StreamSecret) -> None:
    """Let the object store have the secret; `fetch_secret` was called before.

    Raises:
        BucketAwayError: the object store cannot be reached.
    """
    try:
        bucket.read(SECRET, SECRET_BYTES)
    except FileNotFoundError:
        bucket.create(SECRET, secret.value)


class _Holder(msgspec.Struct, frozen=True):
    id: str
    only: str | None = None
    """The URL that has the state while `storage.mode` is `only`."""


def holder_of(state_dir: Path) -> str:
    """Return the id of a state directory, which is made at the first call; its lock must be held."""
    known = _read_holder(state_dir)
    if known is None:
        known = _Holder(uuid.uuid4().hex)
        _write_holder(state_dir, known)
    with state_errors(f"{state_dir} cannot be read"):
        status = state_dir.stat()
    system = _BOOT.read_text() if _BOOT.exists() else platform.node()
    where = hashlib.sha256(f"{system}:{status.st_dev}:{status.st_ino}".encode()).hexdigest()
    return f"{known.id}-{where[:16]}"


def record_mode(state_dir: Path, only: str | None) -> None:
    """Record the URL that has the state in mode `only`, or None; the lock must be held."""
    known = _read_holder(state_dir)
    if known is not None and known.only != only:
        _write_holder(state_dir, msgspec.structs.replace(known, only=only))


def check_state_is_here(state_dir: Path) -> None:
    """Raise SettingsError where the state is in an object store, and there is no `[storage]` any more."""
    known = _read_holder(state_dir)
    if known is not None and known.only is not None:
        raise SettingsError(
            f'the state of {state_dir} is in {known.only}, by storage.mode = "only", and there is no [storage]: put it '
            f'back, with mode = "mirror" to fetch the state, or delete {state_dir / HOLDER} to begin without it'
        )


def _read_holder(state_dir: Path) -> _Holder | None:
    path = state_dir / HOLDER
    with state_errors(f"{path} cannot be read"), contextlib.suppress(FileNotFoundError, DamagedError):
        return decoded(read_file(path, MOST_BYTES), _Holder)
    return None


def _write_holder(state_dir: Path, holder: _Holder) -> None:
    path = state_dir / HOLDER
    with state_errors(f"{path} cannot be written"):
        replace_file(path, msgspec.json.encode(holder))
