"""The core for the measured process, and the cores for all others."""

import os


def split() -> tuple[set[int] | None, set[int] | None]:
    """Return the core for the measured process, and the others; None where affinity is not supported."""
    if not hasattr(os, "sched_setaffinity"):
        return None, None
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}
