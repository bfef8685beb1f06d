"""Registers the versions that serve, in a thread: no step and no request waits for the registry."""

import logging
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Protocol, Self

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.backoff import Backoff
from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file
from learner.errors import RegistrationError, RegistrationRefusedError, VersionError
from learner.registration.lineage import Registration, registration_of
from learner.state_dir.version import RegistryState, Versions

NAME = "mlflow.json"
WITHDRAWN = "anabranch.withdrawn"
_POLL_EVERY = timedelta(seconds=1)
_FIRST_BACKOFF, _LONGEST_BACKOFF = timedelta(seconds=1), timedelta(minutes=5)
_LONGEST_END = timedelta(seconds=1)
_MOST_WAITING = 256
_REMEMBERED = 1000
"""Registered versions whose number in the registry is kept: serving may go back to them."""

log = logging.getLogger(__name__)


class Registry(Protocol):
    """What `MlflowRegistry` does; the errors are those of the methods of `mlflow_client.py`."""

    def register(self, version: Registration) -> str:
        """Register a version once, and return the number that it has in the registry."""
        ...

    def move_alias(self, registered: str) -> None:
        """Let the alias name a registered version."""
        ...

    def tag(self, registered: str, key: str, value: str) -> None:
        """Set a tag of a registered version."""
        ...

    def close(self) -> None:
        """End what is being asked, and ask nothing any more. Any thread may call this."""
        ...


class RegistrarState(msgspec.Struct):
    """The contents of `mlflow.json`."""

    waiting: list[Registration] = []
    """Versions that served and are not registered yet, the oldest first."""
    registered: dict[int, str] = {}
    """The number in the registry of each of our versions, in the order of registration; empty: it was left out."""
    withdrawn: list[int] = []
    """Versions that are tagged as withdrawn."""


