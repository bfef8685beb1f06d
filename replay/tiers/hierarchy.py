"""Where the payload of the events held lies: a chain of tiers, of which the last, the *home*, has all of it.

Those above are caches whose loss costs time and nothing else. Which tier has a row is decided here, changes freely, and
shows in no sample. The memory tier takes what comes as long as there is room. A slower cache has the events in the
first slots of the home: slots are given out without regard to the event, so that this is a fair part of them, and no
memory is spent on knowing which.

Legend: n rows of a call, m of them not in the memory tier, R bytes of a row, S slots.
"""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.row_layout import PackedRows
from replay.snapshot import TierRef
from replay.tiers.clock_cache import Budget, ClockCache
from replay.tiers.io_worker import IOWorker
from replay.tiers.memory import MemoryTier
from replay.tiers.staged_rows import MissingRows, StagedRows
from replay.tiers.tier import SlowTier, Tier, TierStats

Identify = Callable[[NDArray[np.int64]], NDArray[np.uint64]]
"""Returns the identities of the events in n slots."""

Pack = Callable[[slice], NDArray[np.uint8]]
"""Returns the rows of some of n events, uint8 `[<= n, R]`; in any thread, and more than once."""

_NO_SLOTS = np.empty(0, np.int64)
_BYTES_A_SECOND = 64_000_000
"""At most so much is moved up between two tiers beside what is sampled."""


