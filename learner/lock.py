"""One learner a state directory: a file lock, and an epoch that grows with every holder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ingest.errors import SecondLearnerError, SettingsError
from learner.files import replace_file

LOCK = "learner.lock"
EPOCH = "epoch"


@contextlib.contextmanager
def hold_state_directory(path: Path) -> Iterator[int]:
    """Hold the lock and yield the new epoch, which is larger than all before it.

    The kernel lets go of the lock when the process ends, however it ends; it is proof of life also between containers
    that share the volume but not their process ids.

    Raises:
        SecondLearnerError: another learner holds it.
        SettingsError: the directory cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise SettingsError(f"state_dir: cannot write to {path}: {exc.strerror}") from exc
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise SecondLearnerError(
                f"another learner is at work in {path}; stop it first, or give this pipeline a state_dir of its own"
            ) from exc
        yield _next_epoch(path / EPOCH)
    finally:
        os.close(descriptor)


def _next_epoch(path: Path) -> int:
    try:
        last = int(path.read_text())
    except FileNotFoundError:
        last = 0
    except ValueError as exc:
        raise SettingsError(f"{path} does not hold a number; was something else written there?") from exc
    except OSError as exc:
        raise SettingsError(f"{path} cannot be read: {exc.strerror}") from exc
    try:
        replace_file(path, str(last + 1).encode())
    except OSError as exc:
        raise SettingsError(f"{path} cannot be written: {exc.strerror}") from exc
    return last + 1
