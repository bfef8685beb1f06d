"""One learner per state directory: a file lock, and a generation that grows with every holder.

A network file system may release a lock without its holder's knowledge: the generation then shows who has lost it.
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
from learner.errors import SecondLearnerError, StateBusyError

LOCK = "learner.lock"
GENERATION = "generation"
_STOPPING = b"stopping"
"""Content of the lock file once its holder is stopping."""
_COMMAND = b"command: "
"""Prefix of the lock file while its holder is a command, which ends by itself; its name follows."""
_LONGEST_MARK = 200
_LONGEST_COMMAND = timedelta(hours=1)
"""How long a learner waits for a command."""
_UNTIL_MARKED = timedelta(seconds=0.5)
"""How long a learner waits for a holder without a mark, which may be a command that has just locked it."""
_POLL_SECONDS = 0.05

log = logging.getLogger(__name__)


@contextlib.contextmanager
def hold_state_directory(
    path: Path,
    stop: threading.Event | None = None,
    patience: timedelta = timedelta(0),
    known: Callable[[], int] = int,
    command: str = "",
) -> Iterator[int]:
    """Hold the lock and yield the new generation, which is larger than all before it.

    The kernel releases the lock however the process ends, so it proves life also between containers that share the
    volume but not their process ids. Once `stop` is set, the lock file says that this holder is stopping. For such a
    holder others wait up to `patience`: when a supervisor is killed, the next one's learner starts before the last
    checkpoint of the one before is written. A holder that is no learner names its `command`, which ends by itself:
    others with patience wait for it, for an hour at most. `known` returns the latest generation in the directory's
    files: the new one is larger, even if the file of generations was lost.

    Raises:
        SecondLearnerError: another learner holds it.
        StateBusyError: a command holds it.
        SettingsError: the user may not write to the directory.
        DependencyError: its disk cannot be read or written for now: it is full, read-only or away.
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


def is_held(path: Path) -> bool:
    """Return whether a learner or a command holds the lock, without waiting and without creating its file."""
    try:
        with (path / LOCK).open("rb") as file:
            return not _locks(file.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def check_generation(path: Path, generation: int) -> None:
    """Check, before a write, that the learner of this generation is the last that has held a state directory.

    Raises:
        SecondLearnerError: another one has held the directory since.
    """
    try:
        latest = int((path / GENERATION).read_text())
    except (OSError, ValueError):  # then the write fails too, and is reported
        return
    if latest > generation:
        raise SecondLearnerError(
            f"another learner has taken {path} since this one, of generation {generation}, lost its lock there; this "
            f"one ends"
        )


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
    """Write into the lock file what holds it; others that read an older mark read again, since it changes."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, mark, 0)


def _mark_stopping(stop: threading.Event, closed: threading.Event, path: Path) -> None:
    """Write into the lock file that its holder is stopping, unless it has released the lock."""
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
