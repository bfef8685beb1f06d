"""Where the payload of the events held lies: with a disk tier that has all of it, the device is a cache.

Which tier has a row is decided here, changes freely, and shows in no draw: a miss costs time and nothing else.

Legend: n rows of a call, m of them not in the cache, R bytes of a row, S slots.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.contents import TierFile
from replay.courier import Courier
from replay.disk import DiskTier
from replay.memory import MemoryTier
from replay.tier import Tier

_NOWHERE = -1
_NONE: NDArray[np.int64] = np.empty(0, np.int64)

log = logging.getLogger(__name__)


class Staged:
    """The n rows of a plan on their way to the device.

    What the cache has is read when this is made, so that its slots may be written again at once; the rest arrives from
    another thread.
    """

    def __init__(self, rows_nR: Tensor, late: NDArray[np.int64] = _NONE) -> None:
        """Take rows on the device; those in the places `late`, `[m]`, are still to be brought."""
        self.n = len(rows_nR)
        self._rows_nR = rows_nR
        self._places = late
        self._late: Tensor | None = None
        self.whole = np.ones(len(rows_nR), np.bool_)
        """Which of the n rows could be had; after `wait`."""
        self._arrived = threading.Event()
        if not len(late):
            self._arrived.set()
        self.source: tuple[NDArray[np.int64], NDArray[np.uint64]] = late, late.astype(np.uint64)
        """Slots and identities of the rows that are to arrive, `[m]` each."""

    def bring(self, disk: DiskTier) -> None:
        """Read the rest; in the thread that brings it."""
        whole = np.zeros(len(self._places), np.bool_)
        try:
            if self._rows_nR.device.type == "cpu":
                whole = disk.read_into(self._rows_nR, self._places, *self.source)
            else:
                self._late, whole = disk.read(*self.source)
        finally:
            self.whole[self._places[~whole]] = False
            self._arrived.set()

    def wait(self) -> float:
        """Wait until all rows are here, and return the seconds that it took."""
        begin = time.perf_counter()
        self._arrived.wait()
        return time.perf_counter() - begin

    def rows(self, n: int | None = None) -> Tensor:
        """Return those of the first n rows that are whole, uint8 `[<= n, R]`; on the device, and after `wait`."""
        rows_nR = self._rows_nR
        if self._late is not None:
            where = torch.from_numpy(self._places).to(rows_nR.device)
            rows_nR.index_copy_(0, where, self._late.to(rows_nR.device, non_blocking=True))
        if self.whole.all():
            return rows_nR[:n]
        return rows_nR[torch.from_numpy(np.flatnonzero(self.whole[:n])).to(rows_nR.device)]

    def late(self, which: NDArray[np.bool_]) -> Tensor:
        """Return those of the m rows that were brought which are asked for, on the device; after `wait` and `rows`."""
        return self._rows_nR[torch.from_numpy(self._places[which]).to(self._rows_nR.device)]

    @property
    def brought(self) -> NDArray[np.bool_]:
        """Which of the m rows that were to be brought are whole; after `wait`."""
        return self.whole[self._places]


@dataclass
class TierStats:
    """Running totals.

    Attributes:
        read: rows that were read for draws, by tier.
        stall_seconds: time that the step has waited for a tier.
    """

    read: dict[str, int] = field(default_factory=dict)
    stall_seconds: float = 0.0


class Tiers:
    """S slots, one for each event that the store may hold. Used by one thread, but for `read` and `sync`.

    A slot is written again only after every read of it was asked for that is to see what it has now: jobs for the disk
    are done in the order in which they are asked for.
    """

    def __init__(self, device: MemoryTier, disk: DiskTier | None) -> None:
        home = disk or device
        self.slots = home.slots
        self.durable = disk is not None
        """Whether the payload outlives the process, so that a cut need not hold it."""
        self.disk = disk
        self._all: tuple[Tier, ...] = (device,) if disk is None else (device, disk)
        self.stats = TierStats({tier.name: 0 for tier in self._all})
        self.ill: str | None = None
        self._device = device
        self._courier = Courier("disk-tier") if disk is not None else None
        self._lost: deque[tuple[NDArray[np.int64], NDArray[np.uint64]]] = deque()
        if disk is not None:
            self._tenant = np.zeros(disk.slots, np.uint64)
            self._cached = np.full(disk.slots, _NOWHERE, np.int32)
            self._room = np.arange(device.slots, dtype=np.int32)[::-1].copy()

    def rows(self, held: int) -> dict[str, int]:
        """Return the events by tier, when so many are held."""
        return {"device": held} if self.disk is None else {"device": self._cache_size, "disk": held}

    def bytes(self, held: int) -> dict[str, int]:
        """Return the bytes that they take, by tier."""
        rows = self.rows(held)
        return {tier.name: rows[tier.name] * tier.slot_bytes for tier in self._all}

    @property
    def bounds(self) -> dict[str, int]:
        """Bytes that each tier may hold."""
        return {tier.name: tier.slots * tier.slot_bytes for tier in self._all}

    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        """Put the rows of n events into free slots."""
        if self.disk is None or self._courier is None:
            self._device.write(slots, identity, rows_nR)
            return
        disk = self.disk

        def job() -> None:
            try:
                disk.write(slots, identity, rows_nR)
            except OSError as exc:
                self._lost.append((slots, identity))
                self._say(f"replay.disk: {disk.path} cannot be written: {exc.strerror}; events are not stored")
            else:
                self.ill = None

        self.stats.stall_seconds += self._courier.send(job, rows_nR.nbytes)
        self._tenant[slots] = identity
        self._cache(slots, torch.from_numpy(rows_nR))

    def stage(self, slots: NDArray[np.int64], identity: NDArray[np.uint64]) -> Staged:
        """Begin to bring the rows of n events to the device."""
        if self.disk is None or self._courier is None:
            self.stats.read["device"] += len(slots)
            return Staged(self._device.read(slots, identity)[0])
        disk, places = self.disk, self._cached[slots].astype(np.int64)
        misses = np.flatnonzero(places == _NOWHERE)
        # A miss takes the row of slot 0 for the moment: one gather instead of a gather and a scatter.
        rows_nR = self._device.read(np.maximum(places, 0), identity)[0]
        staged = Staged(rows_nR, misses)
        self.stats.read["device"] += len(slots) - len(misses)
        self.stats.read["disk"] += len(misses)
        if len(misses):
            staged.source = slots[misses], identity[misses]
            size = len(misses) * disk.slot_bytes
            self.stats.stall_seconds += self._courier.send(lambda: staged.bring(disk), size)
        return staged

    def arrive(self, staged: Staged, n: int | None = None) -> Tensor:
        """Return those of the first n rows, or of all, that could be had, uint8 `[<= n, R]` on the device."""
        self.stats.stall_seconds += staged.wait()
        rows_nR = staged.rows(n)
        slots, identity = staged.source
        whole = staged.brought
        if not whole.all():
            self._lost.append((slots[~whole], identity[~whole]))
        if len(slots) and len(self._room):
            still = whole & (self._tenant[slots] == identity) & (self._cached[slots] == _NOWHERE)
            self._cache(slots[still], staged.late(still))
        return rows_nR

    def lost(self) -> NDArray[np.int64]:
        """Return the slots of events whose rows were found lost since the last time, and that are there yet."""
        found = [self._lost.popleft() for _ in range(len(self._lost))]
        still = [slots[self._tenant[slots] == identity] for slots, identity in found]
        return np.unique(np.concatenate([_NONE, *still]))

    def take_up(self, slots: NDArray[np.int64], identity: NDArray[np.uint64]) -> None:
        """Learn that the disk tier's file has the rows of n events already; the cache fills as they are drawn."""
        self._tenant[slots] = identity

    @property
    def file(self) -> TierFile | None:
        """What has the payload of a cut, if it outlives the process."""
        return None if self.disk is None else TierFile(self.disk.path.name, self.disk.id)

    def staged(self, rows_nR: Tensor) -> Staged:
        """Return rows that are on the host, uint8 `[n, R]`, as a plan has them."""
        return Staged(rows_nR.to(self._device.device))

    def free(self, slots: NDArray[np.int64]) -> None:
        """Let go of what caches hold of events that have left."""
        if self.disk is not None:
            cached = self._cached[slots]
            self._room = np.concatenate([self._room, cached[cached != _NOWHERE]])
            self._cached[slots] = _NOWHERE
            self._tenant[slots] = 0

    def read(self, slots: NDArray[np.int64], identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        """Return rows that are written, uint8 `[n, R]` on the host, and which are whole. In any thread."""
        rows_nR, whole = (self.disk or self._device).read(slots, identity)
        return rows_nR.cpu(), whole

    def sync(self) -> None:
        """Wait until all that was written before is durable; raises OSError when it is not. In any thread."""
        if self.disk is not None and self._courier is not None:
            self._courier.drain()
            self.disk.sync()

    def close(self) -> None:
        """Let go of memory and files."""
        if self._courier is not None:
            self._courier.close()
        for tier in self._all:
            tier.close()

    @property
    def _cache_size(self) -> int:
        return self._device.slots - len(self._room)

    def _cache(self, slots: NDArray[np.int64], rows_nR: Tensor) -> None:
        """Keep as many of the rows on the device as there is room for."""
        n = min(len(slots), len(self._room))
        if n:
            places, self._room = self._room[len(self._room) - n :], self._room[: len(self._room) - n]
            self._cached[slots[:n]] = places
            self._device.put(places.astype(np.int64), rows_nR[:n])

    def _say(self, sentence: str) -> None:
        if self.ill != sentence:
            log.error("%s", sentence)
        self.ill = sentence