class TierHierarchy:
    """S slots, one for each event that the store may hold. Used by one thread, but for `read` and `sync`.

    A slot is written again only after every read of it was asked for that is to see what it has now: jobs for the
    slower tiers are done in the order in which they are asked for.
    """

    def __init__(self, device: MemoryTier, slow: Sequence[SlowTier] = (), *, promote: bool = False) -> None:
        """Compose the tiers that there are; a memory tier of no slots only says where rows go.

        Args:
            device: the memory tier.
            slow: the slower ones, from fast to slow; the last is the home, and without any the memory tier is.
            promote: whether rows that are sampled take the places of others in the memory tier: where not all events
                are sampled alike.
        """
        self.slow = tuple(slow)
        """The slower tiers, from fast to slow."""
        self._all: list[Tier] = [device, *slow]
        self._home = self._all[-1]
        self.slots = self._home.slots
        self.stats = TierStats.of(self._all)
        self._device = device
        self._cache: ClockCache | None = None
        self._io_worker: IOWorker | None = None
        self._coming: deque[StagedRows] = deque()
        self._lost: deque[tuple[NDArray[np.int64], NDArray[np.uint16]]] = deque()
        self._stale: dict[str, NDArray[np.bool_]] = {}
        """By tier, in which slots there may be what an event before the last one left; set in the I/O thread."""
        self._unerased: set[str] = set()
        self._refill = Budget(_BYTES_A_SECOND)
        self._given = {tier.name: 0 for tier in slow[:-1]}
        if slow:
            self._io_worker = IOWorker("tiers")
            self._cache = ClockCache(device, self.slots, Budget(_BYTES_A_SECOND) if promote else None)

    @property
    def durable(self) -> bool:
        """Whether the payload outlives the process, so that a checkpoint need not hold it."""
        return bool(self.slow)

    @property
    def file(self) -> TierRef | None:
        """What a checkpoint names for the payload of its slots to be found again; None where the checkpoint has to hold
        it."""
        return self.slow[-1].file if self.slow else None

    @property
    def problem(self) -> str | None:
        """One sentence on what does not work as it should."""
        said = [tier.problem for tier in reversed(self.slow)]
        return "; ".join(sentence for sentence in said if sentence is not None) or None

    @property
    def demoted(self) -> int:
        """Rows of the memory tier that have made way for others."""
        return 0 if self._cache is None else self._cache.demoted

    def rows(self, held: int) -> dict[str, int]:
        """Return the events by tier, when so many are held; of a slower cache, those that it was given."""
        counts = {self._device.name: 0 if self._cache is None else len(self._cache), **self._given}
        counts[self._home.name] = held
        return {tier.name: counts[tier.name] for tier in self._all}

    def bytes(self, held: int) -> dict[str, int]:
        """Return the bytes that they take, by tier."""
        rows = self.rows(held)
        return {tier.name: rows[tier.name] * tier.slot_bytes for tier in self._all}

    @property
    def bounds(self) -> dict[str, int]:
        """Bytes that each tier may hold."""
        return {tier.name: tier.slots * tier.slot_bytes for tier in self._all}

    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], pack: Pack) -> None:
        """Put the rows of n events into free slots: those that memory takes now, all in the I/O thread."""
        if self._io_worker is None or self._cache is None:
            self._device.write(slots, identity, pack(slice(None)))
            self._count("device", "written", len(slots))
            return
        generation = self._cache.generation(slots)
        self._give(slots, 1)
        self._count("device", "written", self._cache.keep(slots, lambda n: torch.from_numpy(pack(slice(n)))))
        # Last, since the I/O thread competes for the interpreter from now on.
        self.stats.stall_seconds += self._io_worker.send(
            lambda: self._bring_down(slots, identity, pack(slice(None)), generation),
            len(slots) * self._device.slot_bytes,
        )

    def stage(self, slots: NDArray[np.int64], identify: Identify) -> StagedRows:
        """Begin to bring the rows of n events to the device; their identities are asked for only where need be."""
        if self._io_worker is None or self._cache is None:
            self._count_read("device", len(slots))
            return self._device.stage(slots)
        self._fill()
        places = self._cache.find(slots)
        misses = np.flatnonzero(places < 0)
        self._count_read("device", len(slots) - len(misses))
        if not len(misses):
            return StagedRows(self._device.gather(places))
        missed = slots[misses]
        reserved = self._cache.reserve(len(misses))
        late = MissingRows(misses, missed, identify(missed), self._cache.generation(missed), reserved)
        staged = StagedRows(self._gather(places, len(misses)), late, pinned=self._device.device.type == "cuda")
        if len(reserved):
            self._coming.append(staged)
        size = len(misses) * self._device.slot_bytes
        self.stats.stall_seconds += self._io_worker.send(lambda: self._bring_up(staged, late), size)
        return staged

    def arrive(self, staged: StagedRows, n: int | None = None) -> PackedRows:
        """Return those of the first n rows, or of all, that could be had, `[<= n, R]` on the device."""
        late = staged.late
        if late is None or self._cache is None:
            return staged.rows(n)
        self.stats.stall_seconds += staged.wait()
        rows_nR = staged.rows(n)
        if staged.lost.any():
            self._lost.append((late.slots[staged.lost], late.generation[staged.lost]))
        self._fill()
        return rows_nR

    @property
    def has_lost(self) -> bool:
        """Whether `lost` has anything to tell, perhaps; any thread may ask."""
        return bool(self._lost)

    def lost(self) -> NDArray[np.int64]:
        """Return the slots of events whose rows were found lost since the last time, and that are there yet."""
        if not self._lost or self._cache is None:
            return _NO_SLOTS
        found = [self._lost.popleft() for _ in range(len(self._lost))]
        slots, generation = (np.concatenate(each) for each in zip(*found, strict=True))
        return np.unique(slots[self._cache.generation(slots) == generation])

    def take_up(self, slots: NDArray[np.int64]) -> None:
        """Learn that the home has the rows of n events already; the memory tier fills as they are sampled."""
        self._give(slots, 1)

    def staged(self, rows_nR: Tensor) -> StagedRows:
        """Return rows that are on the host, uint8 `[n, R]`, as a plan has them."""
        return StagedRows(rows_nR.to(self._device.device))

    def free(self, slots: NDArray[np.int64]) -> None:
        """Let go of what caches hold of events that have left."""
        if self._cache is not None:
            self._cache.free(slots)
            self._give(slots, -1)

    def read(self, slots: NDArray[np.int64], identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
        """Return rows that are written, uint8 `[n, R]` on the host, and which are whole. In any thread.

        Raises:
            OSError: the home cannot be asked.
        """
        rows_nR, whole = self._home.read(slots, identity)
        return rows_nR.cpu(), whole

    def sync(self) -> None:
        """Wait until all that was written before is where a restart finds it; raises OSError when it is not.

        In any thread. Rows that a tier did not take are lost, not an error.
        """
        if self._io_worker is not None:
            self._io_worker.drain()
            for tier in self.slow:
                tier.sync()

    def mark_named(self) -> None:
        """Have the home keep in mind that a checkpoint names it; in any thread. Raises OSError when it cannot."""
        for home in self.slow[-1:]:
            home.mark_named()

    def erase(self, slots: NDArray[np.int64]) -> None:
        """Overwrite what all tiers have in n slots, which no event may be in afterwards, in turn with what is written.

        Also what events have left behind in the memory tier as a cache. What a slower tier cannot erase is kept for
        `erase_stale`.
        """
        if self._io_worker is None or self._cache is None:
            self._device.erase(slots)
            return
        for staged in self._coming:
            staged.wait()
        self._fill()
        self._cache.erase(slots)
        for tier in self.slow:
            self._send_erasure(tier, lambda tier: slots[slots < tier.slots])

    def erase_stale(self, first: int, most: int) -> bool:
        """Erase what slower tiers have of nobody any more, since an erasure or the write of a next event failed.

        Only that, whatever the slots have been given to since: a slot that was written whole after all has nothing of
        an earlier event, and whoever was to be written to one that was not is not to be found there anyway.

        Args:
            first: the first slot that is looked at.
            most: how many of them.

        Returns:
            Whether there are slots after these.
        """
        more = bool(self._stale) and first + most < self.slots
        # The last time all of them once more: what waited to be written when this began may have failed since.
        which = slice(first, first + most) if more else slice(0, self.slots)
        for tier in self.slow:
            self._send_erasure(tier, lambda tier: self._stale_of(tier, which))
        return more

    def doubt(self, names: Sequence[str] | None = None) -> None:
        """Take all that slower caches have, or those of some names, for stale.

        An earlier process may have failed to write or erase there.
        """
        for cache in self.slow[:-1]:
            if names is None or cache.name in names:
                self._stale[cache.name] = np.ones(cache.slots, np.bool_)

    @property
    def stale_caches(self) -> list[str]:
        """The names of slower caches in which there may be something of events that have left; after `sync`."""
        return [cache.name for cache in self.slow[:-1] if len(self._stale_of(cache, slice(0, cache.slots)))]

    def _stale_of(self, tier: SlowTier, which: slice) -> NDArray[np.int64]:
        stale = self._stale.get(tier.name)
        return _NO_SLOTS if stale is None else which.start + np.flatnonzero(stale[which])

    def _note(self, tier: SlowTier, slots: NDArray[np.int64], *, stale: bool) -> None:
        """Remember whether there may be something of earlier events in n slots of a tier; in the I/O thread."""
        if stale and tier.name not in self._stale:
            self._stale[tier.name] = np.zeros(tier.slots, np.bool_)
        if tier.name in self._stale:
            self._stale[tier.name][slots] = stale

    def _send_erasure(self, tier: SlowTier, which: Callable[[SlowTier], NDArray[np.int64]]) -> None:
        """Erase n slots of a tier, which are asked for once what was sent before is done."""

        def job() -> None:
            slots = which(tier)
            try:
                if len(slots):
                    tier.erase(slots)
            except OSError:
                self._note(tier, slots, stale=True)
                self._unerased.add(tier.name)
            else:
                self._note(tier, slots, stale=False)
                if not len(self._stale_of(tier, slice(0, tier.slots))):
                    self._unerased.discard(tier.name)

        assert self._io_worker is not None
        self._io_worker.send(job, 0)

    @property
    def unerased(self) -> bool:
        """Whether there is something that could not be erased; after `sync`."""
        return bool(self._unerased)

    def close(self) -> None:
        """Let go of memory, files and connections."""
        if self._io_worker is not None:
            self._io_worker.close()
        for tier in self._all:
            tier.close()

    def _fill(self) -> None:
        """Let be found what has come into the memory tier since the last time."""
        while self._coming and self._coming[0].landed:
            staged = self._coming.popleft()
            late, cache = staged.late, self._cache
            assert late is not None
            assert cache is not None
            n = len(late.reserved)
            keep = cache.fill(late.slots[:n], late.generation[:n], late.reserved, staged.brought[:n])
            if self._device.lies_on.type != "cpu" and keep.any():
                which = torch.from_numpy(np.flatnonzero(keep)).to(self._device.lies_on)
                rows_nR = staged.first_brought(n).to(self._device.lies_on, non_blocking=True)
                self._device.put(late.reserved[keep], rows_nR[which])
            self._count("device", "written", int(keep.sum()))

    def _gather(self, places: NDArray[np.int64], misses: int) -> Tensor:
        if misses == len(places):
            shape = (misses, self._device.slot_bytes)
            return torch.empty(shape, dtype=torch.uint8, device=self._device.device)
        # A miss takes the row of place 0 for the moment: one gather instead of a gather and a scatter.
        return self._device.gather(np.maximum(places, 0))

    def _bring_down(
        self,
        slots: NDArray[np.int64],
        identity: NDArray[np.uint64],
        rows_nR: NDArray[np.uint8],
        generation: NDArray[np.uint16],
    ) -> None:
        """Write new rows to the slower tiers; in the I/O thread."""
        for tier in self.slow:
            mine = np.flatnonzero(slots < tier.slots)
            whose = slots, identity, rows_nR
            try:
                tier.write(*(whose if len(mine) == len(slots) else (each[mine] for each in whose)))
            except OSError:
                if tier is self._home:
                    self._lost.append((slots, generation))
                self._note(tier, slots[mine], stale=True)
            else:
                self._count(tier.name, "written", len(mine))
                self._note(tier, slots[mine], stale=False)

    def _bring_up(self, staged: StagedRows, late: MissingRows) -> None:
        """Read what the memory tier has not, from the first tier that has it; in the I/O thread."""
        m = len(late.slots)
        whole, lost = np.zeros(m, np.bool_), np.zeros(m, np.bool_)
        missed: list[tuple[SlowTier, NDArray[np.bool_]]] = []
        refill: list[tuple[SlowTier, NDArray[np.intp], NDArray[np.uint8]]] = []
        try:
            rows_NR, places = staged.basket()
            for tier in self.slow:
                asked = ~whole & (late.slots < tier.slots)
                if not asked.any():
                    continue
                try:
                    whole[asked] = tier.read_into(rows_NR, places[asked], late.slots[asked], late.identity[asked])
                except OSError:
                    continue  # what cannot be asked may still have them
                came = int((asked & whole).sum())
                self._count_read(tier.name, came)
                if tier is self._home:
                    lost = asked & ~whole
                    if lost.any():
                        self._note(tier, late.slots[lost], stale=True)
                else:
                    missed.append((tier, asked & ~whole))
                    self.stats.missed[tier.name] += int(missed[-1][1].sum())
            for tier, which in missed:
                back = np.flatnonzero(which & whole)
                back = back[: self._refill.take(len(back), self._device.slot_bytes)]
                # Copied before it lands: what samples hold may be changed by whoever samples.
                refill.append((tier, back, rows_NR.numpy()[places[back]]))
            if self._device.lies_on.type == "cpu":
                # Nobody reads what is reserved. On a device it would have to be in turn with what the step asks of it.
                kept = np.flatnonzero(whole[: len(late.reserved)])
                self._device.put(late.reserved[kept], torch.from_numpy(rows_NR.numpy()[places[kept]]))
        finally:
            staged.land(whole, lost)
        for tier, back, rows_nR in refill:
            if len(back):
                self._put_back(tier, late.slots[back], late.identity[back], rows_nR)

    def _put_back(
        self, cache: SlowTier, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8]
    ) -> None:
        try:
            cache.write(slots, identity, rows_nR)
        except OSError:
            return  # it says so itself, and misses them the next time
        self._count(cache.name, "written", len(slots))
        self._note(cache, slots, stale=False)

    def _give(self, slots: NDArray[np.int64], times: int) -> None:
        """Count the rows of n slots as given to the slower caches, or with -1 as taken from them."""
        for cache in self.slow[:-1]:
            self._given[cache.name] += times * int(np.count_nonzero(slots < cache.slots))

    def _count_read(self, name: str, rows: int) -> None:
        self.stats.read[name] += rows
        self._count(name, "read", rows)

    def _count(self, name: str, direction: str, rows: int) -> None:
        self.stats.moved[name, direction] += rows * self._device.slot_bytes
