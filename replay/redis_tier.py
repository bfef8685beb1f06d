"""The tier `redis`: a record for each slot under a key of its own, the same record as on disk.

What a slot's key holds may be gone at any time (the server restarts empty, or evicts), or be another event's: the
checksum tells, and such a row is not whole. Keys are `PREFIX<generation>:<slot>`; a generation is the life of one
arrangement of slots, named by cuts, so that rows of another are never taken for these.

Legend: S slots, R bytes of a row, n rows of a call, m of them found.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.record import CHECKSUM, row_sums

if TYPE_CHECKING:
    from replay.redis import RedisServer  # whose client is an extra

_KEY_BYTES = 128
"""Memory of a key beside its value: name, object, entry of the hash table. Measured: 75 to 125 with names of 45."""
_CLASSES = 8
"""Allocators round sizes up to one of four to eight between two powers of two; four are reckoned with."""


class RedisTier:
    """S slots on a server that several tiers may share. Used by any thread; a write of a slot not beside its read."""

    name = "redis"

    def __init__(
        self, server: "RedisServer", generation: str, row_bytes: int, slots: int, *, pinned: bool = False
    ) -> None:
        self.server = server
        self.id = generation
        """Tells these slots from those of any other arrangement."""
        self.slots = slots
        self.row_bytes = row_bytes
        self.slot_bytes = self.bytes_of(row_bytes)
        self._pinned = pinned

    @staticmethod
    def bytes_of(row_bytes: int) -> int:
        """Return the memory that a slot takes there: the record as the allocator rounds it up, and its key."""
        record = row_bytes + CHECKSUM.itemsize
        step = max(16, (1 << (record - 1).bit_length()) // _CLASSES)
        return -(-record // step) * step + _KEY_BYTES

    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        """Set n records; raises OSError when the server is away or refuses, and then some may be set."""
        n, size = len(slots), self.row_bytes + CHECKSUM.itemsize
        records = np.empty((n, size), np.uint8)
        records[:, : self.row_bytes] = rows_nR
        sums = row_sums(np.ascontiguousarray(rows_nR).reshape(-1).data, self.row_bytes, range(n)) ^ identity
        records[:, self.row_bytes :] = sums.astype(CHECKSUM).view(np.uint8).reshape(n, CHECKSUM.itemsize)
        flat = records.reshape(-1).data
        self.server.put(self._keys(slots), [flat[at * size : (at + 1) * size] for at in range(n)])

    def read(self, slots: NDArray[np.int64], identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        """Read n records into new memory, pinned if this tier was made so; raises OSError when the server is away."""
        rows_nR = torch.empty((len(slots), self.row_bytes), dtype=torch.uint8, pin_memory=self._pinned)
        return rows_nR, self.read_into(rows_nR, np.arange(len(slots)), slots, identity)

    def read_into(
        self, rows_NR: Tensor, places: NDArray[np.int64], slots: NDArray[np.int64], identity: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Read n records into `places` of rows on the host; raises OSError when the server is away."""
        size = self.row_bytes + CHECKSUM.itemsize
        values = self.server.get(self._keys(slots), size)
        right = [(at, value) for at, value in enumerate(values) if value is not None and len(value) == size]
        found = np.array([at for at, _ in right], np.intp)
        records = np.frombuffer(b"".join(value for _, value in right), np.uint8).reshape(-1, size)
        rows, into = rows_NR.numpy(), places[found]
        rows[into] = records[:, : self.row_bytes]
        sums = np.ascontiguousarray(records[:, self.row_bytes :]).view(CHECKSUM).reshape(-1)
        whole = np.zeros(len(slots), np.bool_)
        whole[found] = sums == row_sums(rows.reshape(-1).data, self.row_bytes, into.tolist()) ^ identity[found]
        return whole

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Remove n records; raises OSError when the server is away, and then some may be removed."""
        self.server.remove(self._keys(slots))

    def sync(self) -> None:
        """What the server has outlives the process as far as the server does."""

    def close(self) -> None:
        """Let go of nothing: the server may have other tiers."""

    def sweep_later(self, keep: frozenset[str] = frozenset()) -> None:
        """Remove what earlier processes left on the server: all but these slots and the generations `keep`."""
        mine, slots = self.id, self.slots

        def is_orphan(key: str) -> bool:
            generation, _, slot = key.rpartition(":")
            return (
                bool(generation)
                and generation not in keep
                and (generation != mine or not slot.isdigit() or int(slot) >= slots)
            )

        self.server.sweep_later(is_orphan)

    def _keys(self, slots: NDArray[np.int64]) -> list[str]:
        return [f"{self.id}:{slot}" for slot in slots.tolist()]
