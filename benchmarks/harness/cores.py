"""Which cores are for what is measured."""

import os


def split() -> tuple[set[int] | None, set[int] | None]:
    """Return the core for what is measured, and the others; None where cores cannot be chosen."""
    if not hasattr(os, "sched_setaffinity"):
        return None, None
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}
