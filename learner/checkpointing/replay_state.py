"""The store's part of a checkpoint: converts the store's contents to tensors and plain values, and back.

replay.safetensors        all but events: retired slots, plans, thresholds, one bit for each event of each segment
segment-<n>.safetensors   the events added before checkpoint n, in order: their index entries, and rows if they have any
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.state_dir.checkpoint import SEGMENT, Checkpoint
from replay.checkpoint.segments import Segment, Tensors, advance, assemble
from replay.snapshot import PLANNED, SavedPlan, StoreDelta, StoreSnapshot, StoreState, TierRef


@dataclass(frozen=True)
class ReplayPart:
    """The store's part of a checkpoint.

    Attributes:
        tensors: new tensors, by part.
        carried: the parts that an earlier checkpoint has already, with its number.
        state: plain values.
        segments: all segments of this checkpoint.
    """

    tensors: Mapping[str, Tensors]
    carried: Mapping[str, int]
    state: Mapping[str, Any]
    segments: Sequence[Segment]


def pack(
    store: StoreState, delta: StoreDelta, before: Sequence[Segment], load: Callable[[int, str], Tensors]
) -> ReplayPart:
    """Return the store's part of a checkpoint.

    Args:
        store: the store's state.
        delta: the events added and removed since checkpoint `delta.base`.
        before: the segments of that checkpoint.
        load: reads a part of a checkpoint, by the checkpoint's number and the part's name.
    """
    base = delta.base

    def read(segment: Segment) -> Tensors:
        assert base is not None
        return load(base, _part(segment))

    written = advance(before, delta, store.checkpoint, read)
    tensors: dict[str, Tensors] = {"replay": _tensors(store, written.segments)}
    carried = {}
    for segment in written.segments:
        if segment.number == store.checkpoint:
            assert written.fresh is not None
            tensors[_part(segment)] = written.fresh
        else:
            assert base is not None
            carried[_part(segment)] = base
    return ReplayPart(tensors, carried, _state(store, written.segments), written.segments)


def unpack(checkpoint: Checkpoint) -> tuple[StoreSnapshot, Sequence[Segment]] | None:
    """Return the store's contents and its segments; None when the checkpoint has no store."""
    if "replay" not in checkpoint.tensors:
        return None
    tensors, state = checkpoint.tensors["replay"], checkpoint.state["replay"]
    segments = [
        Segment(number, np.unpackbits(tensors[f"live.{number}"].numpy(), count=rows).astype(np.bool_))
        for number, rows in state["segments"]
    ]
    index, payload, lost = assemble(segments, lambda segment: checkpoint.tensors.get(_part(segment)))
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
        seed=state["seed"],
    )
    return StoreSnapshot(store, index, payload, lost), segments


def _tensors(store: StoreState, segments: Sequence[Segment]) -> dict[str, Tensor]:
    tensors = {
        "retired": torch.from_numpy(store.retired),
        "thresholds": torch.from_numpy(store.thresholds),
        "added": torch.from_numpy(store.added),
        **{f"live.{segment.number}": torch.from_numpy(np.packbits(segment.live)) for segment in segments},
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
        "seed": store.seed,
        "segments": [[segment.number, len(segment.live)] for segment in segments],
    }


def _part(segment: Segment) -> str:
    return f"{SEGMENT}{segment.number}"


def records_of(values: Tensor, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    """Return a tensor of bytes as records of `dtype`, without a copy."""
    return values.numpy().reshape(-1).view(dtype)
