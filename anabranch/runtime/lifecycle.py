"""What every command and daemon shares: exit codes, errors as one sentence, signals as an event."""

import contextlib
import logging
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import FrameType

from anabranch.core.die_with_parent import when_stdin_ends
from anabranch.core.errors import AnabranchError, DependencyError
from anabranch.core.logs import printable

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
    """Of `status --exit-code`: learner or serving reports a problem, or has not reported for some time; of
    `plan --exit-code`: the plan breaks a promise."""
    NOT_RUNNING = 5
    """Of `status --exit-code` alone: learner or serving does not run, or still starts."""


def exit_code(error: AnabranchError) -> Exit:
    """Return the exit code of an error: it stands for what the user can do about it."""
    return Exit.DEPENDENCY if isinstance(error, DependencyError) else Exit.SETTINGS


def run(main: Callable[[], Exit | None]) -> Exit:
    """Run `main`, print an error of ours as one sentence on stderr, and return the exit code (None is DONE)."""
    try:
        return main() or Exit.DONE
    except AnabranchError as exc:
        sys.stderr.write(f"anabranch: {printable(str(exc))}\n")
        return exit_code(exc)


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

    A handler interrupts the main thread, which may hold the event's own lock: so it writes into a pipe, and a thread
    that reads the pipe sets the event.
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
