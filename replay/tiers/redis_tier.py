"""The tier `redis`: one key for each slot, whose value is a record as on disk.

The value of a key may vanish at any time (the server restarts empty, or evicts it), or belong to another event: the
checksum detects both, and such a row is invalid. Keys are `PREFIX<generation>:<slot>`. A generation identifies one
assignment of events to slots; checkpoints name it, so that rows of another one are never mixed up with these. The value
of `PREFIX<generation>:intact` lists the checkpoints whose rows are there: it vanishes with them.

Legend: S slots, R bytes of a row, n rows of a call.
"""

import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.core.failures import away_is_dependency
from anabranch.replay.settings import RedisSettings
from anabranch.replay.snapshot import StoreSnapshot, TierRef
from anabranch.replay.tiers.tier import CHECKSUM, SlowTier, TierContext, TierFactory, row_sums

if TYPE_CHECKING:
    from anabranch.replay.tiers.redis_server import RedisServer  # whose client is an extra

log = logging.getLogger(__name__)

_KEY_BYTES = 128
"""Memory of a key without its value: name, object, entry of the hash table. Measured: 75 to 125 with names of 45."""
_GENERATION = 16
"""Letters of the name of a generation, which each key contains."""
_INTACT = "intact"
"""The end of the key with the list of checkpoints, in place of a slot."""
_MOST_LISTED = 63
_MOST_BYTES = 4096
"""Of that list."""
_CLASSES = 8
"""Allocators round sizes up to one of four to eight steps between two powers of two; this assumes four."""


