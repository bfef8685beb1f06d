"""Removes erased events and labels from the part of a checkpoint that a join has.

Erased events of a segment are overwritten with zeros and keep their index, since other checkpoints refer to events of a
segment by index.

Legend: H events of a checkpoint.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ingest.events.block import Array
from learner.labels.join_checkpoint import LABEL_SEGMENT, PART, entries_of, live_events
from learner.labels.kept_labels import COLUMNS, erasable
from learner.labels.payload_file import NO_SLOT, memory_index
from replay.checkpoint.segments import Tensors

Covers = Callable[[Mapping[str, Array]], NDArray[np.bool_]]
"""Returns which of n events are erased, bool `[n]`, by `partition`, `offset` and `key_hash`."""


def erased_join_parts(tensors: Mapping[str, Tensors], state: Mapping[str, Any], covers: Covers) -> dict[str, Tensors]:
    """Return the parts that have erased events or labels, without these.

    Args:
        tensors: of the checkpoint, by part; damaged segments are absent.
        state: of the join.
        covers: the erased events.
    """
    changed, part, stays = dict[str, Tensors](), dict(tensors[PART]), [np.zeros(0, np.bool_)]
    for segment, rows in state["segments"]:
        live, name = live_events(part, segment, rows), f"{LABEL_SEGMENT}{segment}"
        left = live
        if name in tensors:
            entries = entries_of(tensors[name])
            covered = covers({column: entries[column] for column in ("partition", "offset", "key_hash")})
            if covered.any():
                changed[name] = {"index": tensors[name]["index"].clone()}
                erased = entries_of(changed[name])
                erased[covered] = 0
                erased["offset"][covered], erased["slot"][covered] = -1, NO_SLOT
                left = live & ~covered
                memory = entries["slot"][live & covered]
                part["memory"] = part["memory"].clone()
                part["memory"][memory_index(memory[memory < NO_SLOT]).tolist()] = 0
        stays.append(left[live])
        part[f"live.{segment}"] = torch.from_numpy(np.packbits(left))
    dropped = _drop_events(part, np.concatenate(stays)) | _drop_labels(
        part, covers, own_keys=state["own_keys_of_labels"]
    )
    return {**changed, PART: part} if dropped else changed


def named_join_slots(tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the slots of the join's file that a checkpoint refers to."""
    slots = [np.empty(0, np.int64)]
    for segment, rows in state["segments"]:
        if (name := f"{LABEL_SEGMENT}{segment}") in tensors:
            slots.append(entries_of(tensors[name])["slot"][live_events(tensors[PART], segment, rows)].astype(np.int64))
    named = np.concatenate(slots)
    return named[named >= 0]


def _drop_events(part: dict[str, torch.Tensor], stays_H: NDArray[np.bool_]) -> bool:
    """Leave out the states and decisions of events that do not stay; return whether there are any."""
    if stays_H.all():
        return False
    part["state"] = part["state"][torch.from_numpy(stays_H)]
    if "decided.id" in part:
        position = part["decided.id"].numpy()
        left = torch.from_numpy(stays_H[position])
        moved = np.cumsum(stays_H, dtype=np.int32) - 1
        part["decided.id"] = torch.from_numpy(moved[position])
        for name in [name for name in part if name.startswith("decided.")]:
            part[name] = part[name][left]
    return True


def _drop_labels(part: dict[str, torch.Tensor], covers: Covers, *, own_keys: bool) -> bool:
    """Leave out erased labels; return whether there are any."""
    covered = covers(erasable({name: part[f"label.{name}"].numpy() for name in COLUMNS}, own_keys=own_keys))
    for name in [name for name in part if name.startswith("label.")] if covered.any() else ():
        part[name] = part[name][torch.from_numpy(~covered)]
    return bool(covered.any())
