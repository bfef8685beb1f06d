"""Captures a store for a checkpoint, and restores it into one whose policy, size and tiers may differ.

Where checkpoints are complete, their segments have the rows of a slower tier as well, in separate files: one is
written with its segment, from the tier, and shared as the segment is. So the rows are twice on the disk. A row is read
by its slot, which keeps it until the checkpoint is written; earlier files are not read, and a host that has the tier
reads none of them.

Legend: H events of the checkpoint, n events of a call or a chunk.
"""

import contextlib
import errno
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.core.errors import SettingsError
from anabranch.core.failures import out_of_memory
from anabranch.ingest.events.identity import identity_hash, keyed_hash
from anabranch.replay.reservoir.admission import Candidates
from anabranch.replay.reservoir.reservoir import Reservoir
from anabranch.replay.row_layout import RowLayout
from anabranch.replay.row_source import RowSource, TensorRows, TierRows
from anabranch.replay.sample_plan import SamplePlan, saved_plan
from anabranch.replay.snapshot import StoreDelta, StoreSnapshot, StoreState
from anabranch.replay.tiers.hierarchy import TierHierarchy
from anabranch.replay.tiers.slot_allocator import SlotAllocator
from anabranch.replay.tiers.tier import Tier


@dataclass(frozen=True)
class CapturedStore:
    """The state that `Store.begin_snapshot` copied; slots keep the payload of its events until `Store.end_snapshot`."""

    state: StoreState
    change: StoreDelta
    plans: Sequence[SamplePlan]
    tiers: TierHierarchy

    def contents(self, oldest: int = 0) -> tuple[StoreState, StoreDelta]:
        """Return the state with the payload, or once that is durable. Any thread, until `Store.end_snapshot`.

        `oldest`: the first checkpoint that may be restored once this one is written.

        Raises:
            OSError: it cannot be made durable, or there is no memory to read it now.
        """
        change, tiers = self.change, self.tiers
        try:
            if tiers.durable:
                with contextlib.suppress(*([] if self.state.row_bytes is not None else [OSError])):
                    tiers.slow[-1].mark_intact(self.state.checkpoint, self.state.stamp, oldest)
                tiers.sync()
                if self.state.row_bytes is not None:
                    change = replace(change, rows=self._rows)
            else:
                identity = _identity(self.state, change.index)
                payload, _ = tiers.primary.read(change.index["slot"].astype(np.int64), identity)
                change = replace(change, payload=payload)
            plans = [saved_plan(plan) for plan in self.plans]
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            reason = f"no memory to read the stored events: {str(exc).splitlines()[0]}"
            raise OSError(errno.ENOMEM, reason) from exc
        return replace(self.state, plans=plans, stale=tiers.erasure.stale_caches), change

    def mark_named(self) -> None:
        """Have the primary tier record that a checkpoint names it; raises OSError. Any thread."""
        for primary in self.tiers.slow[-1:]:
            primary.mark_named()

    def _rows(self, events: NDArray[np.void]) -> TierRows:
        """Return the rows of n events, ENTRY `[n]`."""
        assert self.state.row_bytes is not None
        return _tier_rows(self.state.row_bytes, events, self.state, self.tiers.primary)


_CHUNK = 1024
_CHUNK_BYTES = 2**24
"""Rows that are read at once, and the bytes that these have at most."""

log = logging.getLogger(__name__)


