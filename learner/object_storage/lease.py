"""One learner for each prefix of an object store: a lease, and the generation that grows with each holder.

Both are in `head.json`, which is only ever replaced under compare-and-swap, also to publish: a learner that was fenced
off cannot change it. A lease is renewed by writing the head; whether it still is renewed, a waiting learner finds by
its own monotonic clock (as in Gray and Cheriton 1989, without clocks that agree).
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import msgspec

from anabranch.core.backoff import Backoff
from anabranch.core.files import MOST_NUMBER
from anabranch.core.object_store.bucket import Bucket, BucketAwayError, ReplacedError
from anabranch.core.periodic_thread import PeriodicThread
from anabranch.learner.errors import SecondLearnerError, StorageError
from anabranch.learner.object_storage.head import HEAD, BucketHead, HeadReader

_RENEWALS = 4
"""Renewals within the time of a lease."""
_POLL_SECONDS = 0.25
_MOST_ATTEMPTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(milliseconds=20), timedelta(seconds=1)
"""Between attempts to replace a head that is another one each time."""
_STOP_PATIENCE = timedelta(seconds=3)
"""Longest wait for a request that is under way when the lease is released."""

log = logging.getLogger(__name__)


class PrefixOwner(NamedTuple):
    """The pipeline that a prefix belongs to."""

    name: str = ""
    topics: Sequence[str] = ()

    def check(self, head: BucketHead, url: str) -> None:
        """Raise StorageError where the head is that of another pipeline: of another name, or without a common topic."""
        other = f'pipeline "{head.pipeline}" of the topics {", ".join(head.topics)}'
        names = bool(self.name and head.pipeline) and self.name != head.pipeline
        if names or (self.topics and head.topics and not {*self.topics} & {*head.topics}):
            raise StorageError(f'{url} has the state of {other}; give "{self.name}" another storage.url')


NOBODY = PrefixOwner()


class Lease:
    """The head of a prefix while this learner holds it; a context manager that renews it. Used by several threads."""

    def __init__(self, bucket: Bucket, lease: timedelta, holder: str, owner: PrefixOwner = NOBODY) -> None:
        """Take the objects, `storage.lease`, the id of the state directory, whose lock is held, and the pipeline."""
        self._bucket = bucket
        self._every = lease.total_seconds() / _RENEWALS
        self._lease = lease
        self._holder, self._process, self._owner = holder, uuid.uuid4().hex, owner
        self._lock = threading.Lock()
        self._head: BucketHead | None = None
        self._tag: str | None = None
        self._fenced: SecondLearnerError | None = None
        self._bug: BaseException | None = None
        self._released = False
        self._thread: PeriodicThread | None = None
        self.away_since: float | None = None
        """Since when the lease could not be renewed, by `time.monotonic`; None while it is renewed."""

    @property
    def head(self) -> BucketHead:
        """The head as this learner wrote it last."""
        assert self._head is not None
        return self._head

    @property
    def generation(self) -> int:
        """The generation of this learner; it grows when a folder is written again."""
        return self.head.generation

    def acquire(self, known: int, stop: threading.Event | None = None) -> int:
        """Acquire the lease, and return the new generation.

        One that was released, or that a learner of the same state directory held, is taken at once: the lock of the
        state directory proves that it has ended. Another one is taken once it was not renewed for its time.

        Args:
            known: the latest generation of the state directory; the new one is larger.
            stop: ends the wait.

        Raises:
            SecondLearnerError: another learner renews it, or `stop` was set.
            BucketAwayError: the object store cannot be reached.
            StorageError: the head cannot be used, or is that of another pipeline.
        """
        reader = HeadReader(self._bucket)
        reader.poll()
        for attempt in _attempts(stop):
            head = reader.contents
            if head is not None:
                self._owner.check(head, self._bucket.url)
            if head is not None and not head.released and head.holder != self._holder:
                self._wait_silent(reader, stop)
                head = reader.contents
            try:
                self._head, self._tag = self._written(head, reader.tag, known)
            except ReplacedError as exc:  # another learner was quicker
                if attempt == _MOST_ATTEMPTS:
                    raise self._refusal(exc) from exc
                reader.poll()
                continue
            return self._head.generation
        raise SecondLearnerError(f"stopped while {self._bucket.url} was held by another learner")

    def check(self) -> None:
        """Raise SecondLearnerError once another learner has taken the lease, and a bug of the renewal."""
        if self._fenced is not None:
            raise self._fenced
        if self._bug is not None:
            raise self._bug

    def update(self, change: Callable[[BucketHead], BucketHead]) -> BucketHead:
        """Change the head, and return it; this renews the lease too.

        Args:
            change: returns the new head; may be called again after a reply was lost, with a head that has the change.

        Raises:
            SecondLearnerError: another learner has taken the lease.
            BucketAwayError: the object store cannot be reached; the change may appear later.
        """
        with self._lock:
            self.check()
            if self._released:
                raise BucketAwayError(f"the lease of {self._bucket.url} was released")
            for attempt in _attempts(None):
                assert self._head is not None
                assert self._tag is not None
                head = msgspec.structs.replace(change(self._head), beat=self._head.beat + 1)
                try:
                    self._tag = self._bucket.replace(HEAD, msgspec.json.encode(head), self._tag)
                except ReplacedError as exc:
                    if attempt == _MOST_ATTEMPTS:
                        raise self._refusal(exc) from exc
                    self._read_own()
                    continue
                self._head, self.away_since = head, None
                return head
        raise AssertionError

    def __enter__(self) -> "Lease":
        first = timedelta(seconds=self._every)
        self._thread = PeriodicThread("storage-lease", self._renew, _STOP_PATIENCE, first=first, ended=self._ended)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._thread.stop()
        if self.away_since is None and (self._thread is None or not self._thread.alive):
            with contextlib.suppress(SecondLearnerError, OSError):
                self.update(lambda head: msgspec.structs.replace(head, released=True))
        self._released = True

    def _wait_silent(self, reader: HeadReader, stop: threading.Event | None) -> None:
        """Wait until the head stayed the same for the time of a lease, or was released.

        One change begins the wait again: the last request of a learner that was killed may arrive late. A living one
        changes the head several times within a lease.
        """
        assert reader.contents is not None
        log.info(
            "the learner of another state_dir held %s last; waiting %g s for a sign of it",
            self._bucket.url,
            self._lease.total_seconds(),
        )
        beat, changes, end = reader.contents.beat, 0, time.monotonic() + self._lease.total_seconds()
        while time.monotonic() < end:
            if stop is not None and stop.wait(_POLL_SECONDS):
                raise SecondLearnerError(f"stopped while {self._bucket.url} was held by another learner")
            if stop is None:
                time.sleep(_POLL_SECONDS)
            reader.poll()
            if reader.contents is None or reader.contents.released:
                return
            if reader.contents.beat == beat:
                continue
            beat, changes, end = reader.contents.beat, changes + 1, time.monotonic() + self._lease.total_seconds()
            if changes > 1:
                raise SecondLearnerError(
                    f"another learner is at work in {self._bucket.url}; stop it first, or give this pipeline another "
                    "storage.url"
                )

    def _written(self, head: BucketHead | None, tag: str | None, known: int) -> tuple[BucketHead, str]:
        before = BucketHead(generation=known, holder=self._holder) if head is None else head
        if not 0 <= before.generation < MOST_NUMBER:
            raise StorageError(
                f"{self._bucket.url}/{HEAD} is of generation {before.generation}, which no learner writes; restore an "
                "earlier one, or use another storage.url"
            )
        new = msgspec.structs.replace(
            before,
            generation=max(before.generation, known) + 1,
            holder=self._holder,
            process=self._process,
            pipeline=self._owner.name or before.pipeline,
            topics=list(self._owner.topics) or before.topics,
            beat=before.beat + 1,
            released=False,
        )
        content = msgspec.json.encode(new)
        return new, self._bucket.create(HEAD, content) if tag is None else self._bucket.replace(HEAD, content, tag)

    def _refusal(self, exc: ReplacedError) -> BucketAwayError:
        return BucketAwayError(f"{exc}, {_MOST_ATTEMPTS} times in a row; does the store support conditional writes?")

    def _read_own(self) -> None:
        """Read the head again after it was not the expected one; raise SecondLearnerError if it is another learner's.

        It is this learner's when the reply to a write was lost.
        """
        reader = HeadReader(self._bucket)
        reader.poll()
        assert self._head is not None
        if reader.contents is None or reader.contents.process != self._process:
            self._fenced = SecondLearnerError(
                f"another learner has taken {self._bucket.url} since this one, of generation {self._head.generation}, "
                "last renewed its lease; this one ends"
            )
            raise self._fenced
        if reader.contents.beat < self._head.beat:
            raise BucketAwayError(f"{self._bucket.url}/{HEAD} was read as it had been before; it is read again later")
        self._head, self._tag = reader.contents, reader.tag

    def _renew(self) -> float:
        try:
            self.update(lambda head: head)
        except (OSError, StorageError) as exc:
            if self.away_since is None:
                self.away_since = time.monotonic()
                log.warning("the lease cannot be renewed for now: %s", exc)
        return self._every

    def _ended(self, exc: BaseException) -> None:
        if isinstance(exc, SecondLearnerError):
            log.error("%s", exc)
        else:  # a bug, which `check` raises
            self._bug = exc


def _attempts(stop: threading.Event | None) -> Iterator[int]:
    """Yield 1, 2 and so on up to the last attempt, after a pause that grows; end early when `stop` is set."""
    backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
    for attempt in range(1, _MOST_ATTEMPTS + 1):
        yield attempt
        pause = backoff.next()
        if stop is None:
            time.sleep(pause)
        elif stop.wait(pause):
            return
