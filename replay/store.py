"""The store: what has been seen, kept for rehearsal.

A composition of four answers: who enters and who leaves (`Reservoir`), who is drawn (`Sampler`), where the payload lies
(`Tier`), how fast (the caller, who asks for so many a step).

Legend: N events offered, H events held, n drawn.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ingest.block import Array, TopicPartition
from ingest.errors import SettingsError
from ingest.identity import identity_hash, partition_base
from ingest.schema import Schema
from replay.admission import Reservoir, importance, priorities
from replay.config import ReplaySettings
from replay.memory import MemoryTier
from replay.sampler import SAMPLERS, Sampler
from replay.tier import Tier

log = logging.getLogger(__name__)

_ENTRY = np.dtype(
    [
        ("priority", "f8"),
        ("offset", "i8"),
        ("slot", "i4"),
        ("partition", "i4"),
        ("row", "i4"),
        ("label", "i4"),
        ("time_ms", "i8"),
        ("identity", "u8"),
        ("key_hash", "u8"),
    ]
)
"""What is known of each event beside its payload, 56 bytes."""


@dataclass(frozen=True)
class Plan:
    """The choice of events for one step: positions in the order of the index, int64 `[n]`. Valid until the next add."""

    step: int
    positions: NDArray[np.int64]


@dataclass(frozen=True)
class Contents:
    """What a store holds at one moment, for a cut.

    Attributes:
        index: uint8 `[H, bytes of an entry]`, what is known of each event beside its payload.
        payload: uint8 `[H, R]` on the CPU, rows of the tier in the order of the index.
        threshold: the reservoir's; infinity while everything is admitted.
        offered: how many events it is a sample of.
        watermarks: by index of the partition, the highest `(offset, row)` that was offered.
    """

    index: NDArray[np.uint8]
    payload: Tensor
    threshold: float
    offered: int
    watermarks: Mapping[int, tuple[int, int]]


@dataclass(frozen=True)
class Held:
    """A store's index at a step boundary; its payload is read by `Store.contents` while the store goes on."""

    index: NDArray[np.void]
    threshold: float
    offered: int
    watermarks: Mapping[int, tuple[int, int]]


@dataclass(frozen=True)
class Draw:
    """n events as arrays on the learner's device.

    Attributes:
        columns: those of the schema's payload, each `[n, ...]`.
        importance: float32 `[n]`, the weight with which each stands for all events of its weight that were offered.
    """

    columns: Mapping[str, Tensor]
    importance: Tensor

    def __len__(self) -> int:
        return len(self.columns["label"])


