"""The memory of a store without its payload: the growth of a separate process, as the system reports it."""

import contextlib
import ctypes
import gc
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from anabranch.replay.metrics import StoreFigures
from anabranch.testing.stores import plan_ahead
from benchmarks.harness.events import Events
from benchmarks.harness.stores import fill, open_store

_FLOATS = 2
"""Events are small, so that spare slots and the allocator's rounding are small compared with the index."""


def beyond_payload(rows: int, folder: Path | None, admission: str) -> tuple[float, float]:
    """Return two numbers of bytes per event: used without the rows in memory, and kept by the allocator for later.

    Args:
        rows: events of the store; twice as many are added.
        folder: of a disk tier, of which a tenth fits in memory; None: there is no disk tier.
        admission: the policy.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as child:
        return child.submit(_measure, rows, folder, admission).result()


def memory_shortage(needed_bytes: float) -> str | None:
    """Return why `needed_bytes` of memory are not available; None: they are."""
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
    give_back()
    before = resident()
    with open_store(events, rows, hot=hot, folder=folder, admission=admission) as store:
        fill(store, events, 2 * rows)
        plan_ahead(store, 0, 256)
        kept = resident()
        give_back()
        after = resident()
        return (after - before - StoreFigures.of(store).bytes["device"]) / len(store), (kept - after) / len(store)


def give_back() -> None:
    """Have the allocator give free memory back to the system, where it can be asked to."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # an allocator other than that of glibc
            ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
