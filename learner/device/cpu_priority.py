"""CPU priority of training: lowered while a server runs a batch, restored after it, on Linux.

On a CPU the kernel preempts training for serving at any point, as far as training has a lower priority. A level that
stays low would leave training next to nothing once another program has work, so it is low only while a batch runs.
Raising a priority requires privileges (root, CAP_SYS_NICE, or RLIMIT_NICE of 20): without them, training takes a
moderate level once, and keeps it.

A level that is restored says nothing of how soon a request is seen: the kernel lets a thread that runs finish its slice
(3 ms) before one that wakes. A server therefore asks for short slices (`sched(7)`, EEVDF; Linux 6.12), which cost
nobody's share: a thread that asks for less at a time has its turn sooner.
"""

import contextlib
import ctypes
import math
import os
import platform
import struct
import threading
from pathlib import Path

LOWEST = 19
_MODERATE = 5
"""A quarter of a core next to one busy thread: what is lowered permanently must not starve."""
_STEP = 1.25
"""Ratio of CPU time between a thread and one at the next nice level."""
_AUTOGROUP = "/proc/{}/autogroup"
"""Empty where the kernel does not group this process: writing a level has no effect then."""
_ATTRIBUTES = struct.Struct("IIQiIQQQ")
"""`struct sched_attr`: size, policy, flags, nice, priority, then nanoseconds: runtime (the slice), deadline, period."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}
"""`sched_setattr`, which the C library does not have, by machine."""
_SHORTEST_SLICE = 100_000
"""In nanoseconds; the least that the kernel takes."""


def nice_level(fraction: float) -> int:
    """Return the nice level at which a thread gets at least `fraction` of a busy core; the lowest priority for 0."""
    if not fraction:
        return LOWEST
    return max(0, min(LOWEST, math.floor(math.log((1 - fraction) / fraction, _STEP))))


def can_restore() -> bool:
    """Return whether this thread may lower its priority and raise it again; on Linux alone. Changes nothing then."""
    if not Path("/proc/self/task").exists():
        return False
    before, thread = os.getpriority(os.PRIO_PROCESS, 0), threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, min(LOWEST, before + 1))
        os.setpriority(os.PRIO_PROCESS, thread, before)
    except OSError:
        return False
    return os.geteuid() == 0 or not leads_group()  # others may write a session's level ten times a second


def shorten_slice() -> bool:
    """Let this thread, and those that it starts from now on, run soon after they wake, on Linux.

    Returns:
        Whether the kernel took it; one before 6.12 takes it and changes nothing.
    """
    call = _SET_ATTRIBUTES.get(platform.machine()) if platform.system() == "Linux" else None
    if call is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, _SHORTEST_SLICE, 0, 0)
    return bool(ctypes.CDLL(None).syscall(call, 0, attributes, 0) == 0)


def leads_group() -> bool:
    """Return whether the kernel schedules by sessions (autogroup), and this process has one to itself.

    A nice level counts within the session only, then. `anabranch up` starts each part in its own.
    """
    with contextlib.suppress(OSError):
        return os.getsid(0) == os.getpid() and bool(Path(_AUTOGROUP.format("self")).read_text())
    return False


def start_of(process: int) -> int:
    """Return when a process was started, in ticks since the boot: with its pid it names a process; 0 if it is not here.

    Pids mean nothing between containers that share a volume.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def computing_threads() -> list[int]:
    """Return this thread, and those of the process that Python did not start: the pools of torch."""
    here = threading.get_native_id()
    others = {thread.native_id for thread in threading.enumerate()} - {here}
    return [here, *(thread for thread in _threads(os.getpid()) if thread not in others and thread != here)]


def set_level(process: int, threads: list[int], group: bool, nice: int) -> None:
    """Set the nice level of threads, and of the session of their process; passes over those that have ended."""
    for thread in threads:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
    if group:
        with contextlib.suppress(OSError):
            Path(_AUTOGROUP.format(process)).write_text(str(nice))


def step_back(nice: int) -> str:
    """Lower the priority of all threads of this process and its children permanently, to a moderate level at most.

    On Linux each thread has its own level, including threads that libraries started at import. Threads at a lower
    priority keep it.

    Returns:
        A description of the change, for the log and the report.
    """
    nice = min(nice, _MODERATE)
    done = f"nice {nice}"
    for process in (os.getpid(), *_children(os.getpid())):
        for thread in _threads(process):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
    if leads_group():
        set_level(os.getpid(), [], True, nice)
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
