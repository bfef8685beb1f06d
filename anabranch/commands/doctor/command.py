"""Runs the checks one after the other, each within its time, none hiding another."""

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from anabranch.command import AsJson, ConfigFile, command, time_option
from anabranch.config.loader import Config, examine_config
from anabranch.config.pipeline import Pipeline
from anabranch.core.errors import SettingsError
from anabranch.core.failures import panics_are_errors
from anabranch.core.preflight import Finding, ok, problem
from anabranch.core.shutdown import Deadline
from anabranch.ingest.preflight import broker, history, schema
from anabranch.learner.preflight import device, state_dir, storage
from anabranch.learner.status.report import read_report
from anabranch.replay import preflight as replay
from anabranch.runtime import preflight as runtime
from anabranch.runtime.console import PlainConsole
from anabranch.runtime.lifecycle import Exit
from anabranch.runtime.model_process import Trial, try_model
from anabranch.serving import preflight as serving


class Check(NamedTuple):
    """A check, and the sections of the config without which it cannot be made."""

    name: str
    run: Callable[[Config, Trial], Iterable[Finding]]
    needs: Sequence[str]


def _history_left(path: Path) -> timedelta | None:
    """Return the time that the learner of a state directory expects for the history; None: it has not begun."""
    report = read_report(path)
    if report is None or report.backfill is None:
        return None
    return timedelta(seconds=0.0 if report.backfill.done else report.backfill.seconds_left or 0.0)


_MODEL = ("schema", "model", "learner", "replay", "serving")
_VERSIONS = ("state_dir", "schema", "model", "serving", "storage")
_STATE = ("state_dir", "learner", "replay", "checkpoints", "versions", "schema")

CHECKS: Sequence[Check] = (
    Check("install", lambda of, _: runtime.check_install(of.pipeline), ("tracing", "track", "lineage")),
    Check("install", lambda of, _: schema.check_install(of.pipeline.stream), ("stream",)),
    Check("install", lambda of, _: replay.check_install(of.pipeline.replay), ("replay",)),
    Check("limits", lambda *_: runtime.check_limits(), ()),
    Check("schema", lambda of, _: schema.check_schema(of.pipeline.stream, of.pipeline.events), ("schema", "stream")),
    Check("model", lambda of, trial: try_model(of, trial), _MODEL),
    Check("replicas", lambda of, _: state_dir.check_replicas(of.pipeline.learner), ("learner",)),
    Check("device", lambda of, _: device.check_device(of.pipeline.device), ("device",)),
    Check("broker", lambda of, _: broker.check_broker(of.pipeline.stream, of.pipeline.events), ("stream", "schema")),
    Check(
        "answers", lambda of, _: serving.check_stream(of.pipeline.serving, of.pipeline.stream), ("serving", "stream")
    ),
    Check(
        "registry", lambda of, _: schema.check_registry(of.pipeline.stream, of.pipeline.events), ("stream", "schema")
    ),
    Check(
        "history",
        lambda of, _: history.check_history(of.pipeline.stream, of.pipeline.events, _history_left(of.state_dir)),
        ("stream", "schema"),
    ),
    Check("redis", lambda of, _: replay.check_redis(of.pipeline.replay, of.pipeline.name), ("replay", "name")),
    Check("storage", lambda of, _: storage.check_storage(of.pipeline.storage, of.state_dir), ("storage", "state_dir")),
    Check("state", lambda of, trial: state_dir.check_state(of.pipeline, trial.model_bytes, trial.base_bytes), _STATE),
    Check("state", lambda of, _: runtime.check_private(of), ("state_dir", "lineage", "serving")),
    Check("checkpoints", lambda of, _: state_dir.check_checkpoints(of.pipeline), ("state_dir", "schema")),
    Check("versions", lambda of, _: serving.check_versions(of.pipeline, of.pipeline.serving), _VERSIONS),
    Check(
        "ports",
        lambda of, _: serving.check_port(of.pipeline.serving, of.pipeline.learner.status, of.state_dir),
        ("serving", "learner", "state_dir"),
    ),
    Check("ports", lambda of, _: state_dir.check_status(of.pipeline), ("learner", "state_dir")),
    Check("tls", lambda of, _: serving.check_tls(of.pipeline.serving.tls, of.folder), ("serving",)),
)
"""All checks, in the order in which they run. Their code is in `preflight` of each package."""


_STYLES = {"ok": "green", "info": "cyan", "warning": "yellow", "problem": "bold red"}
_CHECK_COLUMNS = max(len(check.name) for check in CHECKS)
_SHORTEST_SECRET = 3


@command("anabranch doctor -c digits/pipeline.toml")
def doctor(
    config: ConfigFile,
    as_json: AsJson = False,
    timeout: Annotated[
        timedelta, time_option("Time limit of each check.", default="30s", least=timedelta(seconds=1))
    ] = timedelta(seconds=30),
    device: Annotated[bool, typer.Option("--device", help="Try the model on its device even if in use.")] = False,
) -> Exit:
    """Check config, broker, model and machine, and suggest fixes. Read-only."""
    console = PlainConsole()
    watched = sys.stderr.isatty() and not as_json
    results = []
    busy = _spinner if watched else contextlib.nullcontext
    for result in examine(
        config.path, timeout.total_seconds(), busy, CHECKS, assignments=config.assignments, on_device=device
    ):
        results.append(result)
        if not as_json:
            show(console, result)
    if as_json:
        sys.stdout.write(to_json(results))
    else:
        console.print(summary(results))
    return exit_code(results)