class StoreRestore:
    """Restores the events of one checkpoint; used once."""

    def __init__(
        self,
        contents: StoreSnapshot,
        source: Tier | None,
        reservoir: Reservoir,
        layout: RowLayout,
        tiers: TierHierarchy,
        seed: int,
    ) -> None:
        """Check the contents, and compute priorities and groups again if the admission policy has changed.

        Args:
            contents: of the checkpoint.
            source: the tier with the payload, if that is not one of the store's tiers. If there is none any more, the
                contents have the rows.
            reservoir: of the store.
            layout: of its rows.
            tiers: of the store, which store the rows from now on.
            seed: of its priorities.

        Raises:
            SettingsError: the contents do not fit this store.
        """
        state, payload = contents.state, contents.payload
        rows = [plan.rows for plan in state.plans] + ([] if payload is None else [payload])
        self.moves = source is not None or state.file is None or state.file != tiers.file
        """Whether the rows are written into the store's tiers."""
        missing = self.moves and source is None and state.file is not None
        sizes = {rows_nR.shape[1] for rows_nR in rows} | ({state.row_bytes} if missing else set())
        if sizes - {layout.row_bytes}:
            raise SettingsError(
                "the events of the checkpoint have other columns than [schema] and learner.strategy declare; put those "
                "back, or start empty by moving the checkpoints away"
            )
        self._reservoir, self._layout, self._tiers, self._seed = reservoir, layout, tiers, seed
        self.keeps_slots = missing and tiers.durable and int(contents.index["slot"].max(initial=-1)) < tiers.slots
        """Whether moved events have the slots that the checkpoint names, so that its segments are valid."""
        self.converts = state.policy != reservoir.admission.name
        """Whether the checkpoint was made under another admission policy."""
        self._rows = self._rows_of(contents, source)
        self.contents = self._converted(contents) if self.converts else contents
        """The contents to restore."""
        self.lost = 0
        """Events whose rows could not be read; set by `assign_slots`."""

    def assign_slots(self, slots: SlotAllocator) -> NDArray[np.void]:
        """Assign slots to the events that fit the quotas, and return their index, ENTRY `[<= H]`."""
        state, index = self.contents.state, self.contents.index
        keep = np.ones(len(index), np.bool_)
        if len(keep) > self._reservoir.quotas.limit:
            keep = self._reservoir.quotas.lower(index["priority"], index["group"])
        kept = index[keep]
        if not self.moves:
            slots.restore(index["slot"], state.retired, state.checkpoint)
            slots.release(index["slot"][~keep])
            return kept
        # No checkpoint names a retired slot of the tier that the rows are moved into.
        slots.restore(kept["slot"] if self.keeps_slots else kept["slot"][:0], state.retired[:0], state.checkpoint)
        readable, identity = np.ones(len(kept), np.bool_), _identity(state, kept)
        for chunk, rows_nR, valid in read_in_chunks(self._rows, np.flatnonzero(keep)):
            readable[chunk] = valid
            into = kept["slot"][chunk]
            if not self.keeps_slots:
                into[valid] = slots.take(int(valid.sum()))
            self._tiers.write(into[valid].astype(np.int64), identity[chunk][valid], rows_nR[valid].__getitem__)
        if self.keeps_slots:
            slots.release(kept["slot"][~readable])
        self.lost = int((~readable).sum())
        return kept[readable]

    @property
    def goes_on(self) -> bool:
        """Whether the next checkpoint can contain the changes since this one, if all of its events are restored."""
        alike = not self._tiers.durable and self.contents.state.file is None
        return not self.converts and (not self.moves or self.keeps_slots or alike)

    def _rows_of(self, contents: StoreSnapshot, source: Tier | None) -> RowSource:
        """Return the rows of all events of the checkpoint."""
        if contents.payload is not None:
            return TensorRows(contents.payload)
        if self.moves and source is None and len(contents.index):
            assert contents.rows is not None
            return contents.rows
        primary = source or self._tiers.primary
        return _tier_rows(self._layout.row_bytes, contents.index, contents.state, primary)

    def _converted(self, contents: StoreSnapshot) -> StoreSnapshot:
        """Return contents with the priorities and groups of the store's policy; the rest is the same."""
        log.info("replay.admission has changed: the stored events get new priorities")
        admission, state, index = self._reservoir.admission, contents.state, contents.index.copy()
        identity = _identity(state, index)
        for chunk, rows_nR, _ in read_in_chunks(self._rows, np.arange(len(index))):
            events, weight = index[chunk], self._layout.unpack(torch.from_numpy(rows_nR))["weight"].numpy()
            # A row that cannot be read may have any weight; it is reported as lost later.
            weight = np.where(weight >= 0, weight, 1).astype(np.float32)
            hashes = keyed_hash(identity[chunk], self._seed)
            events["priority"] = admission.priorities(Candidates(hashes, weight, events["time_s"]))
            events["group"] = admission.group(events["label"].astype(np.int64), np.zeros(len(events), np.int16))
        state = replace(
            state,
            policy=admission.name,
            thresholds=np.full(admission.groups, np.inf),
            added=np.bincount(index["group"], minlength=admission.groups).astype(np.int64),
            weight=state.weight * len(index) / max(1, int(state.added.sum())),
        )
        return replace(contents, state=state, index=index)


def read_in_chunks(
    rows: RowSource, positions: NDArray[np.intp]
) -> Iterator[tuple[slice, NDArray[np.uint8], NDArray[np.bool_]]]:
    """Yield the rows at ascending positions `[H]` in pieces: slices of H, rows uint8 `[n, R]`, and which are valid."""
    count = max(1, min(_CHUNK, _CHUNK_BYTES // max(1, rows.row_bytes)))
    for begin in range(0, len(positions), count):
        chunk = slice(begin, begin + count)
        rows_nR, valid = rows.read(positions[chunk])
        yield chunk, rows_nR.numpy(), valid


def _identity(state: StoreState, events: NDArray[np.void]) -> NDArray[np.uint64]:
    """Return the identities of events of a checkpoint, ENTRY `[n]`."""
    return identity_hash(np.array(state.bases, np.uint64)[events["partition"]], events["offset"], events["row"])


def _tier_rows(row_bytes: int, events: NDArray[np.void], state: StoreState, tier: Tier) -> TierRows:
    return TierRows(row_bytes, events["slot"].astype(np.int64), _identity(state, events), tier.read)
