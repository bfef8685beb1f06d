"""What a check before a start finds. Checks are next to the code that would fail; `doctor` runs all of them."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Literal, Protocol

import msgspec

from anabranch.core.die_with_parent import lives
from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.core.net import TakenError, listen

Level = Literal["ok", "info", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """One result of a check."""

    level: Level
    message: str
    """One sentence."""
    fix: str = ""
    """One sentence with the command or the key."""
    kind: str = ""
    """A name for programs, such as "topic.missing"; empty when all is well."""
    unreachable: bool = False
    """Whether it is about something outside that cannot be reached: exit code 3 rather than 2."""


class _OfProcess(Protocol):
    """A report that names its process."""

    @property
    def pid(self) -> int: ...


def ok(message: str) -> Finding:
    """Return that all is well."""
    return Finding("ok", message)


def info(kind: str, message: str, fix: str) -> Finding:
    """Return what is worth to know, and may be as it should be."""
    return Finding("info", message, fix, kind)


def warning(kind: str, message: str, fix: str) -> Finding:
    """Return what a pipeline runs with, but worse."""
    return Finding("warning", message, fix, kind)


def problem(kind: str, message: str, fix: str, *, unreachable: bool = False) -> Finding:
    """Return what a pipeline does not run with; `unreachable`: it is away, rather than wrong."""
    return Finding("problem", message, fix, kind, unreachable)


def check_import(what: str, module: str, extra: str) -> Iterator[Finding]:
    """Yield that a module cannot be imported which `what` needs, and which an extra brings."""
    try:
        with needs(what, module, extra):
            importlib.import_module(module)
    except SettingsError as exc:
        said, _, fix = str(exc).rpartition(": ")
        yield problem("install.extra", f"{said}, which cannot be imported.", f"Install it: {fix}.")


def can_import(module: str) -> bool:
    """Return whether a module can be imported."""
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
        return True
    return False


def check_address(key: str, host_key: str, host: str, port: int, report: _OfProcess | None) -> Iterator[Finding]:
    """Yield whether an address can be listened on, or is held by this pipeline's own process.

    Args:
        key: the setting with the port.
        host_key: the setting with the host.
        host: where to listen.
        port: 0 takes a free one.
        report: of the process that listens there; None: none has run.
    """
    try:
        listen(key, host_key, host, port).close()  # as the start does
    except TakenError:
        if report is not None and lives(report.pid):
            yield ok(f"{key}: {host}:{port} is held by this pipeline's own process {report.pid}.")
            return
        fix = f"Stop the program that has it, or set {key} to another port."
        yield problem("port.taken", f"{key}: another program listens on {host}:{port}.", fix)
    except SettingsError as exc:
        wrong, message = str(exc).partition(" = ")[0], str(exc).rpartition("; ")[0]
        fix = f"Set {wrong} to an address of this machine and a port above 1023."
        yield problem("port.address", f"{message}.", fix)
    else:
        yield ok(f"{key}: {host}:{port} can be listened on.")
