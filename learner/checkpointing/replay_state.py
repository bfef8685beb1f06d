"""The store's part of a checkpoint: converts the store's contents to tensors and plain values, and back.

replay.safetensors        all but events: retired slots, plans, thresholds, one bit for each event of each segment
segment-<n>.safetensors   some of the events added before checkpoint n, in order: their index entries, and rows without
                          a tier; segment-<n>-1 and so on have those beyond `PIECE_BYTES`
rows-<n>.safetensors      with [storage], the rows of these events where a tier has them too
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.state_dir.checkpoint import SEGMENT, Checkpoint, rows_part
from learner.state_dir.rows_file import LoadRows, with_earlier
from replay.checkpoint.segments import Segment, Tensors, advance, assemble, most_events
from replay.row_source import JoinedRows, RowSource
from replay.snapshot import ENTRY, PLANNED, SavedPlan, StoreDelta, StoreSnapshot, StoreState, TierRef


@dataclass(frozen=True)
class ReplayPart:
    """The store's part of a checkpoint.

    Attributes:
        tensors: new tensors, by part.
        rows: new rows, by part; they are read when they are written.
        carried: the parts that an earlier checkpoint has already, with its number.
        state: plain values.
        segments: all segments of this checkpoint.
    """

    tensors: Mapping[str, Tensors]
    rows: Mapping[str, RowSource]
    carried: Mapping[str, int]
    state: Mapping[str, Any]
    segments: Sequence[Segment]


def pack(
    store: StoreState,
    delta: StoreDelta,
    before: Sequence[Segment],
    load: Callable[[int, str], Tensors],
    load_rows: LoadRows | None = None,
) -> ReplayPart:
    """Return the store's part of a checkpoint.

    Args:
        store: the store's state.
        delta: the events added and removed since checkpoint `delta.base`.
        before: the segments of that checkpoint.
        load: reads a part of a checkpoint, by the checkpoint's number and the part's name.
        load_rows: opens a part with rows likewise; for rows that the tier cannot read.
    """
    base = delta.base

    def read(segment: Segment) -> Tensors:
        assert base is not None
        return load(base, _part(segment))

    row_bytes = store.row_bytes if delta.payload is None else delta.payload.shape[1]
    written = advance(before, delta, store.checkpoint, read, most_events(row_bytes or 0))
    tensors: dict[str, Tensors] = {"replay": _tensors(store, written.segments)}
    rows, carried = dict[str, RowSource](), dict[str, int]()
    for segment in written.segments:
        part = _part(segment)
        if (new := written.new.get(segment.name)) is not None:
            tensors[part] = new.tensors
            if delta.rows is not None:
                fresh = delta.rows(records_of(new.tensors["index"], ENTRY))
                merged = {rows_part(_part(each)): each for each in new.merged}
                rows[rows_part(part)] = with_earlier(fresh, merged, base, load_rows)
        else:
            assert base is not None
            carried[part] = base
            if delta.rows is not None:
                carried[rows_part(part)] = base
    return ReplayPart(tensors, rows, carried, _state(store, written.segments), written.segments)


def unpack(checkpoint: Checkpoint) -> tuple[StoreSnapshot, Sequence[Segment]] | None:
    """Return the store's contents and its segments; None when the checkpoint has no store."""
    if "replay" not in checkpoint.tensors:
        return None
    tensors, state = checkpoint.tensors["replay"], checkpoint.state["replay"]
    segments = [
        Segment(name, np.unpackbits(tensors[f"live.{name}"].numpy(), count=rows).astype(np.bool_))
        for name, rows in state["segments"]
    ]
    index, payload, lost = assemble(segments, lambda segment: checkpoint.tensors.get(_part(segment)))
    size = state["row_bytes"]
    rows = [
        (checkpoint.rows[rows_part(part)], np.flatnonzero(segment.live))
        for segment in segments
        if size is not None and (part := _part(segment)) in checkpoint.tensors
    ]
    store = StoreState(
        checkpoint=state["checkpoint"],
        policy=state["policy"],
        file=None if state["file"] is None else TierRef(*state["file"]),
        retired=tensors["retired"].numpy(),
        thresholds=tensors["thresholds"].numpy(),
        added=tensors["added"].numpy(),
        weight=state["weight"],
        bases=state["bases"],
        watermarks={index: (offset, row) for index, offset, row in state["watermarks"]},
        plans=[
            SavedPlan(step, tensors[f"plan.{step}"], records_of(tensors[f"planned.{step}"], PLANNED))
            for step in state["plans"]
            if f"plan.{step}" in tensors  # those with erased events are planned again
        ],
        sampler={name: tensors[f"sampler.{name}"].numpy() for name in state["sampler"]},
        stale=state["stale"],
        row_bytes=size,
        stamp=state["stamp"],
    )
    return StoreSnapshot(store, index, payload, lost, None if size is None else JoinedRows(size, rows)), segments


def _tensors(store: StoreState, segments: Sequence[Segment]) -> dict[str, Tensor]:
    tensors = {
        "retired": torch.from_numpy(store.retired),
        "thresholds": torch.from_numpy(store.thresholds),
        "added": torch.from_numpy(store.added),
        **{f"live.{segment.name}": torch.from_numpy(np.packbits(segment.live)) for segment in segments},
        **{f"sampler.{name}": torch.from_numpy(values) for name, values in store.sampler.items()},
    }
    for plan in store.plans:
        tensors[f"plan.{plan.step}"] = plan.rows
        tensors[f"planned.{plan.step}"] = torch.from_numpy(
            np.ascontiguousarray(plan.events).view(np.uint8).reshape(len(plan.events), PLANNED.itemsize)
        )
    return tensors


def _state(store: StoreState, segments: Sequence[Segment]) -> dict[str, Any]:
    return {
        "checkpoint": store.checkpoint,
        "policy": store.policy,
        "file": None if store.file is None else [store.file.name, store.file.id],
        "weight": store.weight,
        "bases": list(store.bases),
        "watermarks": [[partition, *mark] for partition, mark in store.watermarks.items()],
        "plans": [plan.step for plan in store.plans],
        "sampler": list(store.sampler),
        "stale": list(store.stale),
        "row_bytes": store.row_bytes,
        "stamp": store.stamp,
        "segments": [[segment.name, len(segment.live)] for segment in segments],
    }


def _part(segment: Segment) -> str:
    return f"{SEGMENT}{segment.name}"


def records_of(values: Tensor, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """Return a tensor of bytes as records of `dtype`, without a copy."""
    return values.numpy().reshape(-1).view(dtype)
