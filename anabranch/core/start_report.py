"""What a part does while it starts, before its first report: `<part>-start.json` in the state directory.

A process has one such file, as it has one log: whatever waits deep in the start can say so. It holds a lock on it while
it lives: a file that a killed one has left says nothing, whoever has its pid now. Imports no torch.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file


class StartReport(msgspec.Struct, frozen=True):
    """How far the start of a part has come."""

    pid: int
    started: float
    """When it began, in seconds since 1970."""
    doing: str
    """What it does or waits for, as the rest of a sentence about it: "waits for the topics"."""


class _OwnFile:
    """The file of this process. Another process may replace it by its own, which is left alone then."""

    def __init__(self, path: Path) -> None:
        self._path, self._started = path, time.time()
        self._descriptor: int | None = None

    def replace(self, doing: str) -> None:
        """Write what this process does; raises OSError."""
        temporary, held = self._path.with_name(f".{self._path.name}.{os.getpid()}"), self._descriptor
        self._descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._descriptor, msgspec.json.encode(StartReport(os.getpid(), self._started, doing)))
            temporary.replace(self._path)
        finally:
            if held is not None:
                os.close(held)

    def remove(self) -> None:
        """Remove it; raises OSError."""
        if self._descriptor is None:
            return
        try:
            if os.path.samestat(self._path.stat(), os.fstat(self._descriptor)):
                self._path.unlink()
        finally:
            os.close(self._descriptor)


_own: list[_OwnFile] = []
"""The file of this process; empty where nobody asks."""


@contextlib.contextmanager
def starting(state_dir: Path, part: str) -> Iterator[None]:
    """Report the start of a part while the block runs, as `start_does` says.

    At the end the file is removed, unless it is another process's by then.
    """
    own = _OwnFile(_path(state_dir, part))
    _own.append(own)
    with contextlib.suppress(OSError):  # the start says what is wrong with the folder
        state_dir.mkdir(parents=True, exist_ok=True)
    start_does("imports its modules")
    try:
        yield
    finally:
        _own.remove(own)
        with contextlib.suppress(OSError):
            own.remove()


def start_does(doing: str) -> None:
    """Report what the start of this process does or waits for now; does nothing outside `starting`."""
    for own in _own:
        with contextlib.suppress(OSError):
            own.replace(doing)


def read_start(state_dir: Path, part: str) -> StartReport | None:
    """Return what the newest living process of a part said of its start, which may be over; None without one."""
    path = _path(state_dir, part)
    try:
        report = decoded(read_file(path, MOST_BYTES), StartReport)
        return report if _is_held(path) else None
    except (OSError, DamagedError):
        return None


def _is_held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _path(state_dir: Path, part: str) -> Path:
    return state_dir / f"{part}-start.json"
