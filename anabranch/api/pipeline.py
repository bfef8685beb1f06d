"""A pipeline of a `pipeline.toml`, from Python: its settings, what it has learned, and its processes."""

import contextlib
import json
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from anabranch.api.client import Client
from anabranch.api.schema import Schema
from anabranch.commands.status import read_status
from anabranch.config.loader import Config, load_config
from anabranch.config.pipeline import Pipeline as Settings
from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import state_errors
from anabranch.runtime.lifecycle import Exit
from anabranch.runtime.supervisor import Supervisor, pipeline_parts
from anabranch.serving.reporting.report import read_report

if TYPE_CHECKING:
    from anabranch.api.model import Model

_POLL_SECONDS = 0.1
_LAST_BYTES = 4_000
_OURS = "anabranch: "
"""Begins the line in which a process that ends by an error of ours says why."""


class Pipeline:
    """A pipeline by its settings, which are those of the commands in its folder. Used by one thread.

    Example:
        >>> with Pipeline.from_toml("mine/pipeline.toml") as pipeline:  # learner and serving run in the block
        ...     pipeline.status()["learner"].get("condition")
        'running'
    """

    def __init__(self, config: Config) -> None:
        """Take what was read; users call `from_toml`."""
        self._config = config
        self._stop, self._thread = threading.Event(), threading.Thread()
        self._supervisor: Supervisor | None = None
        self._ended: BaseException | Exit | None = None
        self._logs: dict[str, tuple[Path, int]] = {}
        """The log of each part, and its length at the start."""

    @classmethod
    def from_toml(cls, path: str | Path = "pipeline.toml", assignments: Iterable[str] = ()) -> Self:
        """Read the settings.

        Args:
            path: the file.
            assignments: other values of settings, such as `learner.batch_size=64`, as `--set` of the commands.

        Raises:
            SettingsError: something is wrong with them; a sentence says what.
        """
        return cls(load_config(Path(path), assignments=tuple(assignments)))

    @property
    def settings(self) -> Settings:
        """All settings, with their defaults."""
        return self._config.pipeline

    @property
    def schema(self) -> Schema:
        """The fields of an event."""
        return Schema(self.settings.events)

    def load(self, version: int | str = "served") -> "Model":
        """Return a version as a module, as `anabranch.load` does: its number, `newest`, or `served`."""
        from anabranch.api.model import load_from

        storage = self.settings.storage
        is_elsewhere = storage is not None and storage.mode == "only"
        return load_from(self._config, self._config.state_dir, storage if is_elsewhere else None, version)

    def backtest(self, data: Any, *, every: int | None = None, label_time: str | None = None) -> Any:
        """Run a pipeline of these settings on events in their order, without Kafka, as `anabranch.backtest` does."""
        from anabranch.api.backtest import backtest_of

        return backtest_of(self.settings, data, every, label_time)

    def client(self, timeout: float = 60.0) -> Client:
        """Return a client of the server that runs with these settings, with its token; the caller closes it.

        Args:
            timeout: seconds that each request may take.

        Raises:
            DependencyError: it does not serve a version yet.
        """
        serving, report = self.settings.serving, read_report(self._config.state_dir)
        if report is None or not report.ready:
            raise DependencyError(f"serving of {self._config.path} is not ready: see status()")
        ca = None if serving.tls.cert is None else self._config.folder / serving.tls.cert
        token = serving.tokens.read.get_secret_value()
        return Client(report.address, token, model=self.settings.name, schema=self.schema, timeout=timeout, ca=ca)

    def status(self) -> dict[str, Any]:
        """Return what `anabranch status --json` prints: the reports of `learner` and `serving`, and their condition.

        `condition` is `running`, `starting`, `silent` or `not running`; lags, rates, accuracy and problems are as [the
        settings](../reference.md) name them. It may be that of another process.
        """
        found: dict[str, Any] = json.loads(read_status(self._config).to_json())
        return found

    def start(self) -> Self:
        """Start learner and serving as child processes, and return once both run; a part that dies is restarted.

        They end with `stop`, or with this process. Each appends its log to `learner.log` or `serving.log` in the state
        directory.

        Raises:
            SettingsError: they run already, or the settings do not fit; the sentence is that of the process.
            DependencyError: a broker or another service cannot be reached.
        """
        if self._thread.is_alive():
            raise SettingsError(f"{self._config.path} has been started already: stop() ends it")
        state_dir, parts = self._config.state_dir, []
        with state_errors(f"{state_dir} cannot be written"):
            state_dir.mkdir(parents=True, exist_ok=True)
            for part in pipeline_parts(self._config):
                log = state_dir / f"{part.name}.log"
                log.touch(0o600)
                self._logs[part.name] = log, log.stat().st_size
                parts.append(replace(part, output=log))
        self._stop, self._ended, self._supervisor = threading.Event(), None, Supervisor(parts)
        self._thread = threading.Thread(target=self._supervise, name="pipeline", daemon=True)
        self._thread.start()
        try:
            while not self._runs():
                self._thread.join(_POLL_SECONDS)
                self._raise_end()
        except BaseException:
            self.stop()
            raise
        return self

    def run(self) -> None:
        """Start learner and serving, and wait until Ctrl-C stops them; raises as `start`, also when they end."""
        with self:
            with contextlib.suppress(KeyboardInterrupt):
                self._thread.join()
            self._raise_end()

    def stop(self) -> None:
        """Stop what `start` has started: the learner writes a last version and checkpoint. Waits until both ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Pipeline({self.settings.name}, {self._config.path})"

    def _supervise(self) -> None:
        assert self._supervisor is not None
        try:
            self._ended = self._supervisor.run(self._stop)
        except BaseException as exc:  # noqa: BLE001 raised by the thread that waits
            self._ended = exc

    def _runs(self) -> bool:
        """Return whether both parts report, and are those that were started."""
        assert self._supervisor is not None
        status, pids = read_status(self._config), self._supervisor.pids()
        own = [report is not None and pids.get(part) in _pids(report) for part, report in status.reports.items()]
        return all(own) and all(status.condition(part) == "running" for part in status.reports)

    def _raise_end(self) -> None:
        """Raise why the parts have ended, if they have."""
        if isinstance(self._ended, BaseException):
            raise self._ended
        if not self._ended or self._supervisor is None or self._supervisor.ended is None:
            return
        part = self._supervisor.ended.name
        log, begin = self._logs[part]
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        said = next((line.removeprefix(_OURS) for line in reversed(lines) if line.startswith(_OURS)), None)
        error = DependencyError if self._ended == Exit.DEPENDENCY else SettingsError
        raise error(said or f"{part} ended with exit code {int(self._ended)}: see {log}")


def _pids(report: Any) -> tuple[int | None, ...]:
    """Return the processes of a part: that of the report, and of a learner of ranks the one that started it."""
    return report.pid, getattr(report, "launcher", None)
