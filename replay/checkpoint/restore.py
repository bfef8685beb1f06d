"""Restores a checkpoint into a store whose policy, size and tiers may differ from those of the checkpoint.

Legend: H events of the checkpoint, n events of a chunk.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.core.errors import SettingsError
from ingest.events.identity import identity_hash, keyed_hash
from replay.checkpoint.slot_allocator import SlotAllocator
from replay.payload.hierarchy import TierHierarchy
from replay.reservoir.admission import Admission, Candidates
from replay.reservoir.reservoir import Reservoir
from replay.row_layout import RowLayout
from replay.snapshot import StoreSnapshot
from replay.tiers.tier import Tier

Rows = Callable[[slice, NDArray[np.uint64]], tuple[Tensor, NDArray[np.bool_]]]
"""Reads the rows of a slice of the events with these identities; returns uint8 `[n, R]`, and which are valid."""

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
        self._source, self._reservoir, self._layout, self._tiers, self._seed = source, reservoir, layout, tiers, seed
        self.keeps_slots = missing and tiers.durable and int(contents.index["slot"].max(initial=-1)) < tiers.slots
        """Whether moved events have the slots that the checkpoint names, so that its segments are valid."""
        self.converts = state.policy != reservoir.admission.name
        """Whether the checkpoint was made under another admission policy."""
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
        rows = self._rows_of(self.contents, kept, np.flatnonzero(keep))
        taken = None if self.keeps_slots else slots
        readable = move(kept, self.contents, rows, taken, self._tiers, self._layout.row_bytes)
        if self.keeps_slots:
            slots.release(kept["slot"][~readable])
        self.lost = int((~readable).sum())
        return kept[readable]

    @property
    def goes_on(self) -> bool:
        """Whether the next checkpoint can contain the changes since this one, if all of its events are restored."""
        alike = not self._tiers.durable and self.contents.state.file is None
        return not self.converts and (not self.moves or self.keeps_slots or alike)

    def _rows_of(self, contents: StoreSnapshot, index: NDArray[np.void], positions: NDArray[np.intp]) -> Rows:
        """Return a reader of the rows of events, ENTRY `[H]`, which are at `positions` of the checkpoint's payload."""

        def read(chunk: slice, identity: NDArray[np.uint64]) -> tuple[Tensor, NDArray[np.bool_]]:
            if contents.payload is not None:
                return contents.payload[torch.from_numpy(positions[chunk])], np.ones(len(identity), np.bool_)
            if self.moves and self._source is None:
                assert contents.rows is not None
                return contents.rows.read(positions[chunk])
            return (self._source or self._tiers).read(index["slot"][chunk].astype(np.int64), identity)

        return read

    def _converted(self, contents: StoreSnapshot) -> StoreSnapshot:
        log.info("replay.admission has changed: the stored events get new priorities")
        rows = self._rows_of(contents, contents.index, np.arange(len(contents.index)))
        weights = lambda rows_nR: self._layout.unpack(rows_nR)["weight"]  # noqa: E731
        size = self._layout.row_bytes
        return converted(contents, self._reservoir.admission, self._seed, weights, rows, size)


def converted(
    contents: StoreSnapshot,
    admission: Admission,
    seed: int,
    weights: Callable[[Tensor], Tensor],
    rows: Rows,
    row_bytes: int,
) -> StoreSnapshot:
    """Return contents with the priorities and groups that the events have under `admission`; the rest is the same.

    Args:
        contents: of a checkpoint.
        admission: the policy from now on.
        seed: of the store.
        weights: the weights of n events, by their rows uint8 `[n, R]`.
        rows: of the events.
        row_bytes: R.
    """
    index = contents.index.copy()
    for chunk, events, identity in _chunks(index, contents, row_bytes):
        weight = weights(rows(chunk, identity)[0]).numpy()
        # A row that cannot be read may have any weight; it is reported as lost later.
        weight = np.where(weight >= 0, weight, 1).astype(np.float32)
        events["priority"] = admission.priorities(Candidates(keyed_hash(identity, seed), weight, events["time_s"]))
        events["group"] = admission.group(events["label"].astype(np.int64), np.zeros(len(events), np.int16))
    state = replace(
        contents.state,
        policy=admission.name,
        thresholds=np.full(admission.groups, np.inf),
        added=np.bincount(index["group"], minlength=admission.groups).astype(np.int64),
        weight=contents.state.weight * len(index) / max(1, int(contents.state.added.sum())),
    )
    return replace(contents, state=state, index=index)


def move(
    index: NDArray[np.void],
    contents: StoreSnapshot,
    rows: Rows,
    slots: SlotAllocator | None,
    tiers: TierHierarchy,
    row_bytes: int,
) -> NDArray[np.bool_]:
    """Write the rows of events, ENTRY `[H]`, into slots; return which could be read.

    `slots` are those to take, and are set in `index`; None: the rows get the slots of `index`.
    """
    readable = np.ones(len(index), np.bool_)
    for chunk, events, identity in _chunks(index, contents, row_bytes):
        rows_nR, valid = rows(chunk, identity)
        readable[chunk] = valid
        if slots is not None:
            events["slot"][valid] = slots.take(int(valid.sum()))
        into = events["slot"][valid].astype(np.int64)
        tiers.write(into, identity[valid], rows_nR.numpy()[valid].__getitem__)
    return readable


def _chunks(
    index: NDArray[np.void], contents: StoreSnapshot, row_bytes: int
) -> Iterator[tuple[slice, NDArray[np.void], NDArray[np.uint64]]]:
    """Yield slices of events with views of them and their identities."""
    bases = np.array(contents.state.bases, np.uint64)
    count = max(1, min(_CHUNK, _CHUNK_BYTES // max(1, row_bytes)))
    for begin in range(0, len(index), count):
        chunk = slice(begin, begin + count)
        events = index[chunk]
        yield chunk, events, identity_hash(bases[events["partition"]], events["offset"], events["row"])
