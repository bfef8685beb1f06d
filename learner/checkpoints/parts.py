"""The parts of a checkpoint that are packed in the background: the contract, and the part of the store.

A part is captured between two steps and packed while steps go on. `part_formats.py` has the layout of the files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints, rows_part
from anabranch.learner.checkpoints.part_formats import STORE, STORED, EventSegments, PartFormat, records_of
from anabranch.learner.checkpoints.rows_file import with_earlier
from anabranch.replay.background_store import BackgroundStore
from anabranch.replay.checkpoint import CapturedStore
from anabranch.replay.erasure.erased_events import ErasedEvents
from anabranch.replay.row_source import RowSource
from anabranch.replay.segments import Segment, Tensors, advance, assemble, most_events
from anabranch.replay.snapshot import PLANNED, SavedPlan, StoreDelta, StoreSnapshot, StoreState, TierRef

_PLAIN = ("checkpoint", "policy", "weight", "bases", "stale", "row_bytes", "stamp")
"""Fields of `StoreState` that are in the state of the part as they are."""
_ARRAYS = ("retired", "thresholds", "added")
"""Those that are among its tensors."""
_SLOTS_AT_ONCE = 4096
"""Slots that are overwritten between two steps."""


@dataclass(frozen=True)
class PackedPart:
    """What a checkpoint has of a part.

    Attributes:
        name: of the part: its key in the state.
        state: plain values.
        tensors: new tensors, by part.
        carried: the parts that an earlier checkpoint has already, with its number.
        rows: new rows, by part; they are read when they are written.
    """

    name: str
    state: dict[str, Any]
    tensors: dict[str, Tensors]
    carried: dict[str, int] = field(default_factory=dict)
    rows: dict[str, RowSource] = field(default_factory=dict)

    def add(
        self,
        layout: EventSegments,
        before: Sequence[Segment],
        change: StoreDelta,
        earlier: Checkpoints,
        row_bytes: int = 0,
    ) -> Sequence[Segment]:
        """Add events or labels, and return their segments.

        Args:
            layout: of the segments.
            before: the segments of the checkpoint that the change is relative to.
            change: what was added and removed since.
            earlier: the checkpoints that were written before, for segments that are merged.
            row_bytes: that an event has in the checkpoint, besides its entry.
        """
        base, number = change.base, self.state["checkpoint"]

        def read(segment: Segment) -> Tensors:
            assert base is not None
            return earlier.part(base, layout.part(segment))

        written = advance(before, change, number, read, most_events(row_bytes, change.index.dtype))
        bits = dict[str, Tensor]()
        for segment in written.segments:
            part = layout.part(segment)
            bits |= layout.live_bits(segment)
            if (new := written.new.get(segment.name)) is None:
                assert base is not None
                self.carried[part] = base
                if change.rows is not None:
                    self.carried[rows_part(part)] = base
                continue
            self.tensors[part] = new.tensors
            if change.rows is not None:
                merged = {rows_part(layout.part(each)): each for each in new.merged}
                fresh = change.rows(layout.entries(new.tensors))
                self.rows[rows_part(part)] = with_earlier(fresh, merged, base, earlier.rows)
        self.tensors[self.name] = {**self.tensors[self.name], **bits}
        self.state[layout.key] = [[segment.name, len(segment.live)] for segment in written.segments]
        return written.segments


class CapturedPart:
    """A part as it was between two steps. The thread that writes checkpoints calls its methods."""

    def pack(self, earlier: Checkpoints, oldest: int) -> PackedPart:
        """Return the part, once its rows outlive the process.

        Args:
            earlier: the checkpoints that were written before.
            oldest: the first checkpoint that may be restored once this one is written.

        Raises:
            OSError: the rows cannot be made durable.
        """
        raise NotImplementedError

    def mark_named(self) -> None:
        """Record that a checkpoint that was written names the file of the rows; raises OSError."""


class CheckpointPart:
    """What has a part in each checkpoint. The loop's thread calls its methods, save where one says otherwise."""

    format: PartFormat

    def many_slots_wait(self, checkpoints: int) -> bool:
        """Return whether a checkpoint should start early, since slots are reused only after so many more of them."""
        return False

    def is_full(self) -> bool:
        """Return whether a checkpoint should start early, unless the last one has failed."""
        return False

    def has_room(self) -> bool:
        """Return whether a step can add its events; while not, the loop waits for checkpoints."""
        return True

    def capture(self, number: int) -> CapturedPart:
        """Copy what checkpoint `number` needs; its slots are not written until `end`."""
        raise NotImplementedError

    def end(self, oldest: int | None, *, written: bool) -> None:
        """Learn that the checkpoint is written, or has failed, so that slots are reused.

        Args:
            oldest: the number of the oldest checkpoint that may be restored; None without one.
            written: whether it was written; if not, the next one has all events.
        """

    # Erasure. What was erased is overwritten where no event and no checkpoint names it.

    def erase(self, erased: ErasedEvents) -> int:
        """Remove the erased events that are in use, and return how many there were."""
        return 0

    def mark_unerased(self) -> None:
        """Learn that an earlier process may have left erased rows."""

    @property
    def file(self) -> TierRef | None:
        """The file with the rows in use, if checkpoints name its slots."""
        return None

    def begin_overwrite(self) -> None:
        """Learn that checkpoints are being rewritten; those that begin from now on name the slots that are used now."""

    def overwrite(self, named: NDArray[np.int64]) -> Iterator[None]:
        """Overwrite erased rows in all slots but those named by checkpoints, in pieces; raises OSError."""
        return iter(())

    def sync(self) -> None:
        """Wait until what was overwritten outlives the process; raises OSError. Called by the checkpoints' thread."""

    @property
    def unerased(self) -> str | None:
        """Why there are still erased rows after `overwrite` and `sync`."""
        return None


