"""A checkpoint without what is erased: applied to every checkpoint that is loaded, and to those that lie on the
disk.

Events stay where they are in their segment, as zeros that no longer count: so whoever goes on from the checkpoint
before knows the events of a segment by their places.

Legend: n events of a part, B events held.
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
from learner.errors import MisfitError
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
    """Return those parts of a checkpoint that have erased events, without them.

    Args:
        tensors: of the checkpoint, by part; of segments that are lost nothing. Only what has to be looked at is read.
        state: of the checkpoint.
        erased: what is.
    """
    bases, found = partition_bases(state), dict[str, Tensors]()
    if "holdout" in tensors and len(holdout := tensors["holdout"]):
        covered = erased.covers(bases, {name: holdout[name].numpy() for name in ("partition", "offset", "key_hash")})
        if covered.any():
            stays = torch.from_numpy(~covered)
            found["holdout"] = {name: column[stays] for name, column in holdout.items()}
    if "replay" not in tensors:
        return found
    hits = {}
    for part in tensors:
        if part.startswith(SEGMENT):
            covered = erased.covers(bases, columns_of(_array(tensors[part]["index"], ENTRY)))
            if covered.any():
                hits[int(part.removeprefix(SEGMENT))] = covered
                found[part] = _erased(tensors[part], covered)
    changed = _standing(tensors["replay"], state["replay"], hits, erased, bases)
    return found | ({"replay": changed} if changed is not None else {})


def check_age(number: int, checkpoint: Checkpoint, written: ErasureLog) -> None:
    """Raise MisfitError where the log does not know any more all that was erased since a checkpoint was made."""
    if not checkpoint.begins and checkpoint.state.get(ERASED, 0) < written.dropped:
        raise MisfitError(
            f"checkpoint {number} was made before events were erased that {written.path} does not know any more, "
            f"which "
            "would come back with it; put a newer checkpoint in its place, or begin anew by moving the checkpoints away"
        )


def without_erased(checkpoint: Checkpoint, erased: ErasedEvents) -> tuple[Checkpoint, tuple[int, int]]:
    """Return a checkpoint without what is erased, and how many events of store and holdout set that leaves out."""
    parts = erased_parts(checkpoint.tensors, checkpoint.state, erased)
    return replace(checkpoint, tensors={**checkpoint.tensors, **parts}), _left_out(
        checkpoint.tensors, parts, checkpoint.state
    )


def _left_out(before: Mapping[str, Tensors], parts: Mapping[str, Tensors], state: Mapping[str, Any]) -> tuple[int, int]:
    store = holdout = 0
    if "holdout" in parts:
        holdout = len(before["holdout"]["label"]) - len(parts["holdout"]["label"])
    if "replay" in parts:
        for number, rows in state["replay"]["segments"]:
            live, left = (_live(each["replay"], number, rows) for each in (before, parts))
            store += int(np.count_nonzero(live)) - int(np.count_nonzero(left))
    return store, holdout


def named_slots(tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the slots that a checkpoint names for the events that it holds."""
    found = [np.empty(0, np.int64)]
    for number, rows in state["replay"]["segments"] if "replay" in tensors else ():
        part = f"{SEGMENT}{number}"
        if part in tensors:
            live = _live(tensors["replay"], number, rows)
            found.append(_array(tensors[part]["index"], ENTRY)["slot"][live].astype(np.int64))
    return np.concatenate(found)


def partition_bases(state: Mapping[str, Any]) -> NDArray[np.uint64]:
    """Return `partition_base` of each partition that a checkpoint knows, by its index."""
    names = [TopicPartition(each["topic"], each["partition"], each["incarnation"]) for each in state["ledger"]]
    return np.array([partition_base(name) for name in names], np.uint64)


def _erased(segment: Tensors, covered: NDArray[np.bool_]) -> Tensors:
    changed = {name: tensor.clone() for name, tensor in segment.items()}
    for tensor in changed.values():
        tensor[torch.from_numpy(covered)] = 0
    _array(changed["index"], ENTRY)["offset"][covered] = _NO_EVENT
    return changed


def _standing(
    tensors: Tensors,
    state: Mapping[str, Any],
    hits: Mapping[int, NDArray[np.bool_]],
    erased: ErasedEvents,
    bases: NDArray[np.uint64],
) -> Tensors | None:
    """Return what a checkpoint has beside events, when it names events that are hit or plans erased ones; else
    None."""
    changed, stays = dict(tensors), [np.empty(0, np.bool_)]
    for number, rows in state["segments"]:
        live = _live(tensors, number, rows)
        left = live & ~hits[number] if number in hits else live
        stays.append(left[live])
        changed[f"live.{number}"] = torch.from_numpy(np.packbits(left))
    if not all(each.all() for each in stays):
        for name in BY_POSITION.intersection(state["sampler"]):
            changed[f"sampler.{name}"] = tensors[f"sampler.{name}"][torch.from_numpy(np.concatenate(stays))]
    for step in _planned_anew(tensors, state["plans"], erased, bases):
        del changed[f"plan.{step}"], changed[f"planned.{step}"]
    same = all(each.all() for each in stays) and changed.keys() == set(tensors)
    return None if same else changed


def _planned_anew(
    tensors: Tensors, steps: Sequence[int], erased: ErasedEvents, bases: NDArray[np.uint64]
) -> Sequence[int]:
    """Return the steps from the first on whose plan names an erased event."""
    there = [step for step in steps if f"plan.{step}" in tensors]
    for place, step in enumerate(there):
        if erased.covers(bases, columns_of(_array(tensors[f"planned.{step}"], PLANNED))).any():
            return there[place:]
    return ()


def _live(tensors: Tensors, number: int, rows: int) -> NDArray[np.bool_]:
    return np.unpackbits(tensors[f"live.{number}"].numpy(), count=rows).astype(np.bool_)


def _array(values: Tensor, dtype: np.dtype[np.void]) -> NDArray[np.void]:
    return values.numpy().reshape(-1).view(dtype)
