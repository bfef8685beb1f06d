"""The hot swap: replace the served version without interrupting requests.

A separate thread watches the versions directory, loads, checks and warms up a version, then assigns one reference.
Requests that hold the old version are answered by it; the last of them frees it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np

from anabranch.core.failures import Failure, failure_of
from anabranch.core.tracing.spans import record
from anabranch.learner.errors import VersionError
from anabranch.learner.stream.record_times import RecordTimes
from anabranch.learner.versions.format import RegistryState, Versions
from anabranch.serving.errors import ConflictError, RequestError, UnavailableError
from anabranch.serving.fleet.commands import FleetCommand, FleetCommands
from anabranch.serving.metrics import Ages, ServingMetrics
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import ServedVersion
from anabranch.serving.rollout.candidate_loader import CandidateLoader, Problems
from anabranch.serving.rollout.commands import RolloutCommand, pin, promote, roll_back
from anabranch.serving.rollout.directory_watcher import DirectoryWatcher
from anabranch.serving.rollout.eligibility import ServingPolicy
from anabranch.serving.rollout.state_file import StateFile

log = logging.getLogger("anabranch.serving")

_REMEMBERED = 100
_SERVING = (promote, roll_back, pin)
"""Commands after which their version is served."""


_MOST_TIMES = 32
_MOST_VERSIONS = 64


class FreshnessTracker:
    """Events learned by the versions since the served one. Used by the swap's thread."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._newest_read: int | None = None
        self._learned: dict[int, RecordTimes] = {}

    def read_new(self, numbers: list[int]) -> None:
        """Read the newly learned events of new versions, before those may be superseded and deleted.

        Versions that exist at the first call are skipped: they waited for this process to start.
        """
        if self._newest_read is None:
            self._newest_read = max(numbers, default=0)
        for number in numbers:
            if number > self._newest_read:
                self._newest_read = number
                self._read(number)

    def served(self, number: int, now: float) -> tuple[int, Ages]:
        """Return how many events version `number` is the first served one to have learned, and their ages at `now`."""
        bag = RecordTimes()
        for older in [older for older in self._learned if older <= number]:
            bag.join(self._learned.pop(older))
        ages = now - bag.quantiles(_MOST_TIMES)[::-1] / 1000
        return bag.rows, np.maximum(0.0, ages)

    def _read(self, number: int) -> None:
        try:
            learned = self._versions.manifest(number).learned
        except (VersionError, OSError):  # reported when it is to be served
            return
        if learned is None:
            return
        bag = self._learned[number] = RecordTimes()
        bag.add(np.array(learned.times_ms, np.int64), learned.rows)
        if len(self._learned) > _MOST_VERSIONS:
            first, second = sorted(self._learned)[:2]
            self._learned[second].join(self._learned.pop(first))


