"""What a store takes beside its payload, by what the system says that a process of its own takes: nothing is missed."""

import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from harness.events import Events
from harness.stores import fill, open_store

_FLOATS = 2
"""Events are small, so that spare slots and what an allocator rounds up are small beside the index."""


def beyond_payload(rows: int, folder: Path | None, admission: str) -> float:
    """Return the bytes an event beside those of the rows in memory, with a disk tier in `folder` if that is given."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as child:
        return child.submit(_measure, rows, folder, admission).result()


def no_room(needed_bytes: float) -> str | None:
    """Return why so much memory cannot be had here; None: it can."""
    import psutil

    free = psutil.virtual_memory().available
    if free > needed_bytes:
        return None
    return f"left out: it needs {needed_bytes / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free"


def _measure(rows: int, folder: Path | None, admission: str) -> float:
    events, hot = Events(_FLOATS), 1.0 if folder is None else 0.1
    # What is loaded or allocated once for all stores belongs to none.
    with open_store(events, 1000, hot=hot, folder=folder and folder / "first", admission=admission) as store:
        fill(store, events, 10_000)
    gc.collect()
    before = _resident()
    with open_store(events, rows, hot=hot, folder=folder, admission=admission) as store:
        fill(store, events, 2 * rows)
        store.plan_ahead(0, 256)
        gc.collect()
        beyond = _resident() - before - store.bytes["device"]
        return beyond / len(store)


def _resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
