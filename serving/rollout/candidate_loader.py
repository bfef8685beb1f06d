"""Loads candidates: versions that may replace the served one."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta

from anabranch.learner.device.out_of_memory import free_cached_memory
from anabranch.learner.errors import VersionError
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.versions.format import Manifest, RegistryState
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import ServedVersion, load_version
from anabranch.serving.rollout.eligibility import ServingPolicy, lowered, misfit, requirements_of
from anabranch.serving.rollout.load_retry import Retries, may_pass

log = logging.getLogger("anabranch.serving")

_REMEMBERED = 20


_LONGEST_WAIT = timedelta(milliseconds=250)
_POLL = timedelta(milliseconds=1)
_TURN = timedelta(microseconds=200)
"""How long the thread may run between two rests."""
_REST = timedelta(microseconds=20)


class IdleWait:
    """Waits until no request waits or runs, at most `most` in all its calls together: versions are served under any
    load.

    A request that has just arrived counts as waiting once the event loop's thread has the interpreter's lock, for which
    it would wait up to the 5 ms of `sys.getswitchinterval`. So the thread that loads rests regularly: while it sleeps,
    any other thread gets the lock and the core.
    """

    def __init__(
        self,
        is_idle: Callable[[], bool],
        limit: timedelta = _LONGEST_WAIT,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._is_idle = is_idle
        self._left = limit.total_seconds()
        self._clock = clock
        self._sleep = sleep
        self._rested = clock()

    def __call__(self) -> None:
        """Return once no request waits or runs, or the time is over."""
        begin = self._clock()
        if self._left <= 0:
            return
        if begin - self._rested >= _TURN.total_seconds():
            self._sleep(_REST.total_seconds())
        elif self._is_idle():
            return
        while not self._is_idle() and self._clock() - begin < self._left:
            self._sleep(_POLL.total_seconds())
        self._rested = self._clock()
        self._left -= self._rested - begin


class Problems:
    """What is wrong with the versions, one sentence for each subject."""

    def __init__(self) -> None:
        self._sentences: dict[str, str] = {}

    @property
    def sentences(self) -> list[str]:
        """All sentences; empty when all is well."""
        return list(self._sentences.values())

    def set(self, subject: str, sentence: str) -> None:
        """Set the sentence of a subject; log it when it changes."""
        if self._sentences.get(subject) != sentence:
            self._sentences[subject] = sentence
            log.warning("%s", sentence)

    def remove(self, *subjects: str) -> None:
        """Remove the sentences of these subjects."""
        for subject in subjects:
            self._sentences.pop(subject, None)


class CandidateLoader:
    """Loads versions that may be served. Used by one thread at a time.

    A version that does not fit or is damaged is refused until its files change. A version that cannot be read for now,
    or for which there is not enough memory, is tried again with a back-off, without a limit.
    """

    def __init__(
        self,
        deployment: Deployment,
        max_batch: int,
        metrics: ServingMetrics,
        policy: ServingPolicy,
        problems: Problems,
        clock: Callable[[], float],
        is_idle: Callable[[], bool],
    ) -> None:
        """`max_batch` is the number of rows of the largest batch, for warm-up; `clock` times the retries. `is_idle`
        returns whether no request waits or runs."""
        self.refused: dict[int, str] = {}
        """The newest versions that were refused, with the reason; replaced, never changed."""
        self.retries = Retries(clock)
        self._deployment = deployment
        self._versions = deployment.versions
        self._bases = bases_in(deployment.state_dir)
        self._max_batch = max_batch
        self._is_idle = is_idle
        self._metrics = metrics
        self._policy = policy
        self._problems = problems
        self._requirements = requirements_of(deployment.schema, deployment.model)
        self._unsuitable: dict[int, object] = {}
        """The stamp of the files of each version that was refused or withheld."""

    def keep(self, condition: Callable[[int], bool]) -> None:
        """Allow refused and withheld versions again unless their number fulfils a condition."""
        self._unsuitable = {number: stamp for number, stamp in self._unsuitable.items() if condition(number)}

    def clear(self) -> None:
        """Allow all versions again, at once."""
        self._unsuitable.clear()
        self.retries.clear()

    def load(self, number: int, state: RegistryState, stale: set[int], served: Manifest | None) -> ServedVersion | None:
        """Return a version, warmed up; None if it may not be served, or cannot be loaded for now.

        Args:
            number: of the version.
            state: the contents of `state.json`.
            stale: versions whose learner had lost its lock.
            served: of the version that it may not fall behind; None if it may have learned less.
        """
        if self.retries.waits(number):
            return None
        version, stamp = None, None
        try:
            stamp = self._versions.stamp(number), self._bases.stamp()
            if self._unsuitable.get(number, ()) == stamp:
                self.retries.remove(number)
                return None
            if self._policy.may_take(number, state):
                manifest = self._versions.manifest(number)
                self._check(manifest, number, stale, served)
                if self.retries.reason_of(number) is not None:
                    free_cached_memory(self._deployment.device)
                wait = IdleWait(self._is_idle) if self._deployment.device.type == "cpu" else bool
                version = load_version(self._deployment, manifest, self._max_batch, wait)
        except (VersionError, OSError, RuntimeError, MemoryError) as exc:
            if may_pass(exc):
                self.retries.failed(number, str(exc) if isinstance(exc, VersionError) else f"version {number}: {exc}")
                return None
            self._refuse(number, str(exc))
        self.retries.remove(number)
        if version is None:
            self._unsuitable[number] = stamp
        return version

    def _check(self, manifest: Manifest, number: int, stale: set[int], served: Manifest | None) -> None:
        if manifest.number != number:
            raise VersionError(f"version {number}: its manifest is that of version {manifest.number}")
        if (reason := misfit(manifest, self._requirements)) is not None:
            raise VersionError(f"version {number}: {reason}")
        if number in stale:
            raise VersionError(
                f"version {number}: its learner's generation {manifest.generation} is over, a later one has begun"
            )
        if served is not None and (lower := lowered(served, manifest)) is not None:
            name, before, after = lower
            raise VersionError(f"version {number}: it has learned {name} up to {after}, but {before} is served")

    def _refuse(self, number: int, reason: str) -> None:
        """Report a refusal, and keep the newest ones."""
        if number not in self._versions.numbers():  # the learner has just deleted it
            return
        self._metrics.swap("refused")
        self._problems.set("version", f"a version is refused: {reason}")
        self.refused = dict([*self.refused.items(), (number, reason)][-_REMEMBERED:])
