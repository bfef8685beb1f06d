"""Removes erased events and labels from the part of a checkpoint that a join has.

Erased events of a segment are overwritten with zeros and keep their index, since other checkpoints refer to events of a
segment by index.

Legend: H events of a checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ingest.events.block import Array
from learner.labels.join_segments import KEPT_SEGMENT, LABEL_SEGMENT, PART, entries_of, segments_of
from learner.labels.kept_labels import IDENTITY, erasable
from learner.labels.payload_file import NO_SLOT, memory_index
from learner.labels.waiting_table import WAITING
from replay.checkpoint.segments import Segment, Tensors

Covers = Callable[[Mapping[str, Array]], NDArray[np.bool_]]
"""Returns which of n events are erased, bool `[n]`, by `partition`, `offset` and `key_hash`."""


def erased_join_parts(tensors: Mapping[str, Tensors], state: Mapping[str, Any], covers: Covers) -> dict[str, Tensors]:
    """Return the parts that have erased events or labels, without these.

    Args:
        tensors: of the checkpoint, by part; damaged segments are absent.
        state: of the join.
        covers: the erased events.
    """
    part, own_keys = dict(tensors[PART]), state["own_keys_of_labels"]
    segments = segments_of(part, state["segments"], LABEL_SEGMENT)
    events = _covered(tensors, segments, LABEL_SEGMENT, WAITING, covers)
    for segment in segments:
        if (covered := events.get(f"{LABEL_SEGMENT}{segment.name}")) is not None:
            memory = entries_of(tensors[f"{LABEL_SEGMENT}{segment.name}"])["slot"][segment.live & covered]
            part["memory"] = part["memory"].clone()
            part["memory"][memory_index(memory[memory < NO_SLOT]).tolist()] = 0
    kept = segments_of(part, state["kept_segments"], KEPT_SEGMENT)
    labels = _covered(
        *(tensors, kept, KEPT_SEGMENT, IDENTITY), lambda columns: covers(erasable(columns, own_keys=own_keys))
    )
    dropped = _drop_events(part, _stays(part, segments, LABEL_SEGMENT, events))
    stays = _stays(part, kept, KEPT_SEGMENT, labels)
    part["label.state"] = part["label.state"][torch.from_numpy(stays)]
    changed: dict[str, Tensors] = {name: _zeroed(tensors[name], WAITING, covered) for name, covered in events.items()}
    for name, covered in events.items():
        entries_of(changed[name])["slot"][covered] = NO_SLOT
    changed |= {name: _zeroed(tensors[name], IDENTITY, covered) for name, covered in labels.items()}
    return {**changed, PART: part} if dropped or not stays.all() else changed


def named_join_slots(tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the slots of the join's file that a checkpoint refers to."""
    slots = [np.empty(0, np.int64)]
    for segment in segments_of(tensors[PART], state["segments"], LABEL_SEGMENT):
        if (name := f"{LABEL_SEGMENT}{segment.name}") in tensors:
            slots.append(entries_of(tensors[name])["slot"][segment.live].astype(np.int64))
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


def _covered(
    tensors: Mapping[str, Tensors], segments: Sequence[Segment], prefix: str, kind: np.dtype[np.void], covers: Covers
) -> dict[str, NDArray[np.bool_]]:
    """Return which entries are erased, bool, of each part with erased ones."""
    found = dict[str, NDArray[np.bool_]]()
    for name in (f"{prefix}{segment.name}" for segment in segments):
        if name in tensors:
            entries = _entries(tensors[name], kind)
            covered = covers({column: entries[column] for column in ("partition", "offset", "key_hash")})
            found |= {name: covered} if covered.any() else {}
    return found


def _stays(
    part: dict[str, torch.Tensor], segments: Sequence[Segment], prefix: str, erased: Mapping[str, NDArray[np.bool_]]
) -> NDArray[np.bool_]:
    """Return which of all held entries are not erased, and set these alone as held."""
    stays = [np.zeros(0, np.bool_)]
    for segment in segments:
        name, left = f"{prefix}{segment.name}", segment.live
        if name in erased:
            left = segment.live & ~erased[name]
            part[f"live.{name}"] = torch.from_numpy(np.packbits(left))
        stays.append(left[segment.live])
    return np.concatenate(stays)


def _zeroed(segment: Tensors, kind: np.dtype[np.void], covered: NDArray[np.bool_]) -> Tensors:
    """Return a segment whose erased entries are zeros, with an offset of -1."""
    assert kind.fields is not None
    index, (size, begin, *_) = segment["index"].clone(), kind.fields["offset"]
    erased = torch.from_numpy(covered)
    index[erased] = 0
    index[erased, begin : begin + size.itemsize] = 0xFF
    return {"index": index}


def _entries(segment: Tensors, kind: np.dtype[np.void]) -> NDArray[np.void]:
    """Return a copy of the events or labels of a segment, of which `kind` is the first part."""
    first = np.ascontiguousarray(segment["index"].numpy()[:, : kind.itemsize])
    return first.view(kind).reshape(-1)
