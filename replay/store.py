"""The store: what has been seen, kept for rehearsal.

A composition of four answers: who enters and who leaves (`Reservoir`), who is drawn (`Sampler`), where the payload lies
(`Tiers`), how fast (the caller, who asks for so many a step).

Legend: N events offered, H events held, n drawn.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ingest.block import Array, TopicPartition
from ingest.errors import SettingsError
from ingest.identity import identity_hash, partition_base
from replay.admission import Reservoir, importance, priorities
from replay.contents import ENTRY, Contents, PlannedRows, TierFile
from replay.disk import DiskTier
from replay.rows import RowLayout
from replay.sampler import Sampler
from replay.slots import Slots
from replay.tiers import Staged, Tiers
from replay.watermarks import Watermarks

AHEAD = 4
"""Steps between the choice of a draw and its use: the time that slower tiers have to bring it."""

_MOST_INSERTED = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """The choice of events for one step, and their rows on the way.

    Attributes:
        step: the step that it is for.
        positions: in the order of the index at that moment, int64 `[n]`.
        rows: what was chosen.
        threshold: the reservoir's at that moment.
        share: events held / events offered at that moment.
    """

    step: int
    positions: NDArray[np.int64]
    rows: Staged
    threshold: float
    share: float


@dataclass(frozen=True)
class Held:
    """A store at a step boundary; its payload is read by `Store.contents` while the store goes on."""

    cut: int
    index: NDArray[np.void]
    retired: NDArray[np.int64]
    threshold: float
    offered: int
    watermarks: Mapping[int, tuple[int, int]]
    plans: Sequence[Plan]


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
    """At most `reservoir.limit` events, in tiers. Used by one thread, but for `contents`.

    Idempotent: an event is admitted by its priority alone, and one that is held already is not added again. In the
    normal case events of a partition come in rising order, and a watermark makes that check free.
    """

    def __init__(self, reservoir: Reservoir, sampler: Sampler, layout: RowLayout, tiers: Tiers, seed: int) -> None:
        spare = tiers.slots - reservoir.limit
        assert spare > 1
        self.burst = min(_MOST_INSERTED, spare // 2)
        """Events that are inserted at once."""
        self.spare = spare
        """Slots beyond those for the events held."""
        self.tiers = tiers
        self.slots = Slots(tiers.slots, durable=tiers.durable)
        self.lost = 0
        """Events that were to be held, and are not: no slot could be written, or the payload not be read back."""
        self._reservoir = reservoir
        self._sampler = sampler
        self._layout = layout
        self._seed = seed
        self._index = np.zeros(tiers.slots, ENTRY)
        self._held = 0
        self._watermarks = Watermarks()
        self._offered = 0
        self._plans: deque[Plan] = deque()
        self._first_cut: int | None = None
        self._stale_files: list[Path] = []

    def __len__(self) -> int:
        return self._held

    @property
    def rows(self) -> dict[str, int]:
        """Events held, by tier."""
        return self.tiers.rows(self._held)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that they take, by tier."""
        return self.tiers.bytes(self._held)

    @property
    def bounds(self) -> dict[str, int]:
        """Bytes that each tier may hold."""
        return self.tiers.bounds

    @property
    def capacity(self) -> int:
        """Events that are kept when there is no end of them."""
        return self._reservoir.k

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
        admits = self._reservoir.admits(priority)
        new = np.ones(len(where), np.bool_)
        if not self._watermarks.pass_by(where, offset, row):
            new = self._is_new(identity, admits)
        self._offered += int(np.count_nonzero(new))
        admitted = np.flatnonzero(new & admits)
        count = len(admitted)
        while len(admitted):
            room = min(self.burst, self.slots.free)
            if not room:
                self._count_lost(len(admitted))
                return count - len(admitted)
            self._insert(admitted[:room], priority, identity, columns)
            if self._held > self._reservoir.limit:
                self._keep(self._reservoir.lower(self._index["priority"][: self._held]))
            admitted = admitted[room:]
            admitted = admitted[self._reservoir.admits(priority[admitted])]  # the threshold may have fallen
        return count

    def plan(self, step: int, n: int) -> Plan:
        """Choose n events for a step, or all when fewer are held, and begin to bring them to the device."""
        positions = self._sampler.choose(self._held, n, self._seed, step)
        slots, identity = self._index["slot"][positions], self._index["identity"][positions]
        rows = self.tiers.stage(slots.astype(np.int64), identity)
        return Plan(step, positions, rows, self._reservoir.threshold, self._held / max(1, self._offered))

    def fetch(self, plan: Plan, n: int | None = None) -> Draw:
        """Return the first n events of a plan, or all; fewer when the rows of some are lost."""
        columns = self._layout.unpack(self.tiers.arrive(plan.rows, n))
        return Draw(columns, importance(columns["weight"], plan.threshold, plan.share))

    def plan_ahead(self, step: int, n: int) -> None:
        """Plan n events for each step from `step` on, AHEAD in all, that has no plan yet."""
        self._drop_lost()
        first = self._plans[-1].step + 1 if self._plans else step
        self._plans += [self.plan(each, n) for each in range(first, step + AHEAD)]

    def planned(self, step: int) -> int:
        """Return how many events can be drawn for a step."""
        return next((plan.rows.n for plan in self._plans if plan.step == step), 0)

    def draw(self, step: int, n: int) -> Draw:
        """Return the first n events of the plan for a step; it and those before it are used up."""
        while self._plans[0].step < step:
            self._plans.popleft()
        plan = self._plans.popleft()
        assert plan.step == step
        return self.fetch(plan, n)

    def hold(self, number: int) -> Held:
        """Copy what cut `number` needs, and keep what slots hold until `let_go`: only one hold at a time."""
        self._first_cut = self._first_cut or number
        return Held(
            number,
            self._index[: self._held].copy(),
            self.slots.hold(number),
            self._reservoir.threshold,
            self._offered,
            dict(self._watermarks.highest),
            tuple(self._plans),
        )

    def contents(self, held: Held) -> Contents:
        """Return what was held, the payload being durable or part of it. May run in another thread until `let_go`.

        Raises:
            OSError: the disk tier cannot be made durable.
        """
        index, payload, file = held.index, None, None
        if self.tiers.disk is None:
            payload, _ = self.tiers.read(index["slot"].astype(np.int64), index["identity"])
        else:
            self.tiers.sync()
            file = TierFile(self.tiers.disk.path.name, self.tiers.disk.id)
        plans = []
        for plan in held.plans:
            plan.rows.wait()
            plans.append(PlannedRows(plan.step, plan.rows.rows().cpu(), plan.threshold, plan.share))
        return Contents(
            *(held.cut, index, payload, file, held.retired),
            *(held.threshold, held.offered, held.watermarks, plans),
        )

    def let_go(self, oldest: int | None) -> None:
        """End a hold, now that the oldest cut that may be resumed is number `oldest`; None: there is none."""
        self.slots.let_go(oldest)
        if oldest is None or (self._first_cut is not None and oldest >= self._first_cut):
            for path in self._stale_files:
                log.info("removing %s, which belongs to no cut any more", path)
                path.unlink(missing_ok=True)
            self._stale_files = []

    def discard_later(self, files: list[Path]) -> None:
        """Remove files of the disk tier that only cuts of earlier processes can name, once those are gone."""
        self._stale_files = files

    def restore(self, contents: Contents, source: DiskTier | None = None) -> None:
        """Take up what a cut has in place of what is held.

        Args:
            contents: of the cut; without payload its slots are those of this store's own disk tier ...
            source: ... or of this file, from which the rows are copied.

        Raises:
            SettingsError: the contents do not fit this store.
        """
        rows = [plan.rows for plan in contents.plans] + ([] if contents.payload is None else [contents.payload])
        if any(each.shape[1:] != (self._layout.row_bytes,) for each in rows):
            raise SettingsError("the cut's replay contents have another layout than this store")
        self._reservoir.threshold, self._offered = contents.threshold, contents.offered
        self._watermarks = Watermarks(contents.watermarks)
        keep = np.ones(len(contents.index), np.bool_)
        if len(keep) > self._reservoir.limit:
            keep = self._reservoir.lower(contents.index["priority"])
        index = contents.index[keep]
        if contents.payload is None and source is None:
            self.slots.restore(contents.index["slot"], contents.retired, contents.cut)
            self.slots.leave(contents.index["slot"][~keep])
            self.tiers.take_up(index["slot"].astype(np.int64), index["identity"])
        else:
            self.slots.restore(contents.index["slot"][:0], contents.retired[:0], contents.cut)
            index = index[self._copy(index, np.flatnonzero(keep), contents.payload, source)]
        self._held = len(index)
        self._index[: self._held] = index
        self._plans = deque(
            Plan(plan.step, np.empty(0, np.int64), self.tiers.staged(plan.rows), plan.threshold, plan.share)
            for plan in contents.plans
        )

    def close(self) -> None:
        """Let go of the tiers."""
        self.tiers.close()

    def _copy(
        self, index: NDArray[np.void], places: NDArray[np.intp], payload: Tensor | None, source: DiskTier | None
    ) -> NDArray[np.bool_]:
        """Write the rows of `index` into new slots, which it then names; return which rows could be had."""
        found = np.ones(len(index), np.bool_)
        for begin in range(0, len(index), _MOST_INSERTED):
            chunk = slice(begin, begin + _MOST_INSERTED)
            identity = index["identity"][chunk]
            if source is not None:
                rows_nR, found[chunk] = source.read(index["slot"][chunk].astype(np.int64), identity)
            else:
                assert payload is not None
                rows_nR = payload[torch.from_numpy(places[chunk])]
            whole = found[chunk]
            slots = self.slots.take(int(whole.sum()))
            index["slot"][np.flatnonzero(whole) + begin] = slots
            self.tiers.write(slots.astype(np.int64), identity[whole], rows_nR.numpy()[whole])
        self._count_lost(int((~found).sum()))
        return found

    def _is_new(self, identity: NDArray[np.uint64], candidates: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which of N events, some of which were offered before, are not held; only candidates are looked up."""
        new = np.zeros(len(identity), np.bool_)
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
        slots = self.slots.take(len(rows))
        entry = self._index[begin:end]
        entry["priority"], entry["identity"], entry["slot"] = priority[rows], identity[rows], slots
        for name in ("offset", "partition", "row", "time_ms", "key_hash"):
            entry[name] = columns[name][rows]
        entry["label"] = columns["label"][rows] if columns["label"].dtype.kind == "i" else 0
        packed = self._layout.pack({name: columns[name][rows] for name in self._layout.fields}, len(rows))
        self.tiers.write(slots.astype(np.int64), identity[rows], packed)
        self._held = end

    def _keep(self, stays: NDArray[np.bool_]) -> None:
        """Let those leave that do not stay, bool `[H]`."""
        held = self._index[: self._held]
        left = held["slot"][~stays]
        self.tiers.free(left.astype(np.int64))
        self.slots.leave(left)
        kept = held[stays]
        self._index[: len(kept)] = kept
        self._held = len(kept)

    def _drop_lost(self) -> None:
        """Let events leave whose rows a tier could not write or give back: holes, which fill as the stream goes on."""
        lost = self.tiers.lost()
        if len(lost):
            stays = ~np.isin(self._index["identity"][: self._held], lost)
            self._count_lost(int((~stays).sum()))
            self._keep(stays)

    def _count_lost(self, rows: int) -> None:
        if rows:
            self.lost += rows
            log.warning("%d events could not be kept in the store, %d in all since the start", rows, self.lost)
