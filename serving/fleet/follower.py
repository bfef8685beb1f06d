"""Follows the versions of a learner on another host, through an object store.

One thread for all workers of a host polls the head, and copies versions into the local versions directory, as the
learner of the same host would publish them: the swap takes them from there. No request waits for it.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Self

from anabranch.core.backoff import Backoff
from anabranch.core.errors import AnabranchError
from anabranch.core.failures import DamagedError
from anabranch.core.object_store.bucket import BucketAwayError
from anabranch.core.periodic_thread import PeriodicThread
from anabranch.learner.object_storage.fleet import FleetRollout
from anabranch.learner.object_storage.head import BucketHead, HeadReader
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.versions.format import Verdict, Versions
from anabranch.serving.fleet.damaged_versions import DamagedVersions
from anabranch.serving.fleet.version_cache import VersionCache

_LEAST_COPIES = 2
"""Versions that are copied to a host that has none: the second is served where the newest cannot be."""


class CopyChoice:
    """Chooses by verdicts and by the decisions of the fleet. Used by one thread."""

    def __init__(self, cache: VersionCache, server: str, damaged: DamagedVersions) -> None:
        """Prepare to choose for the server with this id."""
        self._cache = cache
        self._server = server
        self._damaged = damaged
        self._verdicts: dict[int, tuple[str | None, Verdict | None]] = {}
        """The verdict of each version of the head, after its digest there."""

    def keep(self, numbers: Collection[int]) -> None:
        """Drop the verdicts of other versions, so that they are read again."""
        self._verdicts = {number: each for number, each in self._verdicts.items() if number in numbers}

    def next_copy(self, head: BucketHead, complete: set[int], rollout: FleetRollout) -> int | None:
        """Return the version to copy next: one that a person has chosen, or the newest that may be served."""
        for number in (rollout.pinned, rollout.promoted):
            is_missing = number is not None and number in head.versions and number not in complete
            if number is not None and is_missing and not self._damaged.waits(number):
                return number
        usable = 0
        for number in sorted(head.versions, reverse=True):
            waits = number not in complete and self._damaged.waits(number)
            if waits or not self.may_be_served(number, head, rollout):
                continue
            if number not in complete and (usable == 0 or len(complete & head.versions.keys()) < _LEAST_COPIES):
                return number
            usable += 1
            if usable == _LEAST_COPIES:
                break
        return None

    def may_be_served(self, number: int, head: BucketHead, rollout: FleetRollout) -> bool:
        """Return whether this server may serve a version."""
        is_candidate = number in head.versions and number not in rollout.rolled_back
        if not is_candidate or not rollout.allows(number, self._server):
            return False
        verdict = self._verdict(number, head)
        return verdict is not None and (verdict.verdict != "fail" or number == rollout.promoted)

    def judge(self, head: BucketHead, complete: set[int], rollout: FleetRollout) -> None:
        """Write the verdicts of local versions: one that has failed is withdrawn, one without a verdict not served.

        What this server may not serve any more is withdrawn once it has another version: a former canary, and versions
        of a learner whose state was lost, whose numbers are above those of the next one.
        """
        has_other = any(each == rollout.pinned or self.may_be_served(each, head, rollout) for each in complete)
        for number in sorted(complete):
            verdict = self._verdict(number, head) if number in head.versions else None
            allowed = rollout.allows(number, self._server) and number <= max(head.versions, default=number)
            if verdict is not None and (allowed or verdict.verdict == "fail"):
                self._cache.judge(number, verdict)
            elif not allowed and has_other:
                self._cache.withdraw(number)

    def _verdict(self, number: int, head: BucketHead) -> Verdict | None:
        digest = head.verdicts.get(number)
        before = self._verdicts.get(number)
        if before is None or before[0] != digest:
            verdict = None
            with self._damaged.catching(number):
                verdict = self._cache.read_verdict(number, head.versions[number])
            before = self._verdicts[number] = digest, verdict
        return before[1]


POLL_EVERY = timedelta(seconds=0.25)
_PATIENCE = timedelta(seconds=5)
"""An object store that is away for less than this is no problem."""
_LONGEST_PAUSE = timedelta(seconds=10)
_MOST_MANIFESTS = 32
"""Of versions that were published while this one was copied: their events count for freshness."""

log = logging.getLogger("anabranch.serving")


class VersionFollower:
    """Copies the newest version that may be served; a context manager around its thread.

    A version that is superseded before it is copied is skipped, but for its manifest. One that is damaged is tried
    again later, and the next one copied. The object store may be away: the versions that are here go on being served.
    """

    def __init__(
        self,
        storage: StorageSettings,
        versions: Versions,
        server: str,
        rollout: Callable[[], FleetRollout | None],
        on_error: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to follow; entering the context starts the thread.

        Args:
            storage: the object store.
            versions: the local versions directory.
            server: id of this server.
            rollout: returns the decisions of the fleet; None until they were read, and nothing is copied until then.
            on_error: called with the exception that ended the thread.
            clock: measures the lag.
        """
        quick = storage.quick_bucket
        self._reader, self._url = HeadReader(quick), quick.url
        self._cache = VersionCache(storage.bucket, versions)
        self._versions = versions
        self._rollout = rollout
        self._on_error = on_error
        self._clock = clock
        self._backoff = Backoff(POLL_EVERY, _LONGEST_PAUSE)
        self._checked: set[tuple[int, int]] = set()
        """Local versions that are those of the head, and the generation that wrote them."""
        self._damaged = DamagedVersions(clock)
        self._choice = CopyChoice(self._cache, server, self._damaged)
        self._damage: str | None = None
        self._seen: dict[int, float] = {}
        """When the versions that are not here were first seen in the head."""
        self._idle_at: tuple[BucketHead, FleetRollout] | None = None
        """With which head and decisions there was nothing left to copy."""
        self._failed_since: float | None = None
        self._sentence: str | None = None
        self._is_clean = False
        # A download may take long, and leaves nothing behind.
        self._thread = PeriodicThread("serving-follower", self._follow, POLL_EVERY, ended=self._ended)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.stop()

    @property
    def problems(self) -> list[str]:
        """One sentence when the versions cannot be followed. Any thread may ask."""
        since, sentence = self._failed_since, self._sentence
        is_long = since is not None and self._clock() - since >= _PATIENCE.total_seconds()
        away = [sentence] if sentence is not None and is_long else []
        return away if self._damage is None else [*away, self._damage]

    @property
    def lag_seconds(self) -> float:
        """For how long there has been a version that is not here; while the head cannot be read, since it could be.

        Any thread may ask. Measured by the clock of this host alone.
        """
        since = min(self._seen.copy().values(), default=None)
        begins = [begin for begin in (since, self._failed_since) if begin is not None]
        return self._clock() - min(begins) if begins else 0.0

    def poll(self) -> bool:
        """Copy the next due version, and return whether one was copied. Used by the thread, or by a test.

        Raises:
            OSError: the object store cannot be reached, or the copy cannot be written.
            AnabranchError: the head cannot be used.
        """
        self._reader.poll()
        head, rollout = self._reader.contents, self._rollout()
        if head is None:
            raise BucketAwayError(f"no learner has written to {self._url} yet")
        is_idle = (head, rollout) == self._idle_at and not self._damaged.is_due()
        if rollout is None or is_idle:
            return False
        with self._cache.locked():
            copied = self._update(head, rollout)
        self._idle_at = None if copied else (head, rollout)
        return copied

    def _update(self, head: BucketHead, rollout: FleetRollout) -> bool:
        """Copy at most one version."""
        self._remove_others(head)
        local = set(self._cache.numbers())
        complete = {number for number in local if self._cache.is_complete(number)}
        newest = max((number for number in complete if number in head.versions), default=0)
        self._watch(head, newest)
        self._choice.judge(head, complete, rollout)
        number = self._choice.next_copy(head, complete, rollout)
        self._drop_seen(number, newest)
        while number is not None and not self._copy(number, local, head):
            number = self._choice.next_copy(head, complete, rollout)
        if number is not None:
            complete.add(number)
            self._choice.judge(head, complete, rollout)
            self._seen = {each: since for each, since in self._seen.items() if each > number}
            self._cache.prune(self._versions.state(), max(head.versions), {number, rollout.pinned, rollout.promoted})
        usable = max((each for each in complete if self._choice.may_be_served(each, head, rollout)), default=0)
        self._damage = self._damaged.sentence(usable, (rollout.pinned, rollout.promoted))
        return number is not None

    def _copy(self, number: int, local: set[int], head: BucketHead) -> bool:
        """Copy a version, and the manifests of those that it supersedes; return whether it can be used."""
        first = max(local, default=number - 1)
        for each in [each for each in sorted(head.versions) if first < each < number][-_MOST_MANIFESTS:]:
            with contextlib.suppress(DamagedError, FileNotFoundError):
                self._add(each, local, head)
        with self._damaged.catching(number):
            self._add(number, local, head)
            self._cache.complete(number, head.versions[number], head.bases)
            self._damaged.remove(number)
        return not self._damaged.waits(number)

    def _add(self, number: int, local: set[int], head: BucketHead) -> None:
        if number not in local:
            self._cache.add(number, head.versions[number])
            local.add(number)
            self._checked.add((number, head.versions[number]))

    def _remove_others(self, head: BucketHead) -> None:
        """Delete local versions that a power cut has damaged, or whose number another learner has used again."""
        self._damaged.keep(head.versions)
        again = self._damaged.take_due()
        self._choice.keep(head.versions.keys() - again)
        self._checked = {each for each in self._checked if head.versions.get(each[0]) == each[1]}
        for number in self._cache.numbers():
            generation = head.versions.get(number)
            if generation is None or (number, generation) in self._checked or self._damaged.waits(number):
                continue
            with self._damaged.catching(number):
                if not self._cache.is_intact(number, generation):
                    self._cache.delete(number)
                self._checked.add((number, generation))

    def _watch(self, head: BucketHead, newest: int) -> None:
        now = self._clock()
        self._seen = {number: self._seen.get(number, now) for number in head.versions if number > newest}

    def _drop_seen(self, due: int | None, newest: int) -> None:
        """Drop versions that are not to be served here, so that they are no lag."""
        limit = max(newest, due or 0, self._damaged.latest())
        self._seen = {number: since for number, since in self._seen.items() if number <= limit}

    def _follow(self) -> float:
        try:
            if not self._is_clean:
                self._cache.clean()
                self._is_clean = True
            pause = 0.0 if self.poll() else POLL_EVERY.total_seconds()
        except (OSError, AnabranchError) as exc:
            self._fail(exc)
            return self._backoff.next()
        self._backoff.reset()
        self._failed_since = self._sentence = None
        return pause

    def _ended(self, exc: BaseException) -> None:
        log.error("the follower's thread ended", exc_info=exc)
        self._on_error(exc)

    def _fail(self, exc: Exception) -> None:
        if self._failed_since is None:
            self._failed_since = self._clock()
            log.warning("new versions cannot be followed for now: %s", exc)
        self._sentence = f"new versions cannot be followed: {exc}"
