"""`python -m anabranch.learner.extensions.mlflow.mlflow_client`: the registry of MLflow, by its own client.

The only module that imports the client, which bounds neither the bytes of an answer, after it is unpacked, nor the time
of all of it. So it runs in a separate process, with bounded memory: see `registry.py`, which starts it. Each line of
stdin is a call, each line of stdout its answer. It ends with stdin, as when the learner ends.
"""

import contextlib
import os
import queue
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.learner.errors import RegistrationError, RegistrationRefusedError
from anabranch.learner.extensions.mlflow.registry import ERRORS, Answer, Call, Opening, Registration
from anabranch.learner.settings.mlflow import MlflowSettings

_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",  # no request to others than the server of the settings
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # `Registrar` retries
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
_MILLISECONDS = 1000
_MOST_BYTES = 256 << 20
"""Memory that answers may take."""
_LONGEST_NUMBER = 200
_LONGEST_ERROR = 500


class MlflowClientRegistry:
    """A registered model. Its methods make requests, may take long, and may be repeated: used by one thread."""

    def __init__(self, settings: MlflowSettings, name: str, source: str) -> None:
        """Import the client, and connect to nothing; `name` is the pipeline's, `source` a URL with `{number}` in it.

        Raises:
            SettingsError: the client is not installed, or it refuses `tracking_uri`.
        """
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        with needs("[mlflow]", "mlflow-skinny", "mlflow", "take the section out"):  # which takes a second
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        self._error: type[Exception] = MlflowException
        self.location = settings.tracking_uri
        try:
            self._client: MlflowClient = MlflowClient(settings.tracking_uri, settings.tracking_uri)
        except MlflowException as exc:
            raise SettingsError(f'mlflow.tracking_uri = "{settings.tracking_uri}": {_brief(exc)}') from exc
        self._model = settings.registered_model or name
        self._experiment = settings.experiment or name
        self._alias = settings.alias
        self._source = source
        self._experiment_id: str | None = None
        self._has_model = False

    def register(self, version: Registration) -> str:
        """Register a version, unless it is registered already, and return the number that it has in MLflow.

        A crash after any step is no harm: the next attempt finds what there is by the identity.

        1. The experiment and the registered model, once.
        2. A run with the version's numbers.
        3. The model version, which names the run.

        Raises:
            RegistrationError: it failed, and may succeed later.
            RegistrationRefusedError: it would fail again.
        """
        with self._errors(f"version {version.number} cannot be registered at {self.location}"):
            experiment = self._open()
            run = self._run(experiment, version)
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

    def close(self) -> None:
        """Do nothing: its process ends."""

    def _open(self) -> str:
        """Return the id of the experiment; make it and the registered model where there are none."""
        if self._experiment_id is None:
            found = self._client.get_experiment_by_name(self._experiment)
            self._experiment_id = (
                str(found.experiment_id) if found is not None else self._client.create_experiment(self._experiment)
            )
        if not self._has_model:
            try:
                self._client.create_registered_model(self._model)
            except self._error as exc:
                if getattr(exc, "error_code", None) != _EXISTS:
                    raise
            self._has_model = True
        return self._experiment_id

    def _run(self, experiment: str, version: Registration) -> str:
        """Return the id of the run of a version, which is made where there is none."""
        from mlflow.entities import Metric

        found = self._client.search_runs([experiment], f"tags.`{_IDENTITY}` = '{version.identity}'", max_results=1)
        milliseconds = round(version.time * _MILLISECONDS)
        run: Any = (
            found[0]
            if found
            else self._client.create_run(
                experiment, milliseconds, tags=version.tags, run_name=f"version {version.number}"
            )
        )
        identity = str(run.info.run_id)
        if run.info.status != "FINISHED":
            metrics = [Metric(name, value, milliseconds, version.step) for name, value in version.metrics.items()]
            self._client.log_batch(identity, metrics[:_MOST_METRICS])
            self._client.set_terminated(identity, end_time=milliseconds)
        return identity

    @contextlib.contextmanager
    def _errors(self, what: str, *refusals: str) -> Iterator[None]:
        """Translate errors; those with a code of `refusals`, too, are not tried again."""
        try:
            yield
        except Exception as exc:  # the client raises anything about an answer that it does not understand
            if _lacks_memory(exc):
                raise RegistrationError(f"{what}: an answer needs more than {_MOST_BYTES >> 20} MB") from exc
            if not isinstance(exc, self._error):
                unusable = "" if isinstance(exc, OSError) else f"an answer cannot be used: {type(exc).__name__}: "
                raise RegistrationError(f"{what}: {unusable}{_brief(exc)}") from exc
            self._experiment_id, self._has_model = None, False  # they may have been deleted
            code = getattr(exc, "error_code", None)
            kind = RegistrationRefusedError if code in {*_REFUSALS, *refusals} else RegistrationError
            raise kind(f"{what}: {_brief(exc)}") from exc


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


def _brief(exc: Exception) -> str:
    return " ".join(str(exc)[:_LONGEST_ERROR].split())


def main() -> NoReturn:
    """Answer calls until stdin ends."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)  # perhaps during a request

    # What the client prints is no answer.
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    threading.Thread(target=read, name="stdin", daemon=True).start()
    registry: MlflowClientRegistry | None = None
    while True:
        call = msgspec.json.decode(lines.get(), type=Opening | Call)
        try:
            if isinstance(call, Opening):
                registry = MlflowClientRegistry(MlflowSettings.model_validate(call.settings), call.name, call.source)
                _bound_memory()
                answer = Answer()
            else:
                assert registry is not None
                answer = Answer(getattr(registry, call.method)(*call.arguments()))
        except tuple(ERRORS.values()) as exc:
            answer = Answer(error=str(exc), kind=type(exc).__name__)
        answers.write(msgspec.json.encode(answer) + b"\n")


def _bound_memory() -> None:
    """Let this process take no more than some memory beyond that which it has, where the system can bound it."""
    if sys.platform == "linux":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = taken + _MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
