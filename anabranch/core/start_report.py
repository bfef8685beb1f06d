"""What a part does while it starts, before its first report: `<part>-start.json` in the state directory.

A process has one such file, as it has one log: whatever waits deep in the start can say so. Imports no torch.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.die_with_parent import lives
from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file

_own: list[tuple[Path, float]] = []
"""The file of this process, and when its start began; empty where nobody asks."""


class StartReport(msgspec.Struct, frozen=True):
    """How far the start of a part has come."""

    pid: int
    started: float
    """When it began, in seconds since 1970."""
    doing: str
    """What it does or waits for, as the rest of a sentence about it: "waits for the topics"."""


@contextlib.contextmanager
def starting(state_dir: Path, part: str) -> Iterator[None]:
    """Report the start of a part while the block runs, as `start_does` says.

    At the end the file is removed, unless it is another process's by then.
    """
    path = _path(state_dir, part)
    _own.append((path, time.time()))
    with contextlib.suppress(OSError):  # the start says what is wrong with the folder
        state_dir.mkdir(parents=True, exist_ok=True)
    start_does("imports its modules")
    try:
        yield
    finally:
        _own.clear()
        if (newest := read_start(state_dir, part)) is not None and newest.pid == os.getpid():
            with contextlib.suppress(OSError):
                path.unlink()


def start_does(doing: str) -> None:
    """Report what the start of this process does or waits for now; does nothing outside `starting`."""
    for path, started in _own:
        with contextlib.suppress(OSError):
            replace_file(path, msgspec.json.encode(StartReport(os.getpid(), started, doing)), durable=False)


def read_start(state_dir: Path, part: str) -> StartReport | None:
    """Return what the newest living process of a part said of its start, which may be over; None without one."""
    try:
        report = decoded(read_file(_path(state_dir, part), MOST_BYTES), StartReport)
    except (OSError, DamagedError):
        return None
    return report if lives(report.pid) else None


def _path(state_dir: Path, part: str) -> Path:
    return state_dir / f"{part}-start.json"