class Registrar:
    """Watches what serves, and registers it; a context manager around its thread.

    What waits is in `mlflow.json`, so that it survives restarts. What has been sent is found again in the registry.
    """

    def __init__(
        self,
        registry: Registry,
        versions: Versions,
        name: str,
        state: Callable[[RegistryState], RegistryState] = lambda own: own,
        serving: Callable[[], Collection[int]] = tuple,
        count: Callable[[str], object] = bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to watch; entering the context starts the thread.

        Args:
            registry: where to register.
            versions: those of the pipeline.
            name: of the pipeline.
            state: adds to `state.json` what servers on other hosts decided.
            serving: returns the versions of servers on other hosts.
            count: counts a version that was "registered", or left out: "queue", "refused" or "gone".
            clock: times retries.
        """
        self._registry = registry
        self._versions = versions
        self._name = name
        self._state_of_fleet = state
        self._serving = serving
        self._count = count
        self._clock = clock
        self._path: Path = versions.path.parent / NAME
        self._state = self._read()
        self._written = msgspec.json.encode(self._state)
        self._served: RegistryState | None = None
        self._alias: int | None = None
        """The version that the alias names; not in the file, since a learner on another host may move it."""
        self._backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF)
        self._retry_at = 0.0
        self._wake = threading.Event()
        self._stopping = False
        self.warning: str | None = None
        """One sentence while the registry cannot be reached. Any thread may ask."""
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._registry.close()
        self._wake.set()
        self._thread.join(_LONGEST_END.total_seconds())  # a request that hangs does not delay the end

    @property
    def waiting(self) -> int:
        """How many versions wait to be registered. Any thread may ask."""
        return len(self._state.waiting)

    def poll(self) -> None:
        """Add what serves to what waits, and send what is due. Used by the thread, or by a test."""
        self._watch()
        self._save()
        if self._clock() < self._retry_at:
            return
        try:
            self._send()
        except RegistrationError as exc:
            if self._stopping:
                return
            self._retry_at = self._clock() + self._backoff.next()
            if self.warning is None:
                log.warning("%s; it is tried again", exc)
            self.warning = str(exc)
        else:
            self._backoff.reset()
            self.warning = None
        self._save()

    def _watch(self) -> None:
        """Add each version that has served since the last time to those that wait."""
        try:
            own = self._versions.state()
        except (VersionError, OSError):  # serving writes the file, and reports its problems
            return
        self._served = self._state_of_fleet(own)
        known = {each.number for each in self._state.waiting} | self._state.registered.keys()
        for number in dict.fromkeys([*own.recent, own.serving, *self._serving()]):
            if number is None or number in known:
                continue
            known.add(number)
            try:
                manifest, verdict = self._versions.manifest(number), self._versions.verdict(number)
            except VersionError as exc:
                self._leave_out(number, "gone", f"version {number} cannot be registered: {exc}")
                continue
            except OSError:  # for now; the next poll tries again
                continue
            self._state.waiting.append(registration_of(self._name, manifest, verdict))
            if len(self._state.waiting) > _MOST_WAITING:
                oldest = self._state.waiting.pop(0).number
                self._leave_out(oldest, "queue", f"version {oldest} is not registered: {_MOST_WAITING} others wait")

    def _send(self) -> None:
        """Register what waits, oldest first, then move the alias, then tag what was withdrawn.

        `state.json` names the newest versions alone, so it is read again after each request, however long that took.
        """
        state = self._state
        for _ in range(len(state.waiting)):
            if self._stopping:
                return
            version = state.waiting[0]
            try:
                state.registered[version.number] = self._registry.register(version)
            except RegistrationRefusedError as exc:
                self._leave_out(version.number, "refused", str(exc))
            else:
                self._count("registered")
            state.waiting.pop(0)
            self._watch()
            self._save()
        if self._served is None or self._stopping:
            return
        serving = self._served.serving
        if serving is not None and serving != self._alias and (registered := state.registered.get(serving)):
            self._unless_refused(lambda: self._registry.move_alias(registered))
            self._alias = serving
        for number, reason in self._withdrawn(self._served).items():
            self._unless_refused(lambda n=number, why=reason: self._registry.tag(state.registered[n], WITHDRAWN, why))  # type: ignore[misc]
            state.withdrawn.append(number)

    def _unless_refused(self, request: Callable[[], None]) -> None:
        try:
            request()
        except RegistrationRefusedError as exc:
            log.warning("%s", exc)

    def _withdrawn(self, served: RegistryState) -> dict[int, str]:
        """Return the registered versions that were withdrawn and are not tagged yet, with the reason."""
        found: dict[int, str] = {}
        for number in [n for n, registered in self._state.registered.items() if registered]:
            if number in self._state.withdrawn:
                continue
            if number in served.rolled_back:
                found[number] = "rolled back"
            elif number in (served.previous, *served.recent):
                try:
                    verdict = self._versions.verdict(number)
                except (VersionError, OSError):
                    continue
                if verdict is not None and verdict.verdict == "fail" and number != served.promoted:
                    found[number] = "; ".join(verdict.reasons) or "failed"
        return found

    def _leave_out(self, number: int, reason: str, sentence: str) -> None:
        log.warning("%s", sentence)
        self._state.registered[number] = ""
        self._count(reason)

    def _read(self) -> RegistrarState:
        try:
            return decoded(read_file(self._path, MOST_BYTES), RegistrarState)
        except FileNotFoundError:
            return RegistrarState()
        except (OSError, DamagedError) as exc:
            log.warning("%s cannot be read, so that versions that waited are not registered: %s", self._path, exc)
            return RegistrarState()

    def _save(self) -> None:
        state = self._state
        while len(state.registered) > _REMEMBERED:
            del state.registered[next(iter(state.registered))]
        state.withdrawn = [number for number in state.withdrawn if number in state.registered]
        content = msgspec.json.encode(state)
        if content != self._written:
            try:
                replace_file(self._path, content)
                self._written = content
            except OSError as exc:
                self.warning = f"{self._path} cannot be written: {exc.strerror or exc}"

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.poll()
            except Exception as exc:
                log.exception("versions are not registered any more")
                self.warning = f"versions are not registered in MLflow any more, after a bug: {exc}"
                return
            self._wake.wait(_POLL_EVERY.total_seconds())
