"""Registers the versions that serve with MLflow, in a thread: no step and no request waits for the registry.

Lineage is registered as tags, numbers as metrics.
"""

import hashlib
import logging
import re
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import msgspec
from typing_extensions import override

from anabranch.core.atomic_files import replace_file
from anabranch.core.backoff import Backoff
from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file
from anabranch.core.periodic_thread import PeriodicThread
from anabranch.learner.errors import RegistrationError, RegistrationRefusedError, VersionError
from anabranch.learner.extension import Extension
from anabranch.learner.extensions.mlflow.registry import MlflowRegistry, Registration
from anabranch.learner.settings.mlflow import MlflowSettings
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.versions.format import WEIGHTS, Manifest, RegistryState, Verdict, Versions

NAME = "mlflow.json"
WITHDRAWN = "anabranch.withdrawn"
_POLL_EVERY = timedelta(seconds=1)
_FIRST_BACKOFF, _LONGEST_BACKOFF = timedelta(seconds=1), timedelta(minutes=5)
_LONGEST_END = timedelta(seconds=1)
_MOST_WAITING = 256
_REMEMBERED = 1000
"""Registered versions whose number in the registry is kept: serving may go back to them."""
_LONGEST_TAG = 4_000
"""Characters; MLflow refuses longer values."""
_UNUSABLE = re.compile(r"[^\w\-. /:]")
"""Characters that MLflow refuses in names of metrics."""

log = logging.getLogger(__name__)


class RegistrarState(msgspec.Struct):
    """The contents of `mlflow.json`."""

    waiting: list[Registration] = []
    """Versions that served and are not registered yet, the oldest first."""
    registered: dict[int, str] = {}
    """The number in the registry of each of our versions, in the order of registration; empty: it was left out."""
    withdrawn: list[int] = []
    """Versions that are tagged as withdrawn."""


class Registrar(Extension):
    """Watches what serves, and registers it, in a thread.

    What waits is in `mlflow.json`, so that it survives restarts. What has been sent is found again in the registry.
    """

    name: ClassVar[str] = "mlflow"

    def __init__(
        self,
        registry: MlflowRegistry,
        versions: Versions,
        pipeline: str,
        served: Callable[[RegistryState], RegistryState] = lambda own: own,
        count: Callable[[str], object] = bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to watch; nothing is registered before `thread` is started.

        Args:
            registry: where to register.
            versions: those of the pipeline.
            pipeline: its name.
            served: adds to `state.json` what servers on other hosts serve and have decided.
            count: counts a version that was "registered", or left out: "queue", "refused" or "gone".
            clock: times retries.
        """
        self._registry = registry
        self._versions = versions
        self._pipeline = pipeline
        self._served_by_all = served
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
        self._warning: str | None = None
        self.thread = PeriodicThread("mlflow", self._run, _LONGEST_END, ended=self._ended)

    @property
    @override
    def warning(self) -> str | None:
        return self._warning

    @override
    def close(self) -> None:
        self.thread.stopping = True
        self._registry.close()
        self.thread.stop()  # a request that hangs does not delay the end

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
            if self.thread.stopping:
                return
            self._retry_at = self._clock() + self._backoff.next()
            if self._warning is None:
                log.warning("%s; it is tried again", exc)
            self._warning = str(exc)
        else:
            self._backoff.reset()
            self._warning = None
        self._save()

    def _watch(self) -> None:
        """Add each version that has served since the last time to those that wait."""
        try:
            own = self._versions.state()
        except (VersionError, OSError):  # serving writes the file, and reports its problems
            return
        self._served = self._served_by_all(own)
        known = {each.number for each in self._state.waiting} | self._state.registered.keys()
        for number in dict.fromkeys([*self._served.recent, own.serving]):
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
            self._state.waiting.append(registration_of(self._pipeline, manifest, verdict))
            if len(self._state.waiting) > _MOST_WAITING:
                oldest = self._state.waiting.pop(0).number
                self._leave_out(oldest, "queue", f"version {oldest} is not registered: {_MOST_WAITING} others wait")

    def _send(self) -> None:
        """Register what waits, oldest first, then move the alias, then tag what was withdrawn.

        `state.json` names the newest versions alone, so it is read again after each request, however long that took.
        """
        state = self._state
        for _ in range(len(state.waiting)):
            if self.thread.stopping:
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
        if self._served is None or self.thread.stopping:
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
                self._warning = f"{self._path} cannot be written: {exc.strerror or exc}"

    def _run(self) -> float:
        self.poll()
        return _POLL_EVERY.total_seconds()

    def _ended(self, exc: BaseException) -> None:
        log.error("versions are not registered any more", exc_info=exc)
        self._warning = f"versions are not registered in MLflow any more, after a bug: {exc}"


def registration_of(name: str, manifest: Manifest, verdict: Verdict | None) -> Registration:
    """Return what is registered of a version of the pipeline `name`."""
    weights = manifest.files[WEIGHTS]
    identity = hashlib.sha256(f"{name}/{manifest.number}/{manifest.generation}/{weights}".encode()).hexdigest()
    model = hashlib.sha256(msgspec.json.encode(manifest.model, order="deterministic")).hexdigest()
    tags = {
        "pipeline": name,
        "version": str(manifest.number),
        "identity": identity,
        "generation": str(manifest.generation),
        "parent": "" if manifest.parent is None else str(manifest.parent),
        "step": str(manifest.step),
        "trained_through": ",".join(f"{at}={each.offset}" for at, each in sorted(manifest.trained_through.items())),
        "seen_through": ",".join(f"{at}={offset}" for at, offset in sorted((manifest.seen_through or {}).items())),
        "rows": "" if manifest.learned is None else str(manifest.learned.rows),
        "schema_sha256": manifest.schema,
        "model_factory": manifest.model.factory,
        "model_sha256": model,
        "weights_sha256": weights,
        "base_sha256": manifest.base or "",
        "measure": manifest.measure,
        "verdict": "" if verdict is None else verdict.verdict,
        "verdict_reasons": "" if verdict is None else "; ".join(verdict.reasons),
    }
    numbers = {f"constant.{key}": value for key, value in manifest.constant.items()}
    if verdict is not None:
        numbers |= {f"gate.{key}": value for key, value in verdict.numbers.items()}
    return Registration(
        number=manifest.number,
        identity=identity,
        step=manifest.step,
        time=manifest.time,
        tags={f"anabranch.{key}": value[:_LONGEST_TAG] for key, value in tags.items() if value},
        metrics={_UNUSABLE.sub("_", key): value for key, value in {**manifest.metrics, **numbers}.items()},
    )


def open_registrar(
    settings: MlflowSettings,
    pipeline: str,
    versions: Versions,
    url: str | None,
    served: Callable[[RegistryState], RegistryState],
    metrics: LearnerMetrics,
) -> Registrar:
    """Return a registrar whose thread runs.

    Args:
        settings: `[mlflow]`.
        pipeline: its name.
        versions: those of the pipeline.
        url: of the object store that has them too; None without one.
        served: adds to `state.json` what servers on other hosts serve and have decided.
        metrics: count the versions.
    """
    folder = f"anabranch://{pipeline}.{socket.gethostname()}{versions.path.parent.resolve()}"
    source = settings.source or f"{folder if url is None else url.rstrip('/')}/versions/{{number}}"
    registrar = Registrar(
        MlflowRegistry(settings, pipeline, source),
        versions,
        pipeline,
        served,
        count=lambda outcome: metrics.mlflow_versions.labels(outcome).inc(),
    )
    metrics.mlflow_waiting.set_function(lambda: registrar.waiting)
    registrar.thread.start()
    return registrar
