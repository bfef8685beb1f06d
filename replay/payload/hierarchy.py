"""The tiers that hold the payload of the held events: here a memory tier alone.

Legend: n rows of a call, R bytes of a row, S slots.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ingest.events.block import Array
from replay.payload.lost_rows import NO_SLOTS
from replay.row_layout import PackedRows
from replay.snapshot import TierRef
from replay.tiers.memory import MemoryTier
from replay.tiers.staged_rows import StagedRows
from replay.tiers.tier import SlowTier, Tier, TierStats

Identify = Callable[[NDArray[np.int64]], NDArray[np.uint64]]
"""Returns the identities of the events in n slots."""

Pack = Callable[[slice], NDArray[np.uint8]]
"""Returns the rows of a slice of n events, uint8 `[<= n, R]`; any thread may call it, more than once."""


class TierHierarchy:
    """S slots, one for each event that the store may hold. Used by one thread, except `read` and `sync`.

    This one has a memory tier for the payload of all events; `CachedHierarchy` adds slower tiers.
    """

    def __init__(self, memory: MemoryTier, slow: Sequence[SlowTier] = ()) -> None:
        """Compose the tiers; `slow`: from fast to slow. The slowest of all is the primary tier."""
        self.slow = tuple(slow)
        """The slower tiers, from fast to slow."""
        self.all: Sequence[Tier] = [memory, *slow]
        """All tiers, from fast to slow."""
        self.primary = self.all[-1]
        """The tier that has the payload of every event."""
        self.slots = self.primary.slots
        self.stats = TierStats.of(self.all)
        self._memory = memory
        self.gathers_ahead = memory.gathers_ahead
        """Whether rows of plans may be in slots of a device: they are gathered one step before they are sampled."""
        self.lost_reports: Collection[object] = ()
        """Reports of lost rows, where `lost` may return any slots; any thread may ask whether there are any."""

    @property
    def durable(self) -> bool:
        """Whether the payload outlives the process, so that a checkpoint need not contain it."""
        return bool(self.slow)

    @property
    def device_bytes(self) -> int:
        """Bytes of the memory tier on the learner's device; 0 where the host has it."""
        return self._memory.device_bytes

    @property
    def file(self) -> TierRef | None:
        """The reference to the primary tier in a checkpoint; None where the checkpoint has to contain the payload."""
        return self.slow[-1].file if self.slow else None

    @property
    def problem(self) -> str | None:
        """One sentence on what does not work; None: all works."""
        problems = [tier.problem for tier in reversed(self.slow)]
        return "; ".join(sentence for sentence in problems if sentence is not None) or None

    @property
    def demoted(self) -> int:
        """Rows of the memory tier that were replaced by others."""
        return 0

    @property
    def cached(self) -> dict[str, int]:
        """Rows of held events in each cache, by tier."""
        return {}

    def rows(self, held: int) -> dict[str, int]:
        """Return the events by tier, when `held` events are held; of a slower cache, those that were written to it."""
        counts = {**self.cached, self.primary.name: held}
        return {tier.name: counts[tier.name] for tier in self.all}

    def bytes(self, held: int) -> dict[str, int]:
        """Return the bytes of the events that `rows` returns, by tier."""
        rows = self.rows(held)
        return {tier.name: rows[tier.name] * tier.slot_bytes for tier in self.all}

    @property
    def bounds(self) -> dict[str, int]:
        """Bytes that each tier may hold."""
        return {tier.name: tier.slots * tier.slot_bytes for tier in self.all}

    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], pack: Pack) -> None:
        """Write the rows of n events into free slots."""
        self._memory.write(slots, identity, pack(slice(None)))
        self.stats.add_moved("device", "written", len(slots))

    def prefetch(self, slots: NDArray[np.int64], _identify: Identify) -> StagedRows:
        """Start to bring the rows of n events to the device; their identities are computed only if needed."""
        self.stats.add_read("device", len(slots))
        return self._memory.stage(slots)

    def wait(self, staged: StagedRows, n: int | None = None) -> PackedRows:
        """Wait for rows of which some are missing; return those of the first n, or all, that could be read, `[<= n, R]`
        on the device."""
        return staged.rows(n)

    def lost(self) -> NDArray[np.int64]:
        """Return the slots of held events whose rows were lost since the previous call."""
        return NO_SLOTS

    def add_existing(self, slots: NDArray[np.int64]) -> None:
        """Register n events whose rows the primary tier already has; the memory tier fills as they are sampled."""

    def staged(self, rows_nR: Tensor) -> StagedRows:
        """Return rows on the host, uint8 `[n, R]`, as the rows of a plan, which are copied when they are sampled."""
        return StagedRows(rows_nR, stream=self._memory.stream)

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return arrays of the host on the device of the rows."""
        return self._memory.upload(arrays)

    def free(self, slots: NDArray[np.int64]) -> None:
        """Remove n events, whose slots may be written again, from caches."""

    def read(self, slots: NDArray[np.int64], identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        """Return rows of the primary tier, uint8 `[n, R]` on the host, and which are valid. Any thread may call it.

        Raises:
            OSError: the primary tier cannot be read.
        """
        return self.primary.read(slots, identity)

    def sync(self) -> None:
        """Wait until all rows written before survive a restart; raises OSError when they do not.

        Any thread may call it. Rows that a tier did not accept are lost, which is not an error.
        """

    def mark_intact(self, number: int, stamp: str, oldest: int) -> None:
        """Have the primary tier record that it has the rows of a checkpoint, as `SlowTier.mark_intact`."""
        for primary in self.slow[-1:]:
            primary.mark_intact(number, stamp, oldest)

    def mark_named(self) -> None:
        """Have the primary tier record that a checkpoint names it; raises OSError. Any thread may call it."""
        for primary in self.slow[-1:]:
            primary.mark_named()

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Overwrite the rows of n slots in all tiers, in order with writes. No event may be in these slots afterwards.

        Caches overwrite the rows of removed events too. `erase_stale` retries what a slower tier could not erase.
        """
        self._memory.erase(slots)

    def erase_stale(self, _first: int, _limit: int) -> bool:
        """Erase the stale slots in a range of slots of slower tiers; return whether more slots follow.

        A slot is stale after an erasure or a write has failed: it may have the row of an earlier event. Reused slots
        are safe: a later write clears the mark, and after a failed one the new event is lost anyway.

        Args:
            first: the first slot to examine.
            limit: how many to examine.
        """
        return False

    def mark_stale(self, names: Sequence[str] | None = None) -> None:
        """Mark all slots of slower caches, or of those with these names, as stale.

        For those that an earlier process may have failed to write or to erase.
        """

    @property
    def stale_caches(self) -> list[str]:
        """The names of slower caches with stale slots; valid after `sync`."""
        return []

    @property
    def unerased(self) -> bool:
        """Whether some slots could not be erased; valid after `sync`."""
        return False

    def close(self) -> None:
        """Release memory, files and connections."""
        for tier in self.all:
            tier.close()
