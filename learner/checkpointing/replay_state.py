"""The store's part of a checkpoint: its contents as tensors and plain values, and back.

replay.safetensors        what is no event: retired slots, plans, thresholds, one bit for each event of each segment
segment-<n>.safetensors   events that came before checkpoint n, in order: what is known of them, and perhaps their rows
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
    """What a store adds to a checkpoint.

    Attributes:
        tensors: by part.
        carried: parts that lie in an earlier checkpoint already, and its number.
        state: plain values.
        segments: those of this checkpoint.
    """

    tensors: Mapping[str, Tensors]
    carried: Mapping[str, int]
    state: Mapping[str, Any]
    segments: Sequence[Segment]


def pack(
    standing: StoreState, change: StoreDelta, before: Sequence[Segment], load: Callable[[int, str], Tensors]
) -> ReplayPart:
    """Return the store's part of a checkpoint.

    Args:
        standing: of the store.
        change: of its events since checkpoint `change.base`.
        before: the segments of that checkpoint.
        load: reads a part of a checkpoint by its number and name.
    """
    base = change.base

    def read(segment: Segment) -> Tensors:
        assert base is not None
        return load(base, _part(segment))

    written = advance(before, change, standing.checkpoint, read)
    tensors: dict[str, Tensors] = {"replay": _tensors(standing, written.segments)}
    carried = {}
    for segment in written.segments:
        if segment.number == standing.checkpoint:
            assert written.fresh is not None
            tensors[_part(segment)] = written.fresh
        else:
            assert base is not None
            carried[_part(segment)] = base
    return ReplayPart(tensors, carried, _state(standing, written.segments), written.segments)


def unpack(checkpoint: Checkpoint) -> tuple[StoreSnapshot, Sequence[Segment]] | None:
    """Return the store's contents and its segments; None when the checkpoint was made without a store."""
    if "replay" not in checkpoint.tensors:
        return None
    tensors, state = checkpoint.tensors["replay"], checkpoint.state["replay"]
    segments = [
        Segment(number, np.unpackbits(tensors[f"live.{number}"].numpy(), count=rows).astype(np.bool_))
        for number, rows in state["segments"]
    ]
    index, payload, lost = assemble(segments, lambda segment: checkpoint.tensors.get(_part(segment)))
    standing = StoreState(
        checkpoint=state["checkpoint"],
        policy=state["policy"],
        file=None if state["file"] is None else TierRef(*state["file"]),
        retired=tensors["retired"].numpy(),
        thresholds=tensors["thresholds"].numpy(),
        added=tensors["offered"].numpy(),
        weight=state["weight"],
        bases=state["bases"],
        watermarks={index: (offset, row) for index, offset, row in state["watermarks"]},
        plans=[
            SavedPlan(step, tensors[f"plan.{step}"], _array(tensors[f"planned.{step}"], PLANNED))
            for step in state["plans"]
            if f"plan.{step}" in tensors  # those that named erased events are planned anew
        ],
        sampler={name: tensors[f"sampler.{name}"].numpy() for name in state["sampler"]},
        stale=state["stale"],
        seed=state["seed"],
    )
    return StoreSnapshot(standing, index, payload, lost), segments


def _tensors(standing: StoreState, segments: Sequence[Segment]) -> dict[str, Tensor]:
    found = {
        "retired": torch.from_numpy(standing.retired),
        "thresholds": torch.from_numpy(standing.thresholds),
        "offered": torch.from_numpy(standing.added),
        **{f"live.{segment.number}": torch.from_numpy(np.packbits(segment.live)) for segment in segments},
        **{f"sampler.{name}": torch.from_numpy(values) for name, values in standing.sampler.items()},
    }
    for plan in standing.plans:
        found[f"plan.{plan.step}"] = plan.rows
        found[f"planned.{plan.step}"] = torch.from_numpy(
            np.ascontiguousarray(plan.events).view(np.uint8).reshape(len(plan.events), PLANNED.itemsize)
        )
    return found


def _state(standing: StoreState, segments: Sequence[Segment]) -> dict[str, Any]:
    return {
        "checkpoint": standing.checkpoint,
        "policy": standing.policy,
        "file": None if standing.file is None else [standing.file.name, standing.file.id],
        "weight": standing.weight,
        "bases": list(standing.bases),
        "watermarks": [[partition, *mark] for partition, mark in standing.watermarks.items()],
        "plans": [plan.step for plan in standing.plans],
        "sampler": list(standing.sampler),
        "stale": list(standing.stale),
        "seed": standing.seed,
        "segments": [[segment.number, len(segment.live)] for segment in segments],
    }


def _part(segment: Segment) -> str:
    return f"{SEGMENT}{segment.number}"


def _array(values: Tensor, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    return values.numpy().reshape(-1).view(dtype)
