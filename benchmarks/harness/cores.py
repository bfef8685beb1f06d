"""The core for the measured process, and the cores for all others."""

import contextlib
import os
from collections.abc import Iterator


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
