"""The list of checks, and how they are run: one after the other, each within its time, none hiding another."""

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from rich.console import Console
from rich.text import Text

from anabranch.config.loader import examine_config
from anabranch.core.errors import SettingsError
from anabranch.core.failures import panics_are_errors
from anabranch.doctor.artifact_checks import check_checkpoints, check_versions
from anabranch.doctor.device_checks import check_device
from anabranch.doctor.environment_checks import check_install, check_limits
from anabranch.doctor.findings import CheckContext, Finding, found, ok
from anabranch.doctor.kafka_checks import check_broker
from anabranch.doctor.model_process import check_alone, check_model
from anabranch.doctor.network_checks import check_ports, check_tls
from anabranch.doctor.redis_checks import check_redis
from anabranch.doctor.schema_checks import check_registry, check_schema
from anabranch.doctor.state_dir_checks import check_state
from anabranch.doctor.storage.object_store_checks import check_storage
from anabranch.doctor.stream.backfill_checks import check_history
from anabranch.runtime.console import PlainConsole
from anabranch.runtime.lifecycle import Exit
from learner.runtime.shutdown import Deadline

_STYLES = {"ok": "green", "info": "cyan", "warning": "yellow", "problem": "bold red"}
_SHORTEST_SECRET = 3


class Check(NamedTuple):
    """A check, and the sections of the config without which it cannot be made."""

    name: str
    run: Callable[[CheckContext], Iterable[Finding]]
    needs: Sequence[str] = ()


CHECKS: Sequence[Check] = (
    Check("install", check_install),
    Check("limits", check_limits),
    Check("schema", check_schema, ("schema", "stream")),
    Check("model", check_model, ("schema", "model", "learner", "replay", "serving")),
    Check("replicas", check_alone, ("learner",)),
    Check("device", check_device, ("device",)),
    Check("broker", check_broker, ("stream", "schema")),
    Check("registry", check_registry, ("stream", "schema")),
    Check("history", check_history, ("stream", "schema")),
    Check("redis", check_redis, ("replay", "name")),
    Check("storage", check_storage, ("storage",)),
    Check("state", check_state, ("state_dir", "learner", "replay", "checkpoints", "versions", "schema")),
    Check("checkpoints", check_checkpoints, ("state_dir", "schema")),
    Check("versions", check_versions, ("state_dir", "schema")),
    Check("ports", check_ports, ("serving", "learner", "state_dir")),
    Check("tls", check_tls, ("serving",)),
)


def report(path: Path, timeout: float, *, as_json: bool, on_device: bool = False) -> Exit:
    """Examine the pipeline of a file, print what is found, and return the exit code.

    `on_device`: try the model on the learner's device, whoever uses that.
    """
    console = PlainConsole()
    watched = sys.stderr.isatty() and not as_json
    results = []
    busy = _spinner if watched else contextlib.nullcontext
    for result in examine(path, timeout, busy, CHECKS, on_device=on_device):
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
    on_device: bool = False,
) -> Iterator[CheckResult]:
    """Yield what every check finds, as it finds it; `busy` is entered with a check's name while that runs.

    Raises what a check raised that is a bug of ours, once the others are done.
    """
    context = CheckContext(path, timeout, on_device=on_device)
    faulty: set[str] = set()
    for finding in _check_config(context, faulty):
        yield CheckResult("config", _scrubbed(finding, context))
    bugs: list[Exception] = []
    for check in checks:
        if check.needs and (context.pipeline is None or faulty & set(check.needs)):
            continue
        with busy(check.name):
            for finding in _within(check, context, bugs):
                if finding.kind == "schema.invalid":
                    faulty.add("schema")
                yield CheckResult(check.name, _scrubbed(finding, context))
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
    line = Text.assemble((f"{finding.level:<8}", _STYLES[finding.level]), f" {check:<9} {finding.message}")
    console.print(line, soft_wrap=True)
    if finding.fix:
        console.print(Text(f"{'':<18} {finding.fix}", style="dim"), soft_wrap=True)


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


def _check_config(context: CheckContext, faulty: set[str]) -> Iterator[Finding]:
    try:
        pipeline, faults, context.secrets = examine_config(context.path)
    except SettingsError as exc:
        yield found("config.unreadable", f"{exc}.")
        return
    context.pipeline = pipeline
    if pipeline is not None:
        settings = pipeline.pipeline
        hidden = [
            value
            for name, value in settings.stream.properties.items()
            if any(word in name for word in ("password", "secret", "token", "key.pem"))
        ]
        if settings.stream.backfill is not None:
            hidden += settings.stream.backfill.storage.values()
        if settings.storage is not None:
            hidden += settings.storage.options.values()
        hidden += [settings.serving.tokens.read, settings.serving.tokens.admin]
        registry = settings.stream.registry
        hidden += [secret for secret in (registry.password, registry.token) if secret] if registry else []
        context.secrets |= {value.get_secret_value() for value in hidden}
        if settings.replay.redis is not None:
            url = settings.replay.redis.url.get_secret_value()
            context.secrets |= {url, urlsplit(url).password or url}
    for location, sentence in faults:
        faulty.add(location[0])
        yield found("config.invalid", f"{sentence}.")
    if not faults:
        yield ok(f"{context.path} is valid.")


def _within(check: Check, context: CheckContext, bugs: list[Exception]) -> Iterator[Finding]:
    """Run a check in its own thread, which is not waited for when it takes too long."""
    results: queue.SimpleQueue[Finding | Exception | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            with panics_are_errors():
                for finding in check.run(context):
                    results.put(finding)
        except Exception as exc:  # noqa: BLE001 the top of a thread: it is raised once the other checks are done
            results.put(exc)
        else:
            results.put(None)

    threading.Thread(target=run, name=f"doctor-{check.name}", daemon=True).start()
    deadline = Deadline(timedelta(seconds=context.timeout))
    while True:
        try:
            result = results.get(timeout=deadline.left)
        except queue.Empty:
            yield found("check.slow", f"It has not ended within {context.timeout:g} s.")
            return
        if result is None:
            return
        if isinstance(result, Exception):
            bugs.append(result)
            return
        yield result


def _scrubbed(finding: Finding, context: CheckContext) -> Finding:
    """Return the text without the values of secrets, wherever in it they are."""
    message = finding.message
    for secret in sorted(context.secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            message = message.replace(secret, "(hidden)")
    return msgspec.structs.replace(finding, message=message)
