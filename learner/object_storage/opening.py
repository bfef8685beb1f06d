"""Opens checkpoints and versions where `[storage]` has them, for a process that writes them."""

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from anabranch.core.errors import SettingsError
from anabranch.core.failures import state_errors
from anabranch.core.object_store.conditional_writes import check_conditional_writes
from learner.object_storage.bases.uploads import BaseUploads, uploads_of
from learner.object_storage.bucket_storage import BucketStorage
from learner.object_storage.config import StorageSettings
from learner.object_storage.erasure_upload import ErasureUpload, fetch_erasures
from learner.object_storage.fetching import fetch_versions, newest_age
from learner.object_storage.head import HeadReader
from learner.object_storage.holder import holder_of
from learner.object_storage.lease import Lease, PrefixOwner
from learner.state_dir.checkpoint import Checkpoints
from learner.state_dir.lock import write_generation
from learner.state_dir.version import Versions

FETCHED = "fetched"
_LOCAL = ("file", "memory")
"""Name of the folder of local copies of objects, which a learner makes when it needs them."""


_NOBODY = PrefixOwner()


@dataclass(frozen=True)
class HeldStorage:
    """The state in an object store, of the process that holds the lease."""

    lease: Lease
    checkpoints: BucketStorage
    versions: BucketStorage
    bases: BaseUploads
    only: bool
    """Whether the state directory has no checkpoints and versions."""


@contextlib.contextmanager
def hold_storage(
    settings: StorageSettings,
    state_dir: Path,
    generation: int,
    stop: threading.Event | None = None,
    owner: PrefixOwner = _NOBODY,
) -> Iterator[HeldStorage]:
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
    write_generation(state_dir, lease.take(generation - 1, stop))
    with lease:
        checkpoints = BucketStorage(bucket, "checkpoints", fetched / "checkpoints", lease)
        versions = BucketStorage(bucket, "versions", fetched / "versions", lease)
        yield HeldStorage(lease, checkpoints, versions, uploads_of(versions, state_dir / "versions"), only)


def stored_versions(
    state_dir: Path, held: HeldStorage | None, while_waiting: Callable[[], object] = bool, base: str | None = None
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
        versions.clean()  # of a start that was killed while it fetched
        fetch_versions(held.versions, versions, while_waiting)
    return versions


def stored_checkpoints(
    state_dir: Path, schema: str, generation: int, held: HeldStorage | None, base: str | None = None
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
def checkpoints_to_write(
    settings: StorageSettings | None, state_dir: Path, schema: str, generation: int, owner: PrefixOwner = _NOBODY
) -> Iterator[Checkpoints]:
    """Yield the checkpoints from which a command erases; in mode `only` it holds the lease, and stores the log too.

    Raises as `hold_storage`.
    """
    if settings is None or settings.mode == "mirror":
        yield Checkpoints(state_dir / "checkpoints", schema, 0)
        return
    with hold_storage(settings, state_dir, generation, owner=owner) as held:
        fetch_erasures(held.checkpoints.bucket, state_dir)
        yield Checkpoints(state_dir / "checkpoints", schema, 0, held.checkpoints)
        ErasureUpload(state_dir, held.checkpoints.bucket, held.lease).advance()
