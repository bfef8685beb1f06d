"""One learner a state directory: a file lock, and an generation that grows with every holder.

A network file system may let go of a lock that its holder believes in: the generation then tells the one that has lost
it.
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
"""What the lock's file holds once its holder was told to stop."""
_COMMAND = b"command: "
"""What the lock's file begins with while its holder is a command, which ends by itself; its name follows."""
_LONGEST_MARK = 200
_LONGEST_COMMAND = timedelta(hours=1)
"""How long a learner waits for a command."""
_UNTIL_MARKED = timedelta(seconds=0.5)
"""How long a learner waits for a holder without a mark, which may be a command that has just taken the lock."""
_LOOK_SECONDS = 0.05

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

    The kernel lets go of the lock when the process ends, however it ends; it is proof of life also between containers
    that share the volume but not their process ids. From `stop` on others may know that this one ends; so long, and
    `patience` at most, is waited for one that does: when a supervisor is killed, the next one's learner comes before
    the last checkpoint of the one before it is written. A holder that is no learner names its `command`, which ends by
    itself: whoever has patience waits for it, for an hour at most. `known` tells the latest generation of what lies in
    the
    directory: what is written from now on is newer, also where the file of generations was lost.

    Raises:
        SecondLearnerError: another learner holds it.
        StateBusyError: a command holds it.
        SettingsError: the directory is none that this user may write to.
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
            threading.Thread(target=_tell, args=(stop, closed, path), name="tell-stopping", daemon=True).start()
        yield _next_generation(path / GENERATION, known())
    finally:
        closed.set()
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a learner or a command holds the lock; its file is not made, and the try is over at once."""
    try:
        with (path / LOCK).open("rb") as file:
            return not _locks(file.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def check_generation(path: Path, generation: int) -> None:
    """Look whether the learner of this generation is the last that has held a state directory, before it writes there.

    Raises:
        SecondLearnerError: another one has held the directory since.
    """
    try:
        latest = int((path / GENERATION).read_text())
    except (OSError, ValueError):  # who cannot read here cannot write here either, and tells of that
        return
    if latest > generation:
        raise SecondLearnerError(
            f"another learner has taken {path} since this one, of generation {generation}, lost its lock there; this "
            f"one ends"
        )


def _lock(descriptor: int, path: Path, stop: threading.Event | None, patience: timedelta) -> None:
    """Take the lock, and wait for it while its holder is stopping, or is a command."""
    mark, since, told = b"", time.monotonic(), True
    while not _locks(descriptor, fcntl.LOCK_EX):
        found = os.pread(descriptor, _LONGEST_MARK, 0)
        if found != mark:
            mark, since, told = found, time.monotonic(), not found
        stopped = stop is not None and stop.is_set()
        if stopped or time.monotonic() - since >= _longest_wait(mark, patience).total_seconds():
            raise _refusal(mark, path)
        if not told:
            log.info("%s in %s; its end is waited for", _holder(mark), path)
            told = True
        time.sleep(_LOOK_SECONDS)


def _locks(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _longest_wait(mark: bytes, patience: timedelta) -> timedelta:
    """Return how long one who has `patience` waits for a holder with this mark."""
    if mark.startswith(_COMMAND):
        return _LONGEST_COMMAND if patience else timedelta(0)
    return patience if mark == _STOPPING else min(patience, _UNTIL_MARKED)


def _refusal(mark: bytes, path: Path) -> AnabranchError:
    if mark.startswith(_COMMAND):
        return StateBusyError(f"{_holder(mark)} in {path}; start again when it has ended")
    return SecondLearnerError(
        f"another learner is at work in {path}; stop it first, or give this pipeline a state_dir of its own"
    )


def _holder(mark: bytes) -> str:
    if not mark.startswith(_COMMAND):
        return "another learner is stopping"
    return f"`{mark.removeprefix(_COMMAND).decode(errors='replace')}` is at work"


def _mark(descriptor: int, mark: bytes) -> None:
    """Say in the lock's file what holds it; whoever reads another's mark before this reads on, since it changes."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, mark, 0)


def _tell(stop: threading.Event, closed: threading.Event, path: Path) -> None:
    """Write down that the holder of the lock was told to stop, as long as it holds it."""
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