class VersionSwapper:
    """Keeps `current` the newest version that may be served; a context manager around its thread.

    A version may be served when its verdict is pass or inconclusive, it has the configured schema and model, its
    learner had not lost its lock, and it lowers `trained_through` on no partition of the same incarnation that its
    learner reads. When the served version fails, is rolled back or turns out to be a stale learner's, the newest that
    may be served replaces it, whatever that lowers. Rollout commands override all this.
    """

    def __init__(
        self,
        deployment: Deployment,
        max_batch: int,
        metrics: ServingMetrics,
        on_swap: Callable[[], object],
        on_error: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
        server: str | None = None,
        is_idle: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepare to watch; entering the context starts the thread.

        Args:
            deployment: what is served.
            max_batch: rows of the largest batch, for warm-up.
            metrics: counts swaps and refusals.
            on_swap: called in the swap's thread after each swap.
            on_error: called in the swap's thread with the exception that ended it.
            clock: times the retries of versions that could not be loaded.
            server: the id of this server in a fleet. Where versions come from an object store, rollout commands are
                for all its servers.
            is_idle: returns whether no request waits or runs; called in the swap's thread.
        """
        self.current: ServedVersion | None = None
        self.since: float | None = None
        """When `current` was swapped in."""
        self.recently_served: deque[int] = deque(maxlen=_REMEMBERED)
        """The newest versions that were swapped in, the served one last."""
        self._versions = deployment.versions
        self._fleet: FleetCommands | None = None
        if server is not None and deployment.storage is not None:
            self._fleet = FleetCommands(deployment.storage, deployment.versions, server)
        self._freshness = FreshnessTracker(deployment.versions)
        self._metrics = metrics
        self._on_swap = on_swap
        self._on_error = on_error
        self._policy = ServingPolicy(self._versions)
        self._problems = Problems()
        self._loader = CandidateLoader(deployment, max_batch, metrics, self._policy, self._problems, clock, is_idle)
        self._retries = self._loader.retries
        self._state = StateFile(self._versions, self._policy)
        self._stale: set[int] = set()
        self._lock = threading.Lock()
        self._watcher = DirectoryWatcher(self._versions.path)
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="serving-swap", daemon=True)

    def __enter__(self) -> Self:
        self._watcher.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._watcher.wake()
        self._thread.join()
        self._watcher.__exit__(kind, error, trace)

    @property
    def problems(self) -> list[str]:
        """One sentence for each thing that is wrong with the versions; empty when all is well."""
        return self._problems.sentences

    @property
    def refused(self) -> dict[int, str]:
        """The newest versions that were refused, with the reason; replaced, never changed."""
        return self._loader.refused

    @property
    def state(self) -> RegistryState:
        """The contents of `state.json` at the last poll."""
        return self._state.contents

    def poll(self) -> bool:
        """Swap in the version that is to be served now, and return whether the served version changed.

        Called by the swap's thread, or by a test that has not started it.
        """
        with self._lock:
            return self._poll()

    def apply(self, command: RolloutCommand, number: int) -> None:
        """Apply a rollout command at once. Any thread but the event loop's may call this.

        Raises:
            NotFoundError: there is no such version.
            ConflictError: another command contradicts it, or the version cannot be served; nothing has changed then.
            UnavailableError: the device was lost, and the process is about to end; or the state directory or the
                object store of the fleet cannot be reached, and nothing has changed.
        """
        fleet = self._fleet.begin(number, served=command in _SERVING) if self._fleet is not None else None
        with self._lock:
            try:
                with self._state.changing():
                    served = self._apply(command, number, fleet)
            except (OSError, RuntimeError, VersionError) as exc:
                if failure_of(exc) is Failure.DEVICE:
                    log.exception("the device is lost")
                    self._on_error(exc)
                    raise UnavailableError("the device of this server has failed; it is about to start again") from exc
                if isinstance(exc, RuntimeError):
                    raise
                if failure_of(exc) is Failure.AWAY:
                    raise UnavailableError(f"the rollout command cannot be saved for now: {exc}") from exc
                raise ConflictError(f"the rollout command cannot be saved: {exc}") from exc
        log.info("rollout command: %s version %d; %s is served", command.__name__.replace("_", " "), number, served)

    def _apply(self, command: RolloutCommand, number: int, fleet: FleetCommand | None) -> int | None:
        """Apply a command here, then to the fleet, and return the served version; undo it where that fails."""
        before, numbers = self._versions.state(), self._versions.numbers()
        if fleet is not None:
            before, numbers = fleet.rollout.applied_to(before), [*fleet.numbers]
        after = command(before, number, numbers)
        self._versions.write_state(after)
        try:
            self._poll()
        except RuntimeError:  # else the next process would load the version that cost this one its device
            self._versions.write_state(before)
            raise
        served = self.current.number if self.current else None
        try:
            if command in _SERVING and served != number:
                why = self._retries.reason_of(number) or self.refused.get(number, "see the log")
                raise ConflictError(f"version {number} cannot be served: {why}")
            if fleet is not None:
                fleet.commit(after)
        except RequestError:
            self._versions.write_state(before)
            self._poll()
            raise
        return served

    def _poll(self) -> bool:
        swapped = self._choose()
        if (reason := self._retries.reason) is None:
            self._problems.remove("away")
        else:
            self._problems.set("away", f"a version cannot be loaded for now, and is tried again: {reason}")
        return swapped

    def _choose(self) -> bool:
        served = self.current.number if self.current else -1
        numbers = self._versions.numbers()
        self._freshness.read_new(numbers)
        self._loader.keep(numbers.__contains__)
        if self._state.read():
            self._loader.clear()
        self._stale = self._versions.stale(numbers) - {self.state.promoted, self.state.pinned}
        if (pinned := self.state.pinned) is not None:
            self._retries.keep(lambda number: number == pinned and number in numbers)
            swapped = served != pinned and self._try(pinned, back=True)
            if not swapped and served != pinned:
                self._problems.set("pinned", f"version {pinned} is pinned, and cannot be served")
            return swapped
        self._problems.remove("pinned")
        stays = served == -1 or self._stays(served)
        if stays:
            self._problems.remove("withdrawn")
        self._retries.keep(lambda number: number in numbers and (number > served or not stays))
        for number in reversed(numbers):
            if stays and number <= served:
                return False
            if number != served and self._try(number, back=number < served or not stays):
                return True
        if not stays:
            self._problems.set("withdrawn", f"version {served} is withdrawn, and there is no other that may be served")
        return False

    def _try(self, number: int, *, back: bool) -> bool:
        """Swap in a version if it may be served and can be loaded, and return whether it was.

        `back`: it may have learned less than the served version.
        """
        served, began = None if back or self.current is None else self.current.manifest, time.perf_counter()
        version = self._loader.load(number, self.state, self._stale, served)
        if version is not None:
            self._take(version)
            record("swap", time.perf_counter() - began, {"anabranch.version": number})
        return version is not None

    def _stays(self, served: int) -> bool:
        try:
            return served not in self._stale and self._policy.may_stay(served, self.state)
        except (VersionError, OSError):  # an unreadable verdict does not withdraw the served version
            return True

    def _watch(self) -> None:
        """Poll until the context ends; the body of the swap's thread."""
        try:
            while not self._stopping:
                try:
                    self._watcher.follow()
                    self.poll()
                    self._problems.remove("directory")
                    with self._lock:
                        pause = self._retries.next()
                except OSError as exc:
                    self._problems.set("directory", f"cannot list the versions in {self._versions.path}: {exc}")
                    pause = None
                if not self._stopping:
                    self._watcher.wait(pause)
        except BaseException as exc:  # the top of a thread
            log.exception("the swap's thread ended")
            self._on_error(exc)

    def _take(self, version: ServedVersion) -> None:
        """Make a version the served one. A crash before step 3 leaves a stale `state.json` until the next swap.

        1. Assign one reference: it answers requests that arrive from now on.
        2. Wake the requests that wait for it.
        3. Write `state.json`: the learner keeps the versions named there.
        """
        self.since = time.time()
        previous, self.current = self.current, version
        self.recently_served.append(version.number)
        self._on_swap()
        self._problems.remove("version", "withdrawn", "pinned")
        back = previous is not None and version.number < previous.number
        self._loader.keep(lambda number: number > version.number and not back)
        self._retries.keep(lambda number: number > version.number)
        self._metrics.swap("rolled_back" if back else "swapped")
        self._metrics.version.set(version.number)
        self._metrics.observe_freshness(*self._freshness.served(version.number, self.since))
        log.info("serving version %d, trained through %s", version.number, version.trained_through or "nothing")
        self._write_state(previous, version)

    def _write_state(self, previous: ServedVersion | None, version: ServedVersion) -> None:
        try:
            self._state.swapped(previous.number if previous else None, version.number)
            self._problems.remove("state")
        except (OSError, VersionError) as exc:
            self._problems.set("state", f"cannot write {self._versions.path}/state.json: {exc}")