class Store:
    """At most `reservoir.limit` events, in tiers. Used by one thread, but for `rows` and `bytes`.

    Idempotent: an event is admitted by its priority alone, and one that is held already is not added again. In the
    normal case events of a partition come in rising order, and a watermark makes that check free.
    """

    def __init__(self, reservoir: Reservoir, sampler: Sampler, tier: Tier, seed: int) -> None:
        slots = tier.slots
        assert slots > reservoir.limit + 1
        self.burst = (slots - reservoir.limit) // 2
        """Events that are inserted at once."""
        self._reservoir = reservoir
        self._sampler = sampler
        self._tier = tier
        self._seed = seed
        self._index = np.zeros(slots, _ENTRY)
        self._free = np.arange(slots, dtype=np.int32)[::-1].copy()
        self._held = 0
        self._watermarks: dict[int, tuple[int, int]] = {}
        self._kept: NDArray[np.int32] | None = None
        self._offered = 0

    def __len__(self) -> int:
        return self._held

    @property
    def rows(self) -> dict[str, int]:
        """Events held, by tier."""
        return {self._tier.name: self._held}

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of the payload held, by tier."""
        return {self._tier.name: self._held * self._tier.row_bytes}

    def add(self, columns: Mapping[str, Array], partitions: Sequence[TopicPartition]) -> int:
        """Offer N events, and return how many were admitted.

        Args:
            columns: a block's columns, each `[N, ...]`; they are copied.
            partitions: the table that the column `partition` points into.
        """
        bases = np.array([partition_base(name) for name in partitions], np.uint64)
        where = columns["partition"].astype(np.int64)
        offset, row = columns["offset"].astype(np.int64), columns["row"].astype(np.int32)
        identity = identity_hash(bases[where], offset, row, self._seed)
        priority = priorities(identity, columns["weight"].astype(np.float32))
        new = self._is_new(where, offset, row, identity, self._reservoir.admits(priority))
        self._offered += int(np.count_nonzero(new))
        admitted = np.flatnonzero(new & self._reservoir.admits(priority))
        count = len(admitted)
        while len(admitted):
            self._insert(admitted[: self.burst], priority, identity, columns)
            if self._held > self._reservoir.limit:
                self._evict()
            admitted = admitted[self.burst :]
            admitted = admitted[self._reservoir.admits(priority[admitted])]  # the threshold may have fallen
        return count

    def plan(self, step: int, n: int) -> Plan:
        """Choose n events for a step, or all when fewer are held."""
        return Plan(step, self._sampler.choose(self._held, n, self._seed, step))

    def fetch(self, plan: Plan) -> Draw:
        """Return the events of a plan."""
        columns = self._tier.get(self._index["slot"][plan.positions].astype(np.int64))
        share = self._held / max(1, self._offered)
        return Draw(columns, importance(columns["weight"], self._reservoir.threshold, share))

    def hold(self) -> Held:
        """Copy the index, and keep every slot in it as it is until `let_go`: slots freed meanwhile are not reused.

        Raises:
            AssertionError: an earlier hold was not let go.
        """
        assert self._kept is None
        self._kept = np.empty(0, np.int32)
        return Held(self._index[: self._held].copy(), self._reservoir.threshold, self._offered, dict(self._watermarks))

    def contents(self, held: Held) -> Contents:
        """Read the payload of what was held. May run in another thread until `let_go`."""
        payload = self._tier.rows(held.index["slot"].astype(np.int64))
        index = held.index.copy()
        index["slot"] = 0
        return Contents(
            index.view(np.uint8).reshape(len(index), _ENTRY.itemsize),
            payload,
            held.threshold,
            held.offered,
            held.watermarks,
        )

    def let_go(self) -> None:
        """End a hold: slots freed since are used again."""
        if self._kept is not None:
            self._free = np.concatenate([self._free, self._kept])
            self._kept = None

    @property
    def reserve(self) -> int:
        """Slots that can be filled before a hold has to end."""
        return len(self._free)

    def restore(self, contents: Contents) -> None:
        """Take up contents in place of what is held; raises SettingsError when they do not fit this store."""
        rows = len(contents.index)
        if contents.index.shape[1:] != (_ENTRY.itemsize,) or contents.payload.shape[1:] != (self._tier.row_bytes,):
            raise SettingsError("the cut's replay contents have another layout than this store")
        index = np.ascontiguousarray(contents.index).reshape(-1).view(_ENTRY).copy()
        self._reservoir.threshold, self._offered = contents.threshold, contents.offered
        self._watermarks = dict(contents.watermarks)
        keep = np.ones(rows, np.bool_)
        if rows > self._reservoir.limit:
            keep = self._reservoir.lower(index["priority"])
            index, rows = index[keep], int(keep.sum())
        slots = np.arange(rows, dtype=np.int32)
        index["slot"] = slots
        self._index[:rows], self._held = index, rows
        self._free = np.arange(rows, len(self._index), dtype=np.int32)[::-1].copy()
        self._tier.put_rows(slots.astype(np.int64), contents.payload[torch.from_numpy(keep)])

    def close(self) -> None:
        """Let go of the tiers."""
        self._tier.close()

    def _is_new(
        self,
        where: NDArray[np.int64],
        offset: NDArray[np.int64],
        row: NDArray[np.int32],
        identity: NDArray[np.uint64],
        candidates: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Return which of N events are offered for the first time or are at least not held, and move the watermarks.

        Events that rise within their partition and beyond its watermark are new; of others only candidates are looked
        up, and the rest is taken for old.
        """
        rising = True
        for partition in np.unique(where).tolist():
            mine = where == partition
            at, line = offset[mine], row[mine]
            steps = np.diff(at)
            highest = np.lexsort((line, at))[-1]
            first, last = (int(at[0]), int(line[0])), (int(at[highest]), int(line[highest]))
            mark = self._watermarks.get(partition, (-1, -1))
            rising &= bool(((steps > 0) | ((steps == 0) & (np.diff(line) > 0))).all()) and first > mark
            self._watermarks[partition] = max(last, mark)
        if rising:
            return np.ones(len(where), np.bool_)
        new = np.zeros(len(where), np.bool_)
        new[np.unique(identity, return_index=True)[1]] = True
        new &= candidates
        new[new] = ~np.isin(identity[new], self._index["identity"][: self._held])
        return new

    def _insert(
        self,
        rows: NDArray[np.intp],
        priority: NDArray[np.float64],
        identity: NDArray[np.uint64],
        columns: Mapping[str, Array],
    ) -> None:
        begin, end = self._held, self._held + len(rows)
        slots = self._free[len(self._free) - len(rows) :]
        self._free = self._free[: len(self._free) - len(rows)]
        entry = self._index[begin:end]
        entry["priority"], entry["identity"], entry["slot"] = priority[rows], identity[rows], slots
        for name in ("offset", "partition", "row", "time_ms", "key_hash"):
            entry[name] = columns[name][rows]
        entry["label"] = columns["label"][rows] if columns["label"].dtype.kind == "i" else 0
        self._tier.put(slots.astype(np.int64), {name: column[rows] for name, column in columns.items()})
        self._held = end

    def _evict(self) -> None:
        held = self._index[: self._held]
        stays = self._reservoir.lower(held["priority"])
        if self._kept is None:
            self._free = np.concatenate([self._free, held["slot"][~stays]])
        else:
            self._kept = np.concatenate([self._kept, held["slot"][~stays]])
        kept = held[stays]
        self._index[: len(kept)] = kept
        self._held = len(kept)


