"""The hot swap: replace the served version without interrupting requests.

A separate thread watches the versions directory, loads, checks and warms up a version, then assigns one reference.
Requests that hold the old version are answered by it; the last of them frees it.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import msgspec

from learner.errors import VersionError
from learner.state_dir.version import Manifest, RegistryState, reference_to
from serving.errors import ConflictError
from serving.metrics import ServingMetrics
from serving.model.deployment import Deployment
from serving.model.loaded_version import ServedVersion, load_version
from serving.rollout.commands import RolloutCommand, pin, promote, roll_back
from serving.rollout.directory_watcher import DirectoryWatcher
from serving.rollout.eligibility import Requirements, ServingPolicy, lowered, misfit
from serving.rollout.freshness import FreshnessTracker
from serving.rollout.load_retry import Retries, may_pass

log = logging.getLogger("anabranch.serving")

_REMEMBERED = 20
_MOST_ROLLED_BACK = 1000


class VersionSwapper:
    """Keeps `current` the newest version that may be served; a context manager around its thread.

    A version may be served when its verdict is pass or inconclusive, it has the configured schema and model, its
    learner had not lost its lock, and it lowers `trained_through` on no partition of the same incarnation that its
    learner reads. When the served version fails, is rolled back or turns out to be a stale learner's, the newest that
    may be served replaces it, whatever that lowers. Rollout commands override all this.

    A version that does not fit or is damaged is refused until its files change. A version that cannot be read for now,
    or for which there is not enough memory, is tried again with a back-off, without a limit.
    """

    def __init__(
        self,
        deployment: Deployment,
        max_batch: int,
        metrics: ServingMetrics,
        on_swap: Callable[[], object],
        on_error: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to watch; entering the context starts the thread.

        Args:
            deployment: what is served.
            max_batch: rows of the largest batch, for warm-up.
            metrics: counts swaps and refusals.
            on_swap: called in the swap's thread after each swap.
            on_error: called in the swap's thread with the exception that ended it.
            clock: times the retries of versions that could not be loaded.
        """
        self.current: ServedVersion | None = None
        self.since: float | None = None
        """When `current` was swapped in."""
        self.recently_served: deque[int] = deque(maxlen=5 * _REMEMBERED)
        """The newest versions that were swapped in, the served one last."""
        self.refused: dict[int, str] = {}
        """The newest versions that were refused, with the reason; replaced, never changed."""
        self._deployment = deployment
        self._versions = deployment.versions
        self._max_batch = max_batch
        self._freshness = FreshnessTracker(deployment.versions)
        self._metrics = metrics
        self._on_swap = on_swap
        self._on_error = on_error
        self._policy = ServingPolicy(self._versions)
        self._requirements = Requirements(deployment.schema.digest, reference_to(deployment.model))
        self._state = RegistryState()
        self._passed_over: dict[int, object] = {}
        self._retries = Retries(clock)
        self._stale: set[int] = set()
        self._lock = threading.Lock()
        self._holds_state = False
        self._problems: dict[str, str] = {}
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
        return list(self._problems.values())

    @property
    def state(self) -> RegistryState:
        """The contents of `state.json` at the last poll."""
        return self._state

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
        """
        with self._lock:
            try:
                with self._changing_state():
                    before = self._versions.state()
                    after = command(before, number, self._versions.numbers())
                    self._versions.write_state(after)
                    self._poll()
                    served = self.current.number if self.current else None
                    if command in (promote, roll_back, pin) and served != number:
                        why = self._retries.reason_of(number) or self.refused.get(number, "see the log")
                        self._versions.write_state(before)
                        self._poll()
                        raise ConflictError(f"version {number} cannot be served: {why}")
            except (OSError, VersionError) as exc:
                raise ConflictError(f"the rollout command cannot be saved: {exc}") from exc
        log.info("rollout command: %s version %d; %s is served", command.__name__.replace("_", " "), number, served)

    @contextlib.contextmanager
    def _changing_state(self) -> Iterator[None]:
        """Lock `state.json` against other workers while it is read and written; may be nested."""
        if self._holds_state:
            yield
            return
        with self._versions.changing_state():
            self._holds_state = True
            try:
                yield
            finally:
                self._holds_state = False

    def _poll(self) -> bool:
        swapped = self._choose()
        if (reason := self._retries.reason) is None:
            self._problems.pop("away", None)
        else:
            self._set_problem("away", f"a version cannot be loaded for now, and is tried again: {reason}")
        return swapped

    def _choose(self) -> bool:
        served = self.current.number if self.current else -1
        numbers = self._versions.numbers()
        self._freshness.read_new(numbers)
        self._passed_over = {number: self._passed_over[number] for number in numbers if number in self._passed_over}
        self._read_state()
        self._stale = self._versions.stale(numbers) - {self._state.promoted, self._state.pinned}
        if (pinned := self._state.pinned) is not None:
            self._retries.keep(lambda number: number == pinned and number in numbers)
            swapped = served != pinned and self._try(pinned, back=True)
            if not swapped and served != pinned:
                self._set_problem("pinned", f"version {pinned} is pinned, and cannot be served")
            return swapped
        self._problems.pop("pinned", None)
        stays = served == -1 or self._stays(served)
        if stays:
            self._problems.pop("withdrawn", None)
        self._retries.keep(lambda number: number in numbers and (number > served or not stays))
        for number in reversed(numbers):
            if stays and number <= served:
                return False
            if number != served and self._try(number, back=number < served or served in self._stale):
                return True
        if not stays:
            self._set_problem("withdrawn", f"version {served} is withdrawn, and there is no other that may be served")
        return False

    def _try(self, number: int, *, back: bool) -> bool:
        """Swap in a version if it may be served and can be loaded, and return whether it was.

        A refused version is tried again when its files change, one that cannot be loaded for now after its back-off.
        `back`: it may have learned less than the served version.
        """
        if self._retries.waits(number):
            return False
        version, stamp = None, None
        try:
            stamp = self._versions.stamp(number)
            if self._passed_over.get(number, ()) == stamp:
                self._retries.remove(number)
                return False
            version = self._load(number, back=back)
        except (VersionError, OSError, RuntimeError, MemoryError) as exc:
            if may_pass(exc):
                self._retries.failed(number, str(exc) if isinstance(exc, VersionError) else f"version {number}: {exc}")
                return False
            self._refuse(number, str(exc))
        self._retries.remove(number)
        if version is None:
            self._passed_over[number] = stamp
            return False
        self._take(version)
        return True

    def _stays(self, served: int) -> bool:
        try:
            return served not in self._stale and self._policy.may_stay(served, self._state)
        except (VersionError, OSError):  # an unreadable verdict does not withdraw the served version
            return True

    def _read_state(self) -> None:
        try:
            state = self._policy.state()
        except (OSError, VersionError):  # reported when it is written
            return
        if (state.pinned, state.promoted, state.rolled_back) != (
            *(self._state.pinned, self._state.promoted, self._state.rolled_back),
        ):
            self._passed_over.clear()
            self._retries.clear()
        self._state = state

    def _watch(self) -> None:
        """Poll until the context ends; the body of the swap's thread."""
        try:
            while not self._stopping:
                try:
                    self._watcher.follow()
                    self.poll()
                    self._problems.pop("directory", None)
                    with self._lock:
                        pause = self._retries.next()
                except OSError as exc:
                    self._set_problem("directory", f"cannot list the versions in {self._versions.path}: {exc}")
                    pause = None
                if not self._stopping:
                    self._watcher.wait(pause)
        except Exception as exc:
            log.exception("the swap's thread ended")
            self._on_error(exc)

    def _load(self, number: int, *, back: bool) -> ServedVersion | None:
        """Load a version; None when the gate or a rollout command withholds it."""
        if not self._policy.may_take(number, self._state):
            return None
        manifest = self._versions.manifest(number)
        self._check(manifest, number, back=back)
        return load_version(self._deployment, manifest, self._max_batch)

    def _check(self, manifest: Manifest, number: int, *, back: bool) -> None:
        if manifest.number != number:
            raise VersionError(f"version {number}: its manifest is that of version {manifest.number}")
        if (reason := misfit(manifest, self._requirements)) is not None:
            raise VersionError(f"version {number}: {reason}")
        if number in self._stale:
            raise VersionError(
                f"version {number}: its learner's generation {manifest.generation} is over, a later one has begun"
            )
        if self.current is None or back:
            return
        if (lower := lowered(self.current.manifest, manifest)) is not None:
            name, before, after = lower
            raise VersionError(f"version {number}: it has learned {name} up to {after}, but {before} is served")

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
        self._problems.pop("version", None)
        for about in ("withdrawn", "pinned"):
            self._problems.pop(about, None)
        back = previous is not None and version.number < previous.number
        self._passed_over = {
            number: stamp for number, stamp in self._passed_over.items() if number > version.number and not back
        }
        self._retries.keep(lambda number: number > version.number)
        self._metrics.swap("rolled_back" if back else "swapped")
        self._metrics.version.set(version.number)
        self._metrics.observe_freshness(*self._freshness.served(version.number, self.since))
        log.info("serving version %d, trained through %s", version.number, version.trained_through or "nothing")
        self._write_state(previous, version)

    def _write_state(self, previous: ServedVersion | None, version: ServedVersion) -> None:
        try:
            with self._changing_state():
                before = self._versions.state()
                state = _served(before, previous.number if previous else None, version.number)
                if state != before:
                    self._versions.write_state(state)
            self._state = state
            self._problems.pop("state", None)
        except (OSError, VersionError) as exc:
            self._set_problem("state", f"cannot write {self._versions.path}/state.json: {exc}")

    def _refuse(self, number: int, reason: str) -> None:
        """Report a refusal, and keep the newest ones."""
        if number not in self._versions.numbers():  # the learner has just deleted it
            return
        self._metrics.swap("refused")
        self._set_problem("version", f"a version is refused: {reason}")
        self.refused = dict([*self.refused.items(), (number, reason)][-_REMEMBERED:])

    def _set_problem(self, about: str, sentence: str) -> None:
        """Set a sentence of the report; log it when it changes."""
        if self._problems.get(about) != sentence:
            self._problems[about] = sentence
            log.warning("%s", sentence)


def _served(state: RegistryState, previous: int | None, number: int) -> RegistryState:
    """Return the state after a process swapped from `previous` (None: it has just started) to a version.

    Another worker may have written the same state before, or be ahead.
    """
    forward = previous is not None and number > previous
    if forward and state.serving is not None and state.serving > number and state.pinned is None:
        return state
    back = previous is not None and number < previous and state.pinned is None
    rolled_back = sorted({*state.rolled_back, previous}) if back and previous is not None else state.rolled_back
    if state.serving == number:  # already written, or a restart
        previous = state.previous
    elif previous is None:
        previous = state.serving
    return msgspec.structs.replace(
        state, serving=number, previous=previous, rolled_back=rolled_back[-_MOST_ROLLED_BACK:]
    )
