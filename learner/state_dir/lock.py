"""One learner per state directory: a file lock, and a generation that increases with every holder.

A network file system may release a lock unnoticed by its holder, which then detects a later generation.
"""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from anabranch.core.atomic_files import replace_file
from anabranch.core.errors import AnabranchError, SettingsError
from anabranch.core.failures import state_errors
from anabranch.core.start_report import start_does
from anabranch.learner.errors import SecondLearnerError, StateBusyError

LOCK = "learner.lock"
GENERATION = "generation"
_STOPPING = b"stopping"
"""Content of the lock file once its holder is stopping."""
_COMMAND = b"command: "
"""Prefix of the lock file while its holder is a command, which ends by itself; its name follows."""
_LONGEST_MARK = 200
_LONGEST_COMMAND = timedelta(hours=1)
"""How long a learner waits for a command."""
_UNTIL_MARKED = timedelta(seconds=10)
"""How long a learner waits for a holder without a mark. It may be a command that has just locked the file, or a learner
whose supervisor was killed: it has the lowest priority, and on a busy machine needs seconds to say that it stops."""
_POLL_SECONDS = 0.05

log = logging.getLogger(__name__)


@contextlib.contextmanager
def lock_state_directory(
    path: Path,
    stop: threading.Event | None = None,
    patience: timedelta = timedelta(0),
    known: Callable[[], int] = int,
    command: str = "",
) -> Iterator[int]:
    """Hold the lock and yield the new generation, which is larger than all earlier ones.

    The kernel releases the lock when the process ends, so a held lock means a living process, also in another container
    that shares the volume but not the process ids.

    Args:
        path: the state directory.
        stop: once it is set, the lock file says that this holder is stopping.
        patience: how long to wait for a holder that is stopping: after a supervisor was killed, the next learner starts
            before the last checkpoint of the previous one is written. With any patience, this waits for a command for
            up to an hour.
        known: returns the latest generation in the directory's files; the new one is larger even if the file of
            generations was lost.
        command: the name of a holder that is a command, which ends by itself.

    Raises:
        SecondLearnerError: another learner holds it.
        StateBusyError: a command holds it.
        SettingsError: the user may not write to the directory.
        DependencyError: its disk cannot be read or written for now: it is full, read-only or unreachable.
    """
    with state_errors(f"state_dir: cannot write to {path}"):
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    closed = threading.Event()
    try:
        with state_errors(f"{path / LOCK} cannot be locked"):
            _lock(descriptor, path, stop, patience)
            _mark(descriptor, _COMMAND + command.encode() if command else b"")
        if stop is not None:
            threading.Thread(
                target=_mark_stopping, args=(stop, closed, path), name="mark-stopping", daemon=True
            ).start()
        yield _next_generation(path / GENERATION, known())
    finally:
        closed.set()
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a learner or a command holds the lock, without waiting and without creating its file."""
    try:
        with (path / LOCK).open("rb") as file:
            return not _locks(file.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def check_generation(path: Path, generation: int) -> None:
    """Check, before a write, that no learner of a later generation has held the state directory.

    Raises:
        SecondLearnerError: another one has held the directory since.
    """
    try:
        latest = int((path / GENERATION).read_text())
    except (OSError, ValueError):  # then the write fails too, and its error is reported
        return
    if latest > generation:
        raise SecondLearnerError(
            f"another learner has taken {path} since this one, of generation {generation}, lost its lock; this one ends"
        )


def write_generation(path: Path, generation: int) -> None:
    """Let the holder of a state directory have a later generation than `lock_state_directory` has returned.

    Raises as `lock_state_directory` where it cannot be written.
    """
    with state_errors(f"{path / GENERATION} cannot be written"):
        replace_file(path / GENERATION, str(generation).encode())


def _lock(descriptor: int, path: Path, stop: threading.Event | None, patience: timedelta) -> None:
    """Lock the file, waiting while its holder is stopping or is a command."""
    mark, since, logged = b"", time.monotonic(), True
    while not _locks(descriptor, fcntl.LOCK_EX):
        holder_mark = os.pread(descriptor, _LONGEST_MARK, 0)
        if holder_mark != mark:
            mark, since, logged = holder_mark, time.monotonic(), not holder_mark
        stopped = stop is not None and stop.is_set()
        if stopped or time.monotonic() - since >= _longest_wait(mark, patience).total_seconds():
            raise _refusal(mark, path)
        if not logged:
            start_does(f"waits, since {_holder(mark)} in {path}")
            log.info("%s in %s; waiting for its end", _holder(mark), path)
            logged = True
        time.sleep(_POLL_SECONDS)


def _locks(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _longest_wait(mark: bytes, patience: timedelta) -> timedelta:
    """Return how long to wait for a holder with this mark."""
    if mark.startswith(_COMMAND):
        return _LONGEST_COMMAND if patience else timedelta(0)
    return patience if mark == _STOPPING else min(patience, _UNTIL_MARKED)


def _refusal(mark: bytes, path: Path) -> AnabranchError:
    if mark.startswith(_COMMAND):
        return StateBusyError(f"{_holder(mark)} in {path}; start again when it has ended")
    return SecondLearnerError(
        f"another learner is at work in {path}; stop it first, or give this pipeline another state_dir"
    )


def _holder(mark: bytes) -> str:
    if not mark.startswith(_COMMAND):
        return "another learner is stopping"
    return f"`{mark.removeprefix(_COMMAND).decode(errors='replace')}` is at work"


def _mark(descriptor: int, mark: bytes) -> None:
    """Write into the lock file what holds it; waiting processes notice the change."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, mark, 0)


def _mark_stopping(stop: threading.Event, closed: threading.Event, path: Path) -> None:
    """Mark the lock file once the holder is stopping, unless it has released the lock."""
    stop.wait()
    if not closed.is_set():
        with contextlib.suppress(OSError):
            (path / LOCK).write_bytes(_STOPPING)


def _next_generation(path: Path, known: int) -> int:
    last = known
    try:
        with state_errors(f"{path} cannot be read"), contextlib.suppress(FileNotFoundError):
            last = max(known, int(path.read_text()))
    except ValueError as exc:
        raise SettingsError(f"{path} does not hold a number; was something else written there?") from exc
    with state_errors(f"{path} cannot be written"):
        replace_file(path, str(last + 1).encode())
    return last + 1
