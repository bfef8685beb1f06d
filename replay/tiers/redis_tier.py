"""The tier `redis`: a record for each slot under a key of its own, the same record as on disk; and how it is opened.

What a slot's key holds may be gone at any time (the server restarts empty, or evicts), or be another event's: the
checksum tells, and such a row is not whole. Keys are `PREFIX<generation>:<slot>`; a generation is the life of one
arrangement of slots, named by checkpoints, so that rows of another are never taken for these.

Legend: S slots, R bytes of a row, n rows of a call, m of them found.
"""

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.core.errors import SettingsError
from replay.config import RedisSettings
from replay.snapshot import StoreSnapshot, TierRef
from replay.tiers.checksum import CHECKSUM, row_sums
from replay.tiers.tier import SlowTier, TierContext, TierFactory

if TYPE_CHECKING:
    from replay.tiers.redis_server import RedisServer  # whose client is an extra

_KEY_BYTES = 128
"""Memory of a key beside its value: name, object, entry of the hash table. Measured: 75 to 125 with names of 45."""
_GENERATION = 16
"""Letters of the name of a generation of keys: each key has them."""
_CLASSES = 8
"""Allocators round sizes up to one of four to eight between two powers of two; four are reckoned with."""


class RedisTier:
    """S slots on a server that several tiers may share. Used by any thread; a write of a slot not beside its read."""

    name = "redis"

    def __init__(
        self,
        server: "RedisServer",
        generation: str,
        row_bytes: int,
        slots: int,
        *,
        pinned: bool = False,
        shared: bool = False,
    ) -> None:
        """Take S slots; where the server is `shared`, another tier closes it."""
        self.server = server
        self.id = generation
        """Tells these slots from those of any other arrangement."""
        self.slots = slots
        self.row_bytes = row_bytes
        self.slot_bytes = self.bytes_of(row_bytes)
        self._pinned = pinned
        self._shared = shared

    @property
    def file(self) -> TierRef:
        """What a checkpoint names for these slots to be found again."""
        return TierRef(self.name, self.id)

    @property
    def problem(self) -> str | None:
        """One sentence on why the server is not what it should be."""
        return self.server.problem

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

    def mark_named(self) -> None:
        """Nothing is kept on the server for checkpoints that are not there."""

    def close(self) -> None:
        """Let go of the server."""
        if not self._shared:
            self.server.close()

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


class RedisTierFactory(TierFactory):
    """Opens tiers in Redis, all on one server."""

    def __init__(self, section: RedisSettings | None, site: TierContext) -> None:
        self._section = section
        self._site = site
        self._server: RedisServer | None = None
        self._mine: RedisTier | None = None

    @property
    def slots(self) -> int:
        """The slots whose records and keys take its bytes."""
        assert self._section is not None
        return int(self._section.bytes) // RedisTier.bytes_of(self._site.row_bytes)

    def connect(self, opened: ExitStack, *, needed: bool) -> None:
        """Reach the server; one that is away and not needed is waited for in the background."""
        if self._section is None:
            return
        try:
            from replay.tiers.redis_server import RedisServer
        except ImportError as exc:  # an extra
            raise SettingsError(f"replay.redis needs {exc.name}; install it: pip install 'anabranch[redis]'") from exc
        assert self._site.keys
        server = RedisServer(self._section.url.get_secret_value(), f"anabranch:{self._site.keys}:")
        self._server = opened.enter_context(server)
        server.open(needed=needed)

    def owns(self, file: TierRef) -> bool:
        """A checkpoint names the generation."""
        return file.name == RedisTier.name

    def open_existing(self, contents: StoreSnapshot) -> RedisTier:
        """Open the slots that the checkpoint names."""
        standing = contents.standing
        assert standing.file is not None
        if self._server is None:
            raise SettingsError(
                f"the replay contents of checkpoint {standing.checkpoint} are in Redis, and replay.redis is not set; "
                f"set it again, "
                "or begin anew by moving the checkpoints away"
            )
        named = [*contents.index["slot"].tolist(), *standing.retired[:, 1].tolist()]
        return self._tier(standing.file.id, max(named, default=-1) + 1, shared=True)

    def open_primary(self, slots: int, source: SlowTier | None) -> RedisTier:
        """Return the slots of the checkpoint's generation where they are not too many, else of a new one."""
        if isinstance(source, RedisTier) and source.slots <= slots:
            self._mine = self._tier(source.id, slots)
        else:
            self._mine = self._tier(secrets.token_hex(_GENERATION // 2), slots)
        return self._mine

    def cache(self, slots: int, primary: SlowTier) -> RedisTier:
        """Return slots of the primary tier's generation, so that they are warm after a restart."""
        assert primary.file is not None
        self._mine = self._tier(primary.file.id[:_GENERATION], slots)
        return self._mine

    def cleanup_actions(self, *, first: bool) -> list[Callable[[], None]]:
        """Return what sweeps the server of all but what was opened; the first process does so at once."""
        if self._mine is None:
            return []
        if not first:
            return [self._mine.sweep_later]
        self._mine.sweep_later()
        return []

    def _tier(self, generation: str, slots: int, *, shared: bool = False) -> RedisTier:
        assert self._server is not None
        return RedisTier(self._server, generation, self._site.row_bytes, slots, pinned=self._site.pinned, shared=shared)
