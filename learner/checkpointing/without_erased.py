"""Removes erased events from a checkpoint: from each checkpoint that is loaded, and from those on the disk.

Erased events are overwritten with zeros and keep their index in the segment, since other checkpoints refer to events of
a segment by index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ingest.events.identity import partition_base
from ingest.events.partition import TopicPartition
from learner.checkpointing.replay_state import records_of
from learner.errors import MisfitError
from learner.labels.erased_join import erased_join_parts, named_join_slots
from learner.labels.join_segments import LABEL_SEGMENT, PART, entries_of
from learner.state_dir.checkpoint import ERASED, SEGMENT, Checkpoint
from replay.erasure.erased_events import ErasedEvents
from replay.erasure.erasure_log import ErasureLog
from replay.reservoir.event_table import columns_of
from replay.sampling.base import BY_POSITION
from replay.snapshot import ENTRY, PLANNED

Tensors = Mapping[str, Tensor]

_NO_EVENT = -1
"""The offset of an event that was overwritten."""


def erased_parts(tensors: Mapping[str, Tensors], state: Mapping[str, Any], erased: ErasedEvents) -> dict[str, Tensors]:
    """Return the parts of a checkpoint that have erased events, without these events.

    Args:
        tensors: of the checkpoint, by part; lost segments are absent. Only tensors that are needed are read.
        state: of the checkpoint.
        erased: the erased events.
    """
    bases, changed = partition_bases(state), dict[str, Tensors]()
    if "holdout" in tensors and len(holdout := tensors["holdout"]):
        covered = erased.covers(bases, {name: holdout[name].numpy() for name in ("partition", "offset", "key_hash")})
        if covered.any():
            stays = torch.from_numpy(~covered)
            changed["holdout"] = {name: column[stays] for name, column in holdout.items()}
    if PART in tensors:
        changed |= erased_join_parts(tensors, state[PART], lambda columns: erased.covers(bases, columns))
    if "replay" not in tensors:
        return changed
    hits = {}
    for name, _ in state["replay"]["segments"]:
        if (part := f"{SEGMENT}{name}") in tensors:
            covered = erased.covers(bases, columns_of(records_of(tensors[part]["index"], ENTRY)))
            if covered.any():
                hits[name] = covered
                changed[part] = _zeroed(tensors[part], covered)
    replay = _without_hits(tensors["replay"], state["replay"], hits, erased, bases)
    return changed | ({"replay": replay} if replay is not None else {})


def check_age(number: int, checkpoint: Checkpoint, written: ErasureLog) -> None:
    """Raise MisfitError where the log has dropped records that a checkpoint needs."""
    if not checkpoint.begins and checkpoint.state.get(ERASED, 0) < written.dropped:
        raise MisfitError(
            f"checkpoint {number} was made before events were erased that {written.path} no longer lists, so that they "
            "would come back with it; restore a newer checkpoint, or begin again by moving the checkpoints away"
        )


def without_erased(checkpoint: Checkpoint, erased: ErasedEvents) -> tuple[Checkpoint, tuple[int, int]]:
    """Return a checkpoint without erased events, and how many were removed from store and join, and the holdout set."""
    parts = erased_parts(checkpoint.tensors, checkpoint.state, erased)
    return replace(checkpoint, tensors={**checkpoint.tensors, **parts}), _removed(
        checkpoint.tensors, parts, checkpoint.state
    )


def _removed(before: Mapping[str, Tensors], parts: Mapping[str, Tensors], state: Mapping[str, Any]) -> tuple[int, int]:
    store = holdout = 0
    if "holdout" in parts:
        holdout = len(before["holdout"]["label"]) - len(parts["holdout"]["label"])
    if PART in parts:
        store += len(before[PART]["state"]) - len(parts[PART]["state"])
    if "replay" in parts:
        for name, rows in state["replay"]["segments"]:
            live, left = (_live(tensors["replay"], name, rows) for tensors in (before, parts))
            store += int(np.count_nonzero(live)) - int(np.count_nonzero(left))
    return store, holdout


def erased_in(part: str, segment: Tensors) -> NDArray[np.bool_]:
    """Return which events of a segment are erased, bool, by its part's name."""
    events = entries_of(segment) if part.startswith(LABEL_SEGMENT) else records_of(segment["index"], ENTRY)
    erased: NDArray[np.bool_] = events["offset"] == _NO_EVENT
    return erased


def named_slots(tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> dict[str, NDArray[np.int64]]:
    """Return the slots that a checkpoint refers to, by the id of their file."""
    named = {}
    if PART in tensors:
        named[state[PART]["file"][1]] = named_join_slots(tensors, state[PART])
    if (file := state.get("replay", {}).get("file")) is not None:
        slots = [np.empty(0, np.int64)]
        for name, rows in state["replay"]["segments"] if "replay" in tensors else ():
            part = f"{SEGMENT}{name}"
            if part in tensors:
                live = _live(tensors["replay"], name, rows)
                slots.append(records_of(tensors[part]["index"], ENTRY)["slot"][live].astype(np.int64))
        named[file[1]] = np.concatenate(slots)
    return named


def partition_bases(state: Mapping[str, Any]) -> NDArray[np.uint64]:
    """Return `partition_base` of each partition of a checkpoint, by its index."""
    names = [
        TopicPartition(row["topic"], row["partition"], row["incarnation"], row["history"]) for row in state["ledger"]
    ]
    return np.array([partition_base(name) for name in names], np.uint64)


def _zeroed(segment: Tensors, covered: NDArray[np.bool_]) -> Tensors:
    changed = {name: tensor.clone() for name, tensor in segment.items()}
    for tensor in changed.values():
        tensor[torch.from_numpy(covered)] = 0
    records_of(changed["index"], ENTRY)["offset"][covered] = _NO_EVENT
    return changed


def _without_hits(
    tensors: Tensors,
    state: Mapping[str, Any],
    hits: Mapping[str, NDArray[np.bool_]],
    erased: ErasedEvents,
    bases: NDArray[np.uint64],
) -> Tensors | None:
    """Return the part `replay` without erased events and their plans; None where it has none of them.

    `hits` has the erased events of each segment, by its name.
    """
    changed, stays = dict(tensors), [np.empty(0, np.bool_)]
    for name, rows in state["segments"]:
        live = _live(tensors, name, rows)
        left = live & ~hits[name] if name in hits else live
        stays.append(left[live])
        changed[f"live.{name}"] = torch.from_numpy(np.packbits(left))
    if not all(mask.all() for mask in stays):
        for name in BY_POSITION.intersection(state["sampler"]):
            changed[f"sampler.{name}"] = tensors[f"sampler.{name}"][torch.from_numpy(np.concatenate(stays))]
    for step in _dropped_plans(tensors, state["plans"], erased, bases):
        del changed[f"plan.{step}"], changed[f"planned.{step}"]
    same = all(mask.all() for mask in stays) and changed.keys() == set(tensors)
    return None if same else changed


def _dropped_plans(
    tensors: Tensors, steps: Sequence[int], erased: ErasedEvents, bases: NDArray[np.uint64]
) -> Sequence[int]:
    """Return the steps from the first one on whose plan has an erased event; they are planned again."""
    planned = [step for step in steps if f"plan.{step}" in tensors]
    for index, step in enumerate(planned):
        if erased.covers(bases, columns_of(records_of(tensors[f"planned.{step}"], PLANNED))).any():
            return planned[index:]
    return ()


def _live(tensors: Tensors, name: str, rows: int) -> NDArray[np.bool_]:
    return np.unpackbits(tensors[f"live.{name}"].numpy(), count=rows).astype(np.bool_)
