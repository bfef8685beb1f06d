"""What every command and daemon shares: exit codes, errors as one sentence, signals as an event, log lines."""

import contextlib
import json
import logging
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from types import FrameType
from typing import Literal

from anabranch.core.die_with_parent import when_stdin_ends
from anabranch.core.errors import AnabranchError, DependencyError
from anabranch.runtime.package_check import refuse_intruders
from anabranch.runtime.printable import printable

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
_POLL_SECONDS = 0.1

log = logging.getLogger("anabranch")


_MOST_DESCRIPTORS = 65_536
"""Not all that some systems allow, which is a thousand million: other programs walk through them when they start."""


class Exit(IntEnum):
    """The exit codes of every command."""

    DONE = 0
    BUG = 1
    SETTINGS = 2
    DEPENDENCY = 3
    UNHEALTHY = 4
    """Of `status --exit-code` alone: learner or serving reports a problem, or has not reported for some time."""
    NOT_RUNNING = 5
    """Of `status --exit-code` alone: learner or serving does not run."""


def exit_code(error: AnabranchError) -> Exit:
    """Return the exit code of an error: it stands for what the user can do about it."""
    return Exit.DEPENDENCY if isinstance(error, DependencyError) else Exit.SETTINGS


def run(main: Callable[[], Exit | None]) -> Exit:
    """Run `main`, print an error of ours as one sentence on stderr, and return the exit code (None is DONE)."""
    refuse_intruders()
    try:
        return main() or Exit.DONE
    except AnabranchError as exc:
        sys.stderr.write(f"anabranch: {printable(str(exc))}\n")
        return exit_code(exc)


class _PrintableFormatter(logging.Formatter):
    """Formats lines, which may name what state files hold."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object on a line; control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


@dataclass(frozen=True)
class LogSettings:
    """Which log lines are written, and how."""

    level: LogLevel = "info"
    format: LogFormat = "text"


_configured = LogSettings()


def configure_logging(settings: LogSettings = LogSettings()) -> None:
    """Write log lines to stderr. Lines of Kafka clients are not written: ingest logs what matters of them."""
    global _configured
    _configured = settings
    handler = logging.StreamHandler(sys.stderr)
    text = _PrintableFormatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(_JsonFormatter() if settings.format == "json" else text)
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    logging.getLogger("kafka").setLevel(logging.CRITICAL)


def log_arguments() -> tuple[str, ...]:
    """Return the options by which a daemon that this process starts logs in the same way; none for the defaults."""
    level = () if _configured.level == "info" else ("--log-level", _configured.level)
    return level if _configured.format == "text" else (*level, "--log-format", _configured.format)


def raise_descriptor_limit() -> None:
    """Take as many file descriptors as the system allows this process, within what a daemon may ever use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


@contextlib.contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Set the event on the first SIGTERM or SIGINT; a second one has its usual effect. Restores the handlers.

    SIGHUP, which is a terminal that was closed, is one of them unless it is ignored, as `nohup` does.

    A handler runs in the middle of whatever the main thread does, which may be holding the event's own lock: so it
    writes into a pipe, and a thread that reads it sets the event.
    """
    stop = threading.Event()
    reading, writing = os.pipe()

    def watch() -> None:
        if os.read(reading, 1):
            stop.set()
        os.close(reading)

    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        restore()
        os.write(writing, b"\n")
        with contextlib.suppress(OSError):  # a terminal that is gone
            os.write(sys.stderr.fileno(), f"anabranch: stopping on {signal.Signals(number).name}\n".encode())

    watching = threading.Thread(target=watch, name="stop-on-signals", daemon=True)
    watching.start()
    for number in signals:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()
        os.close(writing)
        watching.join()


def wait_for_parent(stop: threading.Event) -> bool:
    """Wait for a line on stdin, and return True; False when stdin ends or `stop` is set before one comes."""
    stdin = sys.stdin.fileno()
    while not stop.is_set():
        if select.select([stdin], [], [], _POLL_SECONDS)[0]:
            return bool(os.read(stdin, 4096))
    return False


def stop_with_parent(stop: threading.Event) -> None:
    """Set `stop` when stdin ends: how a supervised daemon notices that its supervisor is gone, on every platform."""
    when_stdin_ends(stop.set)
