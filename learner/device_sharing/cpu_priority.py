"""Lowers the CPU priority of training threads, so that the kernel preempts them for serving at any point."""

import contextlib
import math
import os
from pathlib import Path

_LOWEST = 19
_STEP = 1.25
"""Ratio of CPU time between a thread and one at the next nice level."""
_AUTOGROUP = Path("/proc/self/autogroup")
"""Empty where the kernel does not group this process: writing a level has no effect then."""


def nice_level(fraction: float) -> int:
    """Return the nice level at which a thread gets at least `fraction` of a busy core; the lowest priority for 0."""
    if not fraction:
        return _LOWEST
    return max(0, min(_LOWEST, math.floor(math.log((1 - fraction) / fraction, _STEP))))


def step_back(nice: int) -> str:
    """Set the nice level of all threads of this process and its children, including threads that start later.

    On Linux each thread has its own level, including threads that libraries started at import. Where the kernel groups
    by sessions (autogroup), a level counts within the session only, so the learner's session gets the level too if it
    has one to itself: `anabranch up` starts each part in its own. Threads at a lower priority keep it. Without
    privileges this cannot be undone.

    Returns:
        A description of the change, for the log and the report.
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
    """Return the threads of a process, or the process alone where they cannot be listed."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{process}/task")]  # noqa: PTH208 numbers, not paths
    except OSError:
        return [process]


def _children(process: int) -> list[int]:
    """Return all descendants of a process; none where they cannot be listed."""
    descendants: list[int] = []
    for thread in _threads(process):
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                descendants += [int(child), *_children(int(child))]
    return descendants