def build_store(settings: ReplaySettings, schema: Schema, device: torch.device, seed: int) -> Store:
    """Compose the store that `[replay]` asks for, with its memory tier on `device`.

    Raises:
        SettingsError: `device_bytes` cannot hold a single event beside the room for a burst.
    """
    payload = schema.payload()
    row_bytes = MemoryTier.row_bytes_of(payload)
    fits = int(settings.device_bytes) // row_bytes
    k = min(settings.capacity, fits)
    while k > 0 and (too_many := k + _spare(k) - fits) > 0:
        k -= max(1, too_many * 8 // 9)
    if k < 1:
        raise SettingsError(
            f"replay.device_bytes = {int(settings.device_bytes)} is too small: an event has {row_bytes} bytes, and "
            f"{_spare(1)} slots are needed beside those for events"
        )
    if k < settings.capacity:
        log.warning("replay.device_bytes holds %d events of %d bytes, not %d", k, row_bytes, settings.capacity)
    reservoir = Reservoir(k)
    try:
        tier = MemoryTier(payload, k + _spare(k), device)
    except RuntimeError as exc:
        raise SettingsError(
            f"replay: {k} events of {row_bytes} bytes cannot be had on {device}; lower capacity or device_bytes: "
            f"{str(exc).splitlines()[0]}"
        ) from exc
    return Store(reservoir, SAMPLERS[settings.sampling](), tier, seed)


def _spare(k: int) -> int:
    """Slots beside k: the reservoir's slack, what one insertion brings, and what is replaced while a cut is written."""
    return Reservoir(k).limit - k + 2 * max(64, min(1024, k // 32)) + k // 16
