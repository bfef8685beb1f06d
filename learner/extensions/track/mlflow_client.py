"""MLflow by its own client: a run for the curves of each start of the learner, and the registry of models.

The only module that imports the client, which bounds neither the bytes of an answer, after it is unpacked, nor the time
of all of it: see `client.py`.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.learner.errors import TrackerError, TrackerRefusedError
from anabranch.learner.extensions.track.process import Opening, Point, Registration
from anabranch.learner.extensions.track.run_clients import TrackerClient, brief, needs_tracker

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # no request to others than the server of the settings
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # `TrackerExtension` retries
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Settings of the client, which it takes from the environment alone; those of the user come first."""
_REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST", "INVALID_STATE"}
_EXISTS = "RESOURCE_ALREADY_EXISTS"
_ABSENT = "RESOURCE_DOES_NOT_EXIST"
_IDENTITY = "anabranch.identity"
_MOST_METRICS = 1000
"""Metrics of one request; MLflow refuses more."""
_UNUSABLE = re.compile(r"[^\w\-. /:]")
"""Characters that MLflow refuses in names of metrics."""
_MOST_BYTES = 256 << 20
"""Memory that answers may take."""
_LONGEST_NUMBER = 200


class MlflowClient(TrackerClient):
    """The runs of an experiment, and a registered model. Its methods make requests, may take long, and be repeated."""

    longest_answers: ClassVar[int | None] = _MOST_BYTES

    def __init__(self, opening: Opening) -> None:
        """Import the client, and connect to nothing.

        Raises:
            SettingsError: the client is not installed, or it refuses `url`.
        """
        settings = self.settings_of(opening)
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        with needs_tracker("mlflow"):  # which takes a second
            import mlflow
            from mlflow.exceptions import MlflowException
        self._error: type[Exception] = MlflowException
        self.location = settings.url
        try:
            self._client = mlflow.MlflowClient(settings.url, settings.url)
        except MlflowException as exc:
            raise SettingsError(f'track.url = "{settings.url}": {brief(exc)}') from exc
        self._model = settings.registered_model or opening.model
        self._alias = settings.alias
        self._source = opening.source
        self._run = opening.run
        self._run_id: str | None = None
        self._experiment_id: str | None = None
        self._has_model = False

    @override
    def log(self, points: list[Point]) -> None:
        with self._errors(f"curves cannot be sent to {self.location}"):
            if self._run_id is None:
                tags = {f"anabranch.{name}": value for name, value in self._run.facts.items()}
                name, time = self._run.name, points[0].time
                self._run_id = self._run_of(self._open(), name, time, {**tags, _IDENTITY: name})
            self._log(self._run_id, points)

    @override
    def end(self) -> None:
        if self._run_id is not None:
            with self._errors(f"the run {self._run.name} cannot be ended at {self.location}"):
                self._client.set_terminated(self._run_id)

    def register(self, version: Registration) -> str:
        """Register a version, unless it is registered already, and return the number that it has in MLflow.

        A crash after any step is no harm: the next attempt finds what there is by the identity.

        1. The experiment and the registered model, once.
        2. A run with the version's numbers.
        3. The model version, which names the run.

        Raises:
            TrackerError: it failed, and may succeed later.
            TrackerRefusedError: it would fail again.
        """
        with self._errors(f"version {version.number} cannot be registered at {self.location}"):
            experiment = self._open()
            self._open_model()
            run = self._run_of_version(experiment, version)
            for found in self._client.search_model_versions(f"run_id = '{run}'"):
                if found.name == self._model:
                    return _short(found.version)
            made = self._client.create_model_version(
                self._model,
                self._source.replace("{number}", str(version.number)),
                run,
                tags=version.tags,
                description=f"Version {version.number} of {version.tags['anabranch.pipeline']}",
                await_creation_for=0,
            )
            return _short(made.version)

    def move_alias(self, registered: str) -> None:
        """Let the alias name a registered version; raises as `register` does."""
        with self._errors(
            f"the alias {self._alias} cannot be moved to {self._model} {registered} at {self.location}", _ABSENT
        ):
            self._client.set_registered_model_alias(self._model, self._alias, registered)

    def tag(self, registered: str, key: str, value: str) -> None:
        """Set a tag of a registered version; raises as `register` does."""
        with self._errors(f"{self._model} {registered} cannot be tagged at {self.location}", _ABSENT):
            self._client.set_model_version_tag(self._model, registered, key, value)

    def _open(self) -> str:
        """Return the id of the experiment; make it where there is none."""
        if self._experiment_id is None:
            found = self._client.get_experiment_by_name(self._run.project)
            self._experiment_id = (
                str(found.experiment_id) if found is not None else self._client.create_experiment(self._run.project)
            )
        return self._experiment_id

    def _open_model(self) -> None:
        """Make the registered model where there is none."""
        if not self._has_model:
            try:
                self._client.create_registered_model(self._model)
            except self._error as exc:
                if getattr(exc, "error_code", None) != _EXISTS:
                    raise
            self._has_model = True

    def _run_of(self, experiment: str, name: str, time: float, tags: dict[str, str]) -> str:
        """Return the id of the run with the same identity, which is made where there is none."""
        found = self._client.search_runs([experiment], f"tags.`{_IDENTITY}` = '{tags[_IDENTITY]}'", max_results=1)
        run: Any = (
            found[0] if found else self._client.create_run(experiment, _milliseconds(time), tags=tags, run_name=name)
        )
        return str(run.info.run_id)

    def _run_of_version(self, experiment: str, version: Registration) -> str:
        """Return the id of the run with the numbers of a version."""
        run = self._run_of(
            experiment, f"version {version.number}", version.time, {**version.tags, _IDENTITY: version.identity}
        )
        self._log(run, [Point(version.step, version.time, version.metrics)])
        self._client.set_terminated(run, end_time=_milliseconds(version.time))
        return run

    def _log(self, run: str, points: Iterable[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_UNUSABLE.sub("_", name), value, _milliseconds(point.time), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(run, metrics[first : first + _MOST_METRICS])

    @contextlib.contextmanager
    def _errors(self, what: str, *refusals: str) -> Iterator[None]:
        """Translate errors; those with a code of `refusals`, too, are not tried again."""
        try:
            yield
        except Exception as exc:  # the client raises anything about an answer that it does not understand
            if _lacks_memory(exc):
                raise TrackerError(f"{what}: an answer needs more than {_MOST_BYTES >> 20} MB") from exc
            if not isinstance(exc, self._error):
                unusable = "" if isinstance(exc, OSError) else f"an answer cannot be used: {type(exc).__name__}: "
                raise TrackerError(f"{what}: {unusable}{brief(exc)}") from exc
            self._experiment_id, self._run_id, self._has_model = None, None, False  # they may have been deleted
            code = getattr(exc, "error_code", None)
            kind = TrackerRefusedError if code in {*_REFUSALS, *refusals} else TrackerError
            raise kind(f"{what}: {brief(exc)}") from exc


def _lacks_memory(exc: BaseException | None) -> bool:
    """Return whether an error is due to too little memory; the client raises its own about it."""
    while exc is not None:
        if isinstance(exc, MemoryError):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def _short(number: object) -> str:
    """Return the number of a registered version, which is kept."""
    if len(text := str(number)) > _LONGEST_NUMBER:
        raise ValueError(f"a version has a number of {len(text)} characters")
    return text


def _milliseconds(time: float) -> int:
    return round(time * 1000)