class RedisTier(SlowTier):
    """S slots on a server that several tiers may share. Any thread may use it, except to write a slot that is read.

    Rows outlive the process as long as the server keeps them, and the next start without checkpoints sweeps the keys:
    `sync` and `mark_named` have nothing to do.
    """

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
        """Use a server that is connected; if it is `shared`, another tier closes it."""
        self.server = server
        self.id = generation
        """Distinguishes these slots from those of other assignments."""
        self.file = TierRef(self.name, generation)
        self.slots = slots
        self.row_bytes = row_bytes
        self.slot_bytes = self.bytes_of(row_bytes)
        self.pinned = pinned
        self._shared = shared

    @property
    @override
    def problem(self) -> str | None:
        return self.server.problem

    @staticmethod
    def bytes_of(row_bytes: int) -> int:
        """Return the memory that a slot takes on the server: the record, rounded up by the allocator, and its key."""
        record = row_bytes + CHECKSUM.itemsize
        step = max(16, (1 << (record - 1).bit_length()) // _CLASSES)
        return -(-record // step) * step + _KEY_BYTES

    @override
    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]) -> None:
        n, size = len(slots), self.row_bytes + CHECKSUM.itemsize
        records = np.empty((n, size), np.uint8)
        records[:, : self.row_bytes] = rows_nR
        sums = row_sums(np.ascontiguousarray(rows_nR).reshape(-1).data, self.row_bytes, range(n)) ^ identity
        records[:, self.row_bytes :] = sums.astype(CHECKSUM).view(np.uint8).reshape(n, CHECKSUM.itemsize)
        flat = records.reshape(-1).data
        self.server.put(self._keys(slots), [flat[at * size : (at + 1) * size] for at in range(n)])

    @override
    def read_into(
        self, rows_NR: Tensor, positions: NDArray[np.int64], slots: NDArray[np.int64], identity: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        size = self.row_bytes + CHECKSUM.itemsize
        values = self.server.get(self._keys(slots), size)
        complete = [(at, value) for at, value in enumerate(values) if value is not None and len(value) == size]
        present = np.array([at for at, _ in complete], np.intp)
        records = np.frombuffer(b"".join(value for _, value in complete), np.uint8).reshape(-1, size)
        rows, into = rows_NR.numpy(), positions[present]
        rows[into] = records[:, : self.row_bytes]
        sums = np.ascontiguousarray(records[:, self.row_bytes :]).view(CHECKSUM).reshape(-1)
        valid = np.zeros(len(slots), np.bool_)
        valid[present] = sums == row_sums(rows.reshape(-1).data, self.row_bytes, into.tolist()) ^ identity[present]
        return valid

    @override
    def erase(self, slots: NDArray[np.int64]) -> None:
        self.server.remove(self._keys(slots))

    @override
    def mark_intact(self, number: int, stamp: str, oldest: int) -> None:
        kept = [each for each in self._listed() if each[0] >= oldest]
        self._list([*kept[-_MOST_LISTED:], (number, stamp)])

    def lists(self, stamp: str) -> bool:
        """Return whether the server has the rows of the checkpoint with this stamp; raises OSError."""
        return any(stamp == each for _, each in self._listed())

    def unlist_after(self, number: int) -> None:
        """Record that slots which only checkpoints after this one name may be written; raises OSError."""
        listed = self._listed()
        if len(kept := [each for each in listed if each[0] <= number]) < len(listed):
            self._list(kept)

    @override
    def close(self) -> None:
        if not self._shared:
            self.server.close()

    def sweep_later(self, keep: frozenset[str] = frozenset()) -> None:
        """Remove the keys of earlier processes in the background: all but these slots and the generations `keep`."""

        def is_orphan(key: str) -> bool:
            generation, _, slot = key.rpartition(":")
            return (
                bool(generation)
                and generation not in keep
                and (generation != self.id or slot != _INTACT)
                and (generation != self.id or not slot.isdigit() or int(slot) >= self.slots)
            )

        self.server.sweep_later(is_orphan)

    def _listed(self) -> list[tuple[int, str]]:
        """Return number and stamp of the checkpoints whose rows are there."""
        (value,) = self.server.get([f"{self.id}:{_INTACT}"], _MOST_BYTES)
        try:
            return [] if value is None else msgspec.json.decode(value, type=list[tuple[int, str]])
        except msgspec.MsgspecError:  # another user has written it
            return []

    def _list(self, checkpoints: list[tuple[int, str]]) -> None:
        self.server.put([f"{self.id}:{_INTACT}"], [memoryview(msgspec.json.encode(checkpoints))])

    def _keys(self, slots: NDArray[np.int64]) -> list[str]:
        return [f"{self.id}:{slot}" for slot in slots.tolist()]


class RedisTierFactory(TierFactory):
    """Opens tiers in Redis, all on one server."""

    def __init__(self, section: RedisSettings | None, context: TierContext) -> None:
        self._section = section
        self._context = context
        self._server: RedisServer | None = None
        self._opened: RedisTier | None = None

    @property
    @override
    def slots(self) -> int:
        assert self._section is not None
        return int(self._section.bytes) // RedisTier.bytes_of(self._context.row_bytes)

    @override
    def connect(self, opened: ExitStack, *, needed: bool) -> None:
        if self._section is None:
            return
        with needs("replay.redis", "redis", "redis"):
            from anabranch.replay.tiers.redis_server import RedisServer
        assert self._context.keys
        server = RedisServer(self._section.url.get_secret_value(), f"anabranch:{self._context.keys}:")
        self._server = opened.enter_context(server)
        server.open(needed=needed)
        if server.problem is None:
            with suppress(OSError):  # a server need not say
                for _, sentence in server.check_memory(int(self._section.bytes), is_cache=not needed):
                    log.warning("replay.redis: %s", sentence)

    @override
    def owns(self, file: TierRef) -> bool:
        return file.name == RedisTier.name

    @override
    def open_existing(self, contents: StoreSnapshot) -> RedisTier:
        state = contents.state
        assert state.file is not None
        if self._server is None:
            raise SettingsError(
                f"the replay contents of checkpoint {state.checkpoint} are in Redis, and replay.redis is not set; "
                "set it again, or start empty by moving the checkpoints away"
            )
        named = [*contents.index["slot"].tolist(), *state.retired[:, 1].tolist()]
        tier = self._tier(state.file.id, max(named, default=-1) + 1, shared=True)
        with away_is_dependency("replay.redis"):
            if contents.rows is not None and not tier.lists(state.stamp):
                raise SettingsError(f"Redis has lost the rows of checkpoint {state.checkpoint}, or has later ones")
            if self._context.writable:
                tier.unlist_after(state.checkpoint)
        return tier

    @override
    def open_primary(self, slots: int, source: SlowTier | None) -> RedisTier:
        if isinstance(source, RedisTier) and source.slots <= slots:
            self._opened = self._tier(source.id, slots)
        else:
            self._opened = self._tier(secrets.token_hex(_GENERATION // 2), slots)
        return self._opened

    @override
    def cache(self, slots: int, primary: SlowTier) -> RedisTier:
        # In the generation of the primary tier, so that the cache is warm after a restart.
        assert primary.file is not None
        self._opened = self._tier(primary.file.id[:_GENERATION], slots)
        return self._opened

    @override
    def cleanup_actions(self, *, first: bool) -> list[Callable[[], None]]:
        if self._opened is None:
            return []
        if not first:
            return [self._opened.sweep_later]
        self._opened.sweep_later()
        return []

    def _tier(self, generation: str, slots: int, *, shared: bool = False) -> RedisTier:
        assert self._server is not None
        return RedisTier(
            self._server, generation, self._context.row_bytes, slots, pinned=self._context.pinned, shared=shared
        )