def _spinner(check: str) -> AbstractContextManager[object]:
    return Console(stderr=True).status(f"checking the {check}")


class CheckResult(NamedTuple):
    """One finding, and the check that made it."""

    check: str
    finding: Finding


def examine(
    path: Path,
    timeout: float,
    busy: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
    checks: Sequence[Check] = CHECKS,
    *,
    assignments: Sequence[str] = (),
    on_device: bool = False,
) -> Iterator[CheckResult]:
    """Yield what every check finds, as it finds it; `busy` is entered with a check's name while that runs.

    Raises what a check raised that is a bug of ours, once the others are done.
    """
    try:
        config, faults, secrets = examine_config(path, assignments=assignments)
    except SettingsError as exc:
        fix = 'Name the file with -c FILE, or write an example with "anabranch init DIR".'
        yield CheckResult("config", problem("config.unreadable", f"{exc}.", fix))
        return
    if config is not None:
        secrets |= _secrets_of(config.pipeline)
    for _, sentence in faults:
        fix = "Fix this key where it is set; docs/reference.md lists all keys."
        yield CheckResult("config", _scrubbed(problem("config.invalid", f"{sentence}.", fix), secrets))
    if not faults:
        yield CheckResult("config", ok(f"{path.absolute()} is valid."))
    if config is None:
        return
    faulty, trial, bugs = {location[0] for location, _ in faults}, Trial(timeout, on_device), list[Exception]()
    for check in checks:
        if faulty & set(check.needs):
            continue
        with busy(check.name):
            for finding in _within(check, config, trial, bugs):
                if finding.kind == "schema.invalid":
                    faulty.add("schema")
                yield CheckResult(check.name, _scrubbed(finding, secrets))
    if bugs:
        raise bugs[0]


def exit_code(results: Iterable[CheckResult]) -> Exit:
    """Return 0 without a problem, 3 when all problems are of what cannot be reached, else 2."""
    problems = [finding for _, finding in results if finding.level == "problem"]
    if not problems:
        return Exit.DONE
    return Exit.DEPENDENCY if all(finding.unreachable for finding in problems) else Exit.SETTINGS


def show(console: Console, result: CheckResult) -> None:
    """Print one finding."""
    check, finding = result
    line = Text.assemble(
        (f"{finding.level:<8}", _STYLES[finding.level]), f" {check:<{_CHECK_COLUMNS}} {finding.message}"
    )
    console.print(line, soft_wrap=True)
    if finding.fix:
        console.print(Text(f"{'':<{9 + _CHECK_COLUMNS}} {finding.fix}", style="dim"), soft_wrap=True)


def summary(results: Sequence[CheckResult]) -> str:
    """Return the last line."""
    counts = {level: sum(finding.level == level for _, finding in results) for level in ("problem", "warning")}
    if not any(counts.values()):
        return "nothing is wrong"
    return " and ".join(f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items() if count)


def to_json(results: Sequence[CheckResult]) -> str:
    """Return the findings as a JSON list."""
    items = [{"check": check, **msgspec.to_builtins(finding)} for check, finding in results]
    return msgspec.json.format(msgspec.json.encode(items), indent=2).decode() + "\n"


def _secrets_of(pipeline: Pipeline) -> set[str]:
    """Return the values that no finding shows."""
    hidden = [
        value
        for name, value in pipeline.stream.properties.items()
        if any(word in name for word in ("password", "secret", "token", "key.pem"))
    ]
    if pipeline.stream.backfill is not None:
        hidden += pipeline.stream.backfill.storage.values()
    if pipeline.storage is not None:
        hidden += pipeline.storage.options.values()
    hidden += [pipeline.serving.tokens.read, pipeline.serving.tokens.admin]
    registry = pipeline.stream.registry
    hidden += [secret for secret in (registry.password, registry.token) if secret] if registry else []
    secrets = {value.get_secret_value() for value in hidden}
    if pipeline.replay.redis is not None:
        url = pipeline.replay.redis.url.get_secret_value()
        secrets |= {url, urlsplit(url).password or url}
    return secrets


def _within(check: Check, config: Config, trial: Trial, bugs: list[Exception]) -> Iterator[Finding]:
    """Run a check in its own thread, which is not waited for when it takes too long."""
    results: queue.SimpleQueue[Finding | Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            with panics_are_errors():
                for finding in check.run(config, trial):
                    results.put(finding)
        except Exception as exc:  # noqa: BLE001 the top of a thread: it is raised once the other checks are done
            results.put(exc)
        else:
            results.put(None)

    threading.Thread(target=run, name=f"doctor-{check.name}", daemon=True).start()
    deadline = Deadline(timedelta(seconds=trial.timeout))
    while True:
        try:
            result = results.get(timeout=deadline.left)
        except queue.Empty:
            message = f"It has not ended within {trial.timeout:g} s."
            yield problem("check.slow", message, "Try again with a longer --timeout.", unreachable=True)
            return
        if result is None:
            return
        if isinstance(result, Exception):
            bugs.append(result)
            return
        yield result


def _scrubbed(finding: Finding, secrets: set[str]) -> Finding:
    """Return the text without the values of secrets, wherever in it they are."""
    message = finding.message
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            message = message.replace(secret, "(hidden)")
    return msgspec.structs.replace(finding, message=message)
