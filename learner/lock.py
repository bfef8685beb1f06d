"""One learner a state directory: a file lock, and an epoch that grows with every holder.

A network file system may let go of a lock that its holder believes in: the epoch then tells the one that has lost it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from ingest.errors import DependencyError, SecondLearnerError, SettingsError
from learner.files import replace_file

LOCK = "learner.lock"
EPOCH = "epoch"
_STOPPING = b"stopping"
"""What the lock's file holds once its holder was told to stop."""
_LOOK_SECONDS = 0.05
_FULL = {errno.ENOSPC, errno.EDQUOT}

log = logging.getLogger(__name__)


@contextlib.contextmanager
def hold_state_directory(
    path: Path,
    stop: threading.Event | None = None,
    patience: timedelta = timedelta(0),
    known: Callable[[], int] = int,
) -> Iterator[int]:
    """Hold the lock and yield the new epoch, which is larger than all before it.

    The kernel lets go of the lock when the process ends, however it ends; it is proof of life also between containers
    that share the volume but not their process ids. From `stop` on others may know that this one ends; so long, and
    `patience` at most, is waited for one that does: when a supervisor is killed, the next one's learner comes before
    the last cut of the one before it is written. `known` tells the latest epoch of what lies in the directory: what is
    written from now on is newer, also where the file of epochs was lost.

    Raises:
        SecondLearnerError: another learner holds it.
        SettingsError: the directory cannot be written.
        DependencyError: the disk is full.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise SettingsError(f"state_dir: cannot write to {path}: {exc.strerror}") from exc
    closed = threading.Event()
    try:
        _lock(descriptor, path, stop, time.monotonic() + patience.total_seconds())
        os.ftruncate(descriptor, 0)
        if stop is not None:
            threading.Thread(target=_tell, args=(stop, closed, path), name="tell-stopping", daemon=True).start()
        yield _next_epoch(path / EPOCH, known())
    finally:
        closed.set()
        os.close(descriptor)


def check_epoch(path: Path, epoch: int) -> None:
    """Look whether the learner of this epoch is the last that has held a state directory, before it writes there.

    Raises:
        SecondLearnerError: another one has held the directory since.
    """
    try:
        latest = int((path / EPOCH).read_text())
    except (OSError, ValueError):  # who cannot read here cannot write here either, and tells of that
        return
    if latest > epoch:
        raise SecondLearnerError(
            f"another learner has taken {path} since this one, of epoch {epoch}, lost its lock there; this one ends"
        )


def _lock(descriptor: int, path: Path, stop: threading.Event | None, deadline: float) -> None:
    """Take the lock, and wait for it while its holder is stopping."""
    waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            leaving = os.pread(descriptor, len(_STOPPING), 0) == _STOPPING
            if not leaving or time.monotonic() > deadline or (stop is not None and stop.is_set()):
                raise SecondLearnerError(
                    f"another learner is at work in {path}; stop it first, or give this pipeline a state_dir of its own"
                ) from exc
        else:
            return
        if not waited:
            log.info("another learner is stopping in %s; its end is waited for", path)
        waited = True
        time.sleep(_LOOK_SECONDS)


def _tell(stop: threading.Event, closed: threading.Event, path: Path) -> None:
    """Write down that the holder of the lock was told to stop, as long as it holds it."""
    stop.wait()
    if not closed.is_set():
        with contextlib.suppress(OSError):
            (path / LOCK).write_bytes(_STOPPING)


def _next_epoch(path: Path, known: int) -> int:
    try:
        last = max(known, int(path.read_text()))
    except FileNotFoundError:
        last = known
    except ValueError as exc:
        raise SettingsError(f"{path} does not hold a number; was something else written there?") from exc
    except OSError as exc:
        raise SettingsError(f"{path} cannot be read: {exc.strerror}") from exc
    try:
        replace_file(path, str(last + 1).encode())
    except OSError as exc:
        kind = DependencyError if exc.errno in _FULL else SettingsError
        raise kind(f"{path} cannot be written: {exc.strerror}") from exc
    return last + 1
