"""Sizes of the files of a state directory, and how fast its disk takes more."""

import contextlib
import os
import tempfile
import time
from pathlib import Path

from learner.state_dir.checkpoint import ROWS, SEGMENT

PAGE = 4096
_TRIAL_BYTES = 8 << 20
_TRIALS = 4


def version_bytes(state_dir: Path) -> int | None:
    """Return the size of the newest version; None without one."""
    newest = _newest(state_dir / "versions")
    return None if newest is None else _size(newest)


def checkpoint_bytes(state_dir: Path) -> int | None:
    """Return the size of the newest checkpoint with weights, without its stored events; None without one."""
    newest = _newest(state_dir / "checkpoints")
    if newest is None or not any(newest.rglob("*.safetensors")):
        return None
    return _size(newest, (SEGMENT, ROWS))


def pages(size: float) -> int:
    """Return the bytes of whole pages."""
    return int(-(-size // PAGE)) * PAGE


def write_rate(folder: Path) -> float:
    """Return the bytes a second at which a disk takes files of 8 MB, each with its fsync."""
    data, begin = os.urandom(_TRIAL_BYTES), time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_TRIALS):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    return _TRIALS * _TRIAL_BYTES / (time.perf_counter() - begin)


def _newest(folder: Path) -> Path | None:
    numbers = [int(path.parent.name) for path in folder.glob("*/manifest.json") if path.parent.name.isdigit()]
    return folder / str(max(numbers)) if numbers else None


def _size(folder: Path, without: tuple[str, ...] = ()) -> int:
    total = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith(without or ("/",)):
            with contextlib.suppress(FileNotFoundError):  # the learner has just deleted it
                total += pages(path.stat().st_size)
    return total
