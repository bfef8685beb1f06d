"""Threads that wait for those of serving: on a CPU the kernel takes the core away from training, wherever it is."""

import contextlib
import math
import os
from pathlib import Path

_LOWEST = 19
_STEP = 1.25
"""What one level of nice is worth: a thread gets so many times as much of a core as one of the next level."""
_AUTOGROUP = Path("/proc/self/autogroup")
"""Empty where the kernel does not group this process: then it takes a level and does nothing with it."""


def nice_level(fraction: float) -> int:
    """Return the level at which threads get at least this fraction of a core that others want all of; 0: the lowest."""
    if not fraction:
        return _LOWEST
    return max(0, min(_LOWEST, math.floor(math.log((1 - fraction) / fraction, _STEP))))


def step_back(nice: int) -> str:
    """Let all threads of this process and of its children, now and to come, wait for those of other processes.

    On Linux a level is a thread's own, and threads that libraries have started at their import have theirs. Where the
    kernel groups by sessions (autogroup) it holds within one, so that a session of the learner's own gets it too:
    `anabranch up` starts each part in one. What is lower already stays so; without rights there is no way back.

    Returns:
        What was done, in words.
    """
    done = f"nice {nice}"
    for process in (os.getpid(), *_children(os.getpid())):
        for thread in _threads(process):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            if _AUTOGROUP.read_text():
                _AUTOGROUP.write_text(str(nice))
                done += ", its session too"
    return done


def _threads(process: int) -> list[int]:
    """Return the threads of a process, or the process alone where they cannot be told."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{process}/task")]  # noqa: PTH208 numbers, not paths
    except OSError:
        return [process]


def _children(process: int) -> list[int]:
    """Return the processes that this one has started, and theirs; none where they cannot be told."""
    found: list[int] = []
    for thread in _threads(process):
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                found += [int(child), *_children(int(child))]
    return found