class StorePart(CheckpointPart):
    """The part of the store."""

    format = STORE

    def __init__(self, store: BackgroundStore, segments: Sequence[Segment] = ()) -> None:
        """`segments`: of the restored checkpoint."""
        self._store = store
        self._tiers = store.flush().tiers
        """Used in any thread, where its methods allow that."""
        self._segments = segments
        self._captured: _CapturedStore | None = None

    @override
    def many_slots_wait(self, checkpoints: int) -> bool:
        return self._store.many_slots_wait(checkpoints)

    @override
    def has_room(self) -> bool:
        return self._store.has_room()

    @override
    def capture(self, number: int) -> CapturedPart:
        self._captured = _CapturedStore(self._store.flush().begin_snapshot(number), self._segments)
        return self._captured

    @override
    def end(self, oldest: int | None, *, written: bool) -> None:
        if written and self._captured is not None:
            self._segments = self._captured.segments
        self._captured = None
        self._store.flush().end_snapshot(oldest, written=written)

    @override
    def erase(self, erased: ErasedEvents) -> int:
        return self._store.flush().erase(erased)

    @override
    def mark_unerased(self) -> None:
        self._store.flush().tiers.erasure.mark_stale()

    @property
    @override
    def file(self) -> TierRef | None:
        return self._store.flush().tiers.file

    @override
    def overwrite(self, named: NDArray[np.int64]) -> Iterator[None]:
        is_named = np.zeros(self._store.flush().tiers.slots, np.bool_)
        is_named[named] = True
        first = 0
        while self._store.flush().tiers.erasure.erase_stale(first, _SLOTS_AT_ONCE):
            first += _SLOTS_AT_ONCE
            yield
        while self._store.flush().erase_unknown(is_named, _SLOTS_AT_ONCE):
            yield

    @override
    def sync(self) -> None:
        self._tiers.sync()

    @property
    @override
    def unerased(self) -> str | None:
        tiers = self._store.flush().tiers
        return (tiers.problem or "a tier could not be reached") if tiers.erasure.failed else None


class _CapturedStore(CapturedPart):
    def __init__(self, captured: CapturedStore, segments: Sequence[Segment]) -> None:
        self._captured = captured
        self.segments = segments
        """Those of the last checkpoint; after `pack` those of this one."""

    @override
    def pack(self, earlier: Checkpoints, oldest: int) -> PackedPart:
        packed, self.segments = pack(*self._captured.contents(oldest), self.segments, earlier)
        return packed

    @override
    def mark_named(self) -> None:
        self._captured.mark_named()


def pack(
    store: StoreState, delta: StoreDelta, before: Sequence[Segment], earlier: Checkpoints
) -> tuple[PackedPart, Sequence[Segment]]:
    """Return the store's part of a checkpoint, and its segments.

    Args:
        store: the store's state.
        delta: the events added and removed since checkpoint `delta.base`.
        before: the segments of that checkpoint.
        earlier: the checkpoints.
    """
    packed = PackedPart(STORE.name, _state(store), {STORE.name: _tensors(store)})
    row_bytes = store.row_bytes if delta.payload is None else delta.payload.shape[1]
    return packed, packed.add(STORED, before, delta, earlier, row_bytes or 0)


def unpack(checkpoint: Checkpoint) -> tuple[StoreSnapshot, Sequence[Segment]] | None:
    """Return the store's contents and its segments; None when the checkpoint has no store."""
    if STORE.name not in checkpoint.tensors:
        return None
    tensors, state = checkpoint.tensors[STORE.name], checkpoint.state[STORE.name]
    segments = STORED.of(tensors, state)
    index, payload, lost = assemble(segments, lambda segment: checkpoint.tensors.get(STORED.part(segment)))
    fields: dict[str, Any] = {name: state[name] for name in _PLAIN} | {name: tensors[name].numpy() for name in _ARRAYS}
    store = StoreState(
        **fields,
        file=STORE.file(checkpoint.state),
        watermarks={index: (offset, row) for index, offset, row in state["watermarks"]},
        plans=[
            SavedPlan(step, tensors[f"plan.{step}"], records_of(tensors[f"planned.{step}"], PLANNED))
            for step in state["plans"]
            if f"plan.{step}" in tensors  # those with erased events are planned again
        ],
        sampler={name: tensors[f"sampler.{name}"].numpy() for name in state["sampler"]},
    )
    rows = STORED.rows(checkpoint, segments, state["row_bytes"])
    return StoreSnapshot(store, index, payload, lost, rows), segments


def _tensors(store: StoreState) -> dict[str, Tensor]:
    tensors = {
        **{name: torch.from_numpy(getattr(store, name)) for name in _ARRAYS},
        **{f"sampler.{name}": torch.from_numpy(values) for name, values in store.sampler.items()},
    }
    for plan in store.plans:
        tensors[f"plan.{plan.step}"] = plan.rows
        tensors[f"planned.{plan.step}"] = torch.from_numpy(
            np.ascontiguousarray(plan.events).view(np.uint8).reshape(len(plan.events), PLANNED.itemsize)
        )
    return tensors


def _state(store: StoreState) -> dict[str, Any]:
    return {
        **{name: getattr(store, name) for name in _PLAIN},
        "file": None if store.file is None else [store.file.name, store.file.id],
        "watermarks": [[partition, *mark] for partition, mark in store.watermarks.items()],
        "plans": [plan.step for plan in store.plans],
        "sampler": list(store.sampler),
    }
