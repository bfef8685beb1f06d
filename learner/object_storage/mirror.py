"""Uploads the state behind the learner, in threads, so that no step waits for a request.

In `storage.mode = "mirror"` these are versions and checkpoints. Versions have a separate thread, since a checkpoint may
take minutes. In both modes it is the erasure log.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from anabranch.core.backoff import Backoff
from learner.config import CheckpointSettings, VersionsSettings
from learner.errors import SecondLearnerError, StorageError
from learner.object_storage.erasure_upload import ErasureUpload
from learner.object_storage.opening import HeldStorage
from learner.object_storage.uploads import CheckpointUploads, VersionUploads
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import Checkpoints
from learner.state_dir.report import StorageReport
from learner.state_dir.version import Versions

_POLL_SECONDS = 0.2
_FIRST, _LONGEST = timedelta(seconds=1), timedelta(seconds=15)
_HURRY_SECONDS = 1.0
"""Longest pause after a failure while the end waits for an upload."""
_PATIENCE_SECONDS = 60.0
"""Lag that is a problem, unless twice the time between two uploads is longer."""

log = logging.getLogger(__name__)


class Uploads(Protocol):
    """What is uploaded whenever it changes. One thread calls `advance`."""

    @property
    def kind(self) -> str:
        """Its name: versions, checkpoints or erasures."""
        ...

    @property
    def lag_seconds(self) -> float:
        """How long the object store has lacked the newest one; 0 while it has it. Any thread may ask."""
        ...

    @property
    def uploaded_bytes(self) -> int:
        """Bytes that were uploaded since the start."""
        ...

    def advance(self) -> bool:
        """Upload what has changed, and return whether the object store has everything; raises OSError."""
        ...


class UploadThread:
    """Repeats uploads in a thread, with a back-off while they fail. Any thread may call its methods."""

    def __init__(self, uploads: Sequence[Uploads], url: str, every: timedelta) -> None:
        """Take the uploads in their order, and how often the last of them is due."""
        self.uploads = uploads
        self._url = url
        self._patience = max(_PATIENCE_SECONDS, 2 * every.total_seconds())
        self._backoff = Backoff(_FIRST, _LONGEST)
        self._wake = threading.Event()
        self._runs = self._end = self._hurries = False
        self._changed = threading.Condition()
        self._current_at = float("-inf")
        """When the last round began that found everything uploaded."""
        self._reason: str | None = None
        self.failures = 0
        self._bug: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"storage-{uploads[-1].kind}", daemon=True)

    @property
    def warning(self) -> str | None:
        """One sentence while uploads fail, until that is a problem."""
        return None if self._lag_seconds >= self._patience else self._sentence()

    @property
    def problem(self) -> str | None:
        """One sentence while the object store has lacked something for longer than a minute."""
        if self._lag_seconds < self._patience:
            return None
        slow = "uploads take longer than that; is the connection, or the object store, too slow?"
        return self._sentence() or f"{self._missing()}: {slow}"

    def start(self) -> None:
        """Start the thread."""
        self._runs = True
        self._thread.start()

    def raise_bug(self) -> None:
        """Raise an exception of the thread that no failure of the object store explains."""
        if self._bug is not None:
            raise self._bug

    def finish(self, deadline: Deadline, asked: float | None = None) -> bool:
        """Wait until all is uploaded that existed at `asked`, by default now; return whether it is.

        What fails is tried again after short pauses, until the deadline.
        """
        asked = time.monotonic() if asked is None else asked
        self.hurry()
        with self._changed:
            self._changed.wait_for(lambda: self._current_at >= asked or not self._runs, deadline.left)
            return self._current_at >= asked

    def hurry(self) -> None:
        """Shorten the pauses after failures from now on."""
        self._hurries = True
        self._wake.set()

    def close(self) -> None:
        """End the thread once its request has ended; this does not wait for that."""
        self._end = True
        self._wake.set()

    def step(self) -> float:
        """Advance all uploads once, and return the seconds until the next time. Called by the thread."""
        begin, current, error = time.monotonic(), True, None
        for uploads in self.uploads:
            try:
                current &= uploads.advance()
            except (OSError, StorageError) as exc:
                current, error = False, exc
        if not self._end:
            self._record(error)
        with self._changed:
            self._current_at = begin if current else self._current_at
            self._changed.notify_all()
        if error is None:
            return _POLL_SECONDS
        return min(self._backoff.next(), _HURRY_SECONDS) if self._hurries else self._backoff.next()

    def _run(self) -> None:
        try:
            while not self._end:
                self._wake.clear()
                self._wake.wait(self.step())
        except SecondLearnerError:  # `Lease.check` ends the learner
            pass
        except BaseException as exc:  # noqa: BLE001 the top of a thread: `raise_bug` raises it
            self._bug = exc
        with self._changed:
            self._runs = False  # the thread is alive for a moment yet
            self._changed.notify_all()

    def _record(self, error: Exception | None) -> None:
        """Record whether a round has failed; only the first failure in a row is logged."""
        names = " and ".join(uploads.kind for uploads in self.uploads)
        if error is None:
            if self._reason is not None:
                log.info("uploads of %s to %s work again", names, self._url)
            self._reason = None
            self._backoff.reset()
            return
        self.failures += 1
        if self._reason is None:
            log.warning("%s cannot be uploaded for now: %s; training goes on", names, error)
        self._reason = str(error)

    @property
    def _lag_seconds(self) -> float:
        return max(uploads.lag_seconds for uploads in self.uploads)

    def _sentence(self) -> str | None:
        return None if self._reason is None else f"{self._missing()}: {self._reason}"

    def _missing(self) -> str:
        late = max(self.uploads, key=lambda uploads: uploads.lag_seconds)
        return f"{self._url} has lacked the newest {late.kind} for {late.lag_seconds:.0f} s"


class Mirror:
    """The uploads of a learner: a context manager, which runs their threads."""

    def __init__(
        self,
        url: str,
        erasures: ErasureUpload,
        versions: VersionUploads | None = None,
        checkpoints: CheckpointUploads | None = None,
        every: tuple[timedelta, timedelta] = (timedelta(0), timedelta(0)),
    ) -> None:
        """Take the uploads of this mode, and how often versions and checkpoints are written."""
        self.url = url
        """The URL as messages may have it."""
        self._erasures = erasures
        self._checkpoints = checkpoints
        first: list[Uploads] = [erasures] if versions is None else [erasures, versions]
        self.threads = [UploadThread(first, url, every[0])]
        if checkpoints is not None:
            self.threads.append(UploadThread([checkpoints], url, every[1]))

    def __enter__(self) -> "Mirror":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self.threads:
            thread.close()

    def report(self) -> StorageReport:
        """Return the state of the uploads. Any thread may call it."""
        uploads = [each for thread in self.threads for each in thread.uploads]
        return StorageReport(
            url=self.url,
            lag_seconds={each.kind: each.lag_seconds for each in uploads},
            uploaded_bytes=sum(each.uploaded_bytes for each in uploads),
            failures=sum(thread.failures for thread in self.threads),
        )

    def raise_bug(self) -> None:
        """Raise the exception of a thread that is a bug, if there is one."""
        for thread in self.threads:
            thread.raise_bug()

    def erase(self, through: int) -> None:
        """Delete the checkpoints in the object store from before a record of the erasure log that is applied here."""
        if self._checkpoints is not None:
            self._checkpoints.erase(through)

    def has_erased(self, through: int) -> bool:
        """Return whether the object store has the log, and no checkpoint from before one of its records."""
        clean = self._checkpoints is None or self._checkpoints.is_clean_of(through)
        return clean and self._erasures.is_current()

    def finish(self, deadline: Deadline) -> None:
        """Wait until all is uploaded that exists now, until the deadline; log what is not."""
        asked = time.monotonic()
        for thread in self.threads:
            thread.hurry()
        for thread in self.threads:
            if not thread.finish(deadline, asked):
                log.warning(
                    "%s lacks the newest %s, which the next start with this state_dir uploads",
                    *(self.url, " or ".join(uploads.kind for uploads in thread.uploads)),
                )


def open_mirror(
    held: HeldStorage,
    state_dir: Path,
    versions: VersionsSettings,
    checkpoints: CheckpointSettings,
    erased: int,
    needed: Callable[[], Collection[int] | None],
) -> Mirror:
    """Return the uploads of a learner.

    Args:
        held: the object store.
        state_dir: the state directory.
        versions: how often versions are written, and how many are kept.
        checkpoints: likewise.
        erased: the last record of the erasure log that is applied everywhere.
        needed: returns the versions that servers need; None while that is unknown.
    """
    bucket, lease = held.versions.bucket, held.lease
    erasures = ErasureUpload(state_dir, bucket, lease)
    if held.only:
        return Mirror(bucket.url, erasures)
    keep = versions.keep + versions.keep_hourly
    return Mirror(
        bucket.url,
        erasures,
        VersionUploads(Versions(state_dir / "versions"), held.versions, lease, keep, needed, held.bases),
        CheckpointUploads(
            Checkpoints(state_dir / "checkpoints", "", lease.generation),
            held.checkpoints,
            lease,
            checkpoints.keep,
            erased,
            held.bases,
        ),
        (versions.publish_every, checkpoints.every),
    )
