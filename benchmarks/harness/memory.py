"""What a store takes beside its payload, by what the system says that a process of its own takes: nothing is missed."""

import contextlib
import ctypes
import gc
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.harness.events import Events
from benchmarks.harness.stores import fill, open_store
from replay.fake import plan_ahead

_FLOATS = 2
"""Events are small, so that spare slots and what an allocator rounds up are small beside the index."""


def beyond_payload(rows: int, folder: Path | None, admission: str) -> tuple[float, float]:
    """Return the bytes an event beside those of the rows in memory, and what the allocator keeps beside them for later.

    Args:
        rows: events of the store; twice as many are offered.
        folder: of a disk tier, a tenth of which memory has room for; None: there is none.
        admission: who is kept.
    """
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


def _measure(rows: int, folder: Path | None, admission: str) -> tuple[float, float]:
    events, hot = Events(_FLOATS), 1.0 if folder is None else 0.1
    # What is loaded or allocated once for all stores belongs to none.
    with open_store(events, 1000, hot=hot, folder=folder and folder / "first", admission=admission) as store:
        fill(store, events, 10_000)
    _give_back()
    before = _resident()
    with open_store(events, rows, hot=hot, folder=folder, admission=admission) as store:
        fill(store, events, 2 * rows)
        plan_ahead(store, 0, 256)
        kept = _resident()
        _give_back()
        after = _resident()
        return (after - before - store.bytes["device"]) / len(store), (kept - after) / len(store)


def _give_back() -> None:
    """Have the allocator give free memory back to the system, where it can be asked to."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # an allocator other than that of glibc
            ctypes.CDLL(None).malloc_trim(0)


def _resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
