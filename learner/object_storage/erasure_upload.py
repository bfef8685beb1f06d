"""Keeps `erasures.log` and the secret that masks its keys in an object store: erased events do not come back elsewhere.

Both are one object, the secret first, under compare-and-swap: no learner finds a log with the secret of another one.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from typing_extensions import override

from anabranch.core.atomic_files import write_durably
from anabranch.core.failures import DamagedError
from anabranch.core.files import sync_directory
from anabranch.core.object_store.bucket import Bucket, BucketAwayError, ReplacedError
from anabranch.core.temporary_files import temporary_folder
from anabranch.ingest.events.identity import base_of
from anabranch.learner.errors import StorageError
from anabranch.learner.object_storage.lease import Lease
from anabranch.replay.erasure.erased_events import ByRange, ErasedEvents, Record
from anabranch.replay.erasure.erasure_log import NAME, SECRET_BYTES, SECRET_FILE, Applied, ErasureLog

ERASURES = "erasures"
"""Path of the object."""
_MOST_BYTES = 1 << 30
"""Of the object: 10 million packed records have less."""
_LEAST_SECONDS, _SHARE = 0.5, 10
"""Between two uploads: a stream of tombstones changes the log with each batch. They take 1 / `_SHARE` of the time."""
_ATTEMPTS = 10

log = logging.getLogger(__name__)


class ErasureUpload:
    """Uploads the log whenever it has changed. One thread calls `advance`; any thread may read the attributes."""

    kind = "erasures"

    def __init__(self, state_dir: Path, bucket: Bucket, lease: Lease) -> None:
        self._log = state_dir / NAME
        self._bucket = bucket
        self._lease = lease
        self._uploaded: object = None
        """The stamp of the log that was uploaded last."""
        self._tag: str | None = None
        """The tag of the object; None before it was read or written."""
        self._due = 0.0
        self._behind_since: float | None = None
        self.uploaded_bytes = 0

    @property
    def lag_seconds(self) -> float:
        """How long the object store has lacked the newest log; 0 while it has it."""
        since = self._behind_since
        return 0.0 if since is None else max(0.0, time.monotonic() - since)

    def is_current(self) -> bool:
        """Return whether the object store has all of the log."""
        return self._stamp() == self._uploaded

    def advance(self) -> bool:
        """Upload the log if it has changed, and return whether the object store has all of it.

        Raises:
            OSError: the object store cannot be reached.
            SecondLearnerError: another learner has taken the lease.
        """
        if self.is_current():
            self._behind_since = None
            return True
        begin = time.monotonic()
        self._behind_since = self._behind_since or begin
        if begin < self._due:
            return False
        self._uploaded, size = self._upload()
        self._behind_since = None
        self.uploaded_bytes += size
        self._due = time.monotonic() + max(_LEAST_SECONDS, _SHARE * (time.monotonic() - begin))
        return self.is_current()

    def _upload(self) -> tuple[object, int]:
        """Replace the object, and return the stamp of the log that it has, and its size.

        A learner that was fenced off may have written it since: its records are appended to this log first.
        """
        error: Exception | None = None
        for _ in range(_ATTEMPTS):
            stamp, content = self._stamp(), stored_erasures(self._log.parent)
            if content is None:
                return stamp, 0
            self._lease.update(lambda head: head)  # what was read before is not of a successor
            try:
                if self._tag is None:
                    self._tag = self._bucket.create(ERASURES, content)
                else:
                    self._tag = self._bucket.replace(ERASURES, content, self._tag)
            except ReplacedError as exc:
                error = exc
                self._merge(content)
                continue
            return stamp, len(content)
        raise BucketAwayError(f"{error}, {_ATTEMPTS} times in a row")

    def _merge(self, content: bytes) -> None:
        """Append the records to the log that only the object has, and set its tag."""
        try:
            with _bounded(self._bucket):
                there, self._tag = self._bucket.read_tagged(ERASURES, _MOST_BYTES)
        except FileNotFoundError:
            self._tag = None
            return
        if not content.startswith(there):
            with _unpacked(there, self._log.parent) as path:
                _append_missing(path, self._log)

    def _stamp(self) -> object:
        try:
            found = self._log.stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def fetch_erasures(bucket: Bucket, state_dir: Path) -> bool:
    """Let the log of erasures have what that of the object store has, and the secret that it needs.

    Returns whether the log is another one now: its records may be applied everywhere but to the files of this host.
    Records that only the state directory has are appended to those of the object store, whose checkpoints count theirs.

    Raises:
        BucketAwayError: the object store cannot be reached.
        DependencyError, SettingsError: a log cannot be read.
        OSError: the state directory cannot be written.
    """
    try:
        with _bounded(bucket):
            there = bucket.read(ERASURES, _MOST_BYTES)
    except FileNotFoundError:
        return False
    if (stored_erasures(state_dir) or b"").startswith(there):
        return False
    with _unpacked(there, state_dir) as path:
        if (state_dir / NAME).exists():
            _append_missing(state_dir / NAME, path)
        for name in (SECRET_FILE, NAME):
            path.with_name(name).replace(state_dir / name)
        sync_directory(state_dir)
    log.info("records of erasures are fetched from %s", bucket.url)
    return True


def stored_erasures(state_dir: Path) -> bytes | None:
    """Return the object for the log of a state directory: the secret, and the complete lines; None without a log."""
    try:
        content = (state_dir / NAME).read_bytes()
    except FileNotFoundError:
        return None
    content = content[: content.rfind(b"\n") + 1]
    return (state_dir / SECRET_FILE).read_bytes() + content if content else None


@contextlib.contextmanager
def _bounded(bucket: Bucket) -> Iterator[None]:
    """Turn the error about an object that is too long; FileNotFoundError passes."""
    try:
        yield
    except DamagedError as exc:
        raise StorageError(f"{bucket.url}/{ERASURES} cannot be used: {exc}") from exc


@contextlib.contextmanager
def _unpacked(stored: bytes, state_dir: Path) -> Iterator[Path]:
    """Yield the path of a durable log with the contents of the object, its secret next to it, until the block ends."""
    with temporary_folder(f"{NAME}-", state_dir) as folder:
        secret, path = folder / SECRET_FILE, folder / NAME
        for each, content in ((secret, stored[:SECRET_BYTES]), (path, stored[SECRET_BYTES:])):
            each.touch(0o600)
            write_durably(each, [content])
        yield path


class _WholeLog(ErasureLog):
    """A log whose records count as pending, except packed ones. Those are in the object store, which confirmed them."""

    @override
    def _set_applied(self, entry: Applied) -> None:
        pass


def _append_missing(source: Path, target: Path) -> None:
    """Append the records of one log that another one lacks."""
    whole, other = _WholeLog(source), _WholeLog(target)
    whole.refresh()
    other.refresh()
    known = {_content(record) for record in other.since(other.through)}
    missing = [record for record in whole.since(whole.through) if _content(record) not in known]
    if missing := [record for record in missing if not _covers(other.erased, record)]:
        ErasureLog(target).append(missing)


def _content(record: Record) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(record, number=0))


def _covers(erased: ErasedEvents, record: Record) -> bool:
    """Return whether the last event that a record erases in each partition is erased already.

    Of a packed log nothing else can be found. Ranges overlap: only one that is still a line counts.
    """
    if isinstance(record, ByRange):
        return False
    ends = {name: end for name, end in {**record.up_to, **record.beyond}.items() if end > 0}
    n = len(ends)
    columns = {
        "partition": np.arange(n),
        "offset": np.array([end - 1 for end in ends.values()], np.int64),
        "key_hash": np.full(n, int(record.key_hash, 16), np.uint64),
    }
    return bool(erased.covers(np.array([base_of(name) for name in ends], np.uint64), columns).all())
