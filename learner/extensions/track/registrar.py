"""Registers the versions that serve with MLflow: lineage as tags, numbers as metrics."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
from typing_extensions import override

from anabranch.core.atomic_files import replace_file
from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file
from anabranch.learner.errors import TrackerRefusedError, VersionError
from anabranch.learner.extensions.track.curves import Tracked
from anabranch.learner.extensions.track.process import Registration, Tracker
from anabranch.learner.versions.format import WEIGHTS, Manifest, RegistryState, Verdict, Versions

NAME = "mlflow.json"
WITHDRAWN = "anabranch.withdrawn"
_MOST_WAITING = 256
_REMEMBERED = 1000
"""Registered versions whose number in the registry is kept: serving may go back to them."""
_LONGEST_TAG = 4_000
"""Characters; MLflow refuses longer values."""
log = logging.getLogger(__name__)


class RegistrarState(msgspec.Struct):
    """The contents of `mlflow.json`."""

    waiting: list[Registration] = []
    """Versions that served and are not registered yet, the oldest first."""
    registered: dict[int, str] = {}
    """The number in the registry of each of our versions, in the order of registration; empty: it was left out."""
    withdrawn: list[int] = []
    """Versions that are tagged as withdrawn."""


class Registrar(Tracked):
    """Finds what serves, and registers it.

    What waits is in `mlflow.json`, so that it survives restarts. What has been sent is found again in the registry.
    """

    def __init__(
        self,
        registry: Tracker,
        versions: Versions,
        pipeline: str,
        served: Callable[[RegistryState], RegistryState] = lambda own: own,
        count: Callable[[str], object] = bool,
    ) -> None:
        """Register nothing yet.

        Args:
            registry: where to register.
            versions: those of the pipeline.
            pipeline: its name.
            served: adds to `state.json` what servers on other hosts serve and have decided.
            count: counts a version that was "registered", or left out: "queue", "refused" or "gone".
        """
        self._registry = registry
        self._versions = versions
        self._pipeline = pipeline
        self._served_by_all = served
        self._count = count
        self._path: Path = versions.path.parent / NAME
        self._state = self._read()
        self._written = msgspec.json.encode(self._state)
        self._served: RegistryState | None = None
        self._alias: int | None = None
        """The version that the alias names; not in the file, since a learner on another host may move it."""

    @property
    def waiting(self) -> int:
        """How many versions wait to be registered. Any thread may ask."""
        return len(self._state.waiting)

    @override
    def watch(self) -> None:
        """Add each version that has served since the last time to those that wait."""
        self._watch()
        self._save()

    def _watch(self) -> None:
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

    @override
    def send(self, is_stopping: Callable[[], bool]) -> None:
        """Register what waits, oldest first, then move the alias, then tag what was withdrawn.

        `state.json` names the newest versions alone, so it is read again after each request, however long that took.
        """
        state = self._state
        for _ in range(len(state.waiting)):
            if is_stopping():
                return
            version = state.waiting[0]
            try:
                state.registered[version.number] = self._registry.register(version)
            except TrackerRefusedError as exc:
                self._leave_out(version.number, "refused", str(exc))
            else:
                self._count("registered")
            state.waiting.pop(0)
            self._watch()
            self._save()
        if self._served is None or is_stopping():
            return
        serving = self._served.serving
        if serving is not None and serving != self._alias and (registered := state.registered.get(serving)):
            self._unless_refused(lambda: self._registry.move_alias(registered))
            self._alias = serving
        for number, reason in self._withdrawn(self._served).items():
            self._unless_refused(lambda n=number, why=reason: self._registry.tag(state.registered[n], WITHDRAWN, why))  # type: ignore[misc]
            state.withdrawn.append(number)
            self._save()

    def _unless_refused(self, request: Callable[[], None]) -> None:
        try:
            request()
        except TrackerRefusedError as exc:
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
                self.problem = None
            except OSError as exc:
                self.problem = f"{self._path} cannot be written: {exc.strerror or exc}"


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
        metrics={**manifest.metrics, **numbers},
    )
