"""The core for the measured process, and the cores for all others; cores that a process has."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import psutil

from anabranch.commands.planning.calibrating.process_usage import cpu_seconds


def split() -> tuple[set[int] | None, set[int] | None]:
    """Return the core for the measured process, and the others; None where affinity is not supported."""
    if not hasattr(os, "sched_setaffinity"):
        return None, None
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


@contextlib.contextmanager
def kept_to(cores: set[int] | None) -> Iterator[None]:
    """Keep this thread, and what it starts, to these cores in this context; do nothing without any."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def listener(address: str) -> int | None:
    """Return the process of this host that listens at `HOST:PORT`; None if there is none."""
    port = int(address.rpartition(":")[2])
    found = psutil.net_connections(kind="tcp")
    return next((each.pid for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port), None)


@contextlib.contextmanager
def cores_of(pid: int | None) -> Iterator[Callable[[], float]]:
    """Yield what returns the cores that a process had in this context, on average, once it has ended; 0 of none."""
    begin, used = time.monotonic(), 0.0 if pid is None else cpu_seconds(pid)
    result = list[float]()
    yield lambda: result[0]
    result.append(0.0 if pid is None else (cpu_seconds(pid) - used) / (time.monotonic() - begin))
