"""Uploads the state behind the learner, in threads, so that no step waits for a request.

In `storage.mode = "mirror"` these are versions and checkpoints. Versions have a separate thread, since a checkpoint may
take minutes. In both modes it is the erasure log.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from anabranch.core.backoff import Backoff
from anabranch.core.periodic_thread import PeriodicThread
from anabranch.core.shutdown import Deadline
from anabranch.learner.checkpoints.background_erasure import ErasedCopies
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.errors import SecondLearnerError, StorageError
from anabranch.learner.extension import Extension
from anabranch.learner.extensions.storage.uploads import CheckpointUploads, VersionUploads
from anabranch.learner.object_storage.erasure_upload import ErasureUpload
from anabranch.learner.object_storage.lease import Lease
from anabranch.learner.object_storage.opening import LeasedStorage
from anabranch.learner.settings.learner import CheckpointSettings, VersionsSettings
from anabranch.learner.status.report import StorageReport
from anabranch.learner.versions.format import Versions

_POLL_SECONDS = 0.2
_FIRST, _LONGEST = timedelta(seconds=1), timedelta(seconds=15)
_HURRY_SECONDS = 1.0
"""Longest pause after a failure while the end waits for an upload."""
_PATIENCE_SECONDS = 60.0
"""Lag that is a problem, unless twice the time between two uploads is longer."""

log = logging.getLogger(__name__)

Uploads = ErasureUpload | VersionUploads | CheckpointUploads
"""What is uploaded whenever it changes."""


class UploadThread:
    """Repeats uploads in a thread, with a back-off while they fail. Any thread may call its methods."""

    def __init__(self, uploads: Sequence[Uploads], url: str, every: timedelta) -> None:
        """Take the uploads in their order, and how often the last of them is due."""
        self.uploads = uploads
        self._url = url
        self._patience = max(_PATIENCE_SECONDS, 2 * every.total_seconds())
        self._backoff = Backoff(_FIRST, _LONGEST)
        self._runs = self._hurries = False
        self._changed = threading.Condition()
        self._current_at = float("-inf")
        """When the last round began that found everything uploaded."""
        self._reason: str | None = None
        self.failures = 0
        self._bug: BaseException | None = None
        self.thread = PeriodicThread(f"storage-{uploads[-1].kind}", self.step, ended=self._ended)

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
        self.thread.start()

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
            self._changed.wait_for(lambda: self._current_at >= asked or not self._is_running, deadline.left)
            return self._current_at >= asked

    def hurry(self) -> None:
        """Shorten the pauses after failures from now on."""
        self._hurries = True
        self.thread.wake()

    def step(self) -> float:
        """Advance all uploads once, and return the seconds until the next time. Called by the thread."""
        begin, current, error = time.monotonic(), True, None
        for uploads in self.uploads:
            try:
                current &= uploads.advance()
            except (OSError, StorageError) as exc:
                current, error = False, exc
        if not self.thread.stopping:
            self._record(error)
        with self._changed:
            self._current_at = begin if current else self._current_at
            self._changed.notify_all()
        if error is None:
            return _POLL_SECONDS
        return min(self._backoff.next(), _HURRY_SECONDS) if self._hurries else self._backoff.next()

    @property
    def _is_running(self) -> bool:
        return self._runs and not self.thread.stopping

    def _ended(self, exc: BaseException) -> None:
        if not isinstance(exc, SecondLearnerError):  # `Lease.check` ends the learner
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


class Mirror(Extension, ErasedCopies):
    """The uploads of a learner, in threads. Ends the learner once another one has taken the lease."""

    name: ClassVar[str] = "storage"

    def __init__(
        self,
        lease: Lease,
        url: str,
        erasures: ErasureUpload,
        versions: VersionUploads | None = None,
        checkpoints: CheckpointUploads | None = None,
        every: tuple[timedelta, timedelta] = (timedelta(0), timedelta(0)),
    ) -> None:
        """Prepare to upload; `start` starts the threads.

        Args:
            lease: is checked between steps.
            url: as messages may have it.
            erasures: the upload of the log.
            versions: the uploads of versions; None where the learner writes them there.
            checkpoints: likewise.
            every: how often versions and checkpoints are written.
        """
        self._lease = lease
        self.url = url
        self._erasures = erasures
        self._checkpoints = checkpoints
        first: list[Uploads] = [erasures] if versions is None else [erasures, versions]
        self.threads = [UploadThread(first, url, every[0])]
        if checkpoints is not None:
            self.threads.append(UploadThread([checkpoints], url, every[1]))

    def start(self) -> None:
        """Start the threads."""
        for thread in self.threads:
            thread.start()

    @override
    def close(self) -> None:
        for thread in self.threads:
            thread.thread.stop()

    @override
    def run_if_due(self) -> None:
        self._lease.check()
        for thread in self.threads:
            thread.raise_bug()

    @property
    @override
    def problems(self) -> Sequence[str]:
        return [problem for thread in self.threads if (problem := thread.problem) is not None]

    @property
    @override
    def warnings(self) -> Sequence[str]:
        return [warning for thread in self.threads if (warning := thread.warning) is not None]

    @override
    def report(self) -> Mapping[str, Any]:
        uploads = [each for thread in self.threads for each in thread.uploads]
        report = StorageReport(
            url=self.url,
            lag_seconds={each.kind: each.lag_seconds for each in uploads},
            uploaded_bytes=sum(each.uploaded_bytes for each in uploads),
            failures=sum(thread.failures for thread in self.threads),
        )
        return {"storage": report}

    @override
    def erase_through(self, through: int) -> None:
        if self._checkpoints is not None:
            self._checkpoints.erase(through)

    @override
    def has_erased(self, through: int) -> bool:
        clean = self._checkpoints is None or self._checkpoints.is_clean_of(through)
        return clean and self._erasures.is_current()

    @override
    def published(self, number: int) -> None:
        self.threads[0].thread.wake()

    @override
    def finish(self, deadline: Deadline) -> None:
        asked = time.monotonic()
        for thread in self.threads:
            thread.hurry()
        for thread in self.threads:
            if not thread.finish(deadline, asked):
                kinds = " or ".join(uploads.kind for uploads in thread.uploads)
                log.warning("%s lacks the newest %s, which the next start with this state_dir uploads", self.url, kinds)


def open_mirror(
    held: LeasedStorage,
    state_dir: Path,
    versions: VersionsSettings,
    checkpoints: CheckpointSettings,
    erased: int,
    needed: Callable[[], Collection[int] | None],
) -> Mirror:
    """Return the uploads of a learner, whose threads run.

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
        mirror = Mirror(lease, bucket.url, erasures)
    else:
        keep = versions.keep + versions.keep_hourly
        mirror = Mirror(
            lease,
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
    mirror.start()
    return mirror
