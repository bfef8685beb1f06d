"""The segments in which checkpoints store events, so that a checkpoint writes the changes and not the whole store.

A segment is a file with the events that were added between two checkpoints, in order. It is written once; later
checkpoints link to it, and store one bit for each of its events: whether it is still held. A new segment is merged with
the previous ones that are at most twice as long, or half empty. So there are few segments, and each event is written
only a few times (the logarithmic method: Bentley and Saxe 1980; log-structured merge trees do the same).

Legend: A new events, B events held at the previous checkpoint, R bytes of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.snapshot import ENTRY, StoreDelta

Tensors = Mapping[str, Tensor]

_GROWTH = 2


@dataclass(frozen=True)
class Segment:
    """One file of events.

    Attributes:
        number: of the checkpoint that it was written for, which names the file.
        live: which events of the file are still held, bool.
    """

    number: int
    live: NDArray[np.bool_]

    @property
    def held(self) -> int:
        """How many of its events are still held."""
        return int(np.count_nonzero(self.live))


@dataclass(frozen=True)
class Written:
    """The segments of a checkpoint: those of the previous checkpoint, and at most one that is new.

    Attributes:
        segments: all, in order.
        fresh: the tensors of the new one; None if there is none.
    """

    segments: Sequence[Segment]
    fresh: Tensors | None


def advance(before: Sequence[Segment], change: StoreDelta, number: int, load: Callable[[Segment], Tensors]) -> Written:
    """Return the segments of checkpoint `number`.

    Args:
        before: the segments of the checkpoint that the change is relative to.
        change: the events that were added and removed since.
        number: of the new checkpoint.
        load: reads a segment's tensors.
    """
    segments = _still_live(before, change.alive) if change.base is not None else []
    index, payload = [torch.from_numpy(_bytes_of(change.index))], [change.payload]
    length, gone = len(change.index), False
    while segments and (_GROWTH * length >= segments[-1].held or _half_empty(segments[-1])):
        last = segments.pop()
        length, gone = length + last.held, True
        if last.held:
            tensors, live = load(last), torch.from_numpy(last.live)
            index.insert(0, tensors["index"][live])
            payload.insert(0, tensors["payload"][live] if "payload" in tensors else None)
    if not length and not gone and segments:
        return Written(segments, None)
    fresh = {"index": torch.cat(index)}
    rows = [part for part in payload if part is not None]
    if rows:
        fresh["payload"] = torch.cat(rows)
    return Written([*segments, Segment(number, np.ones(length, np.bool_))], fresh)


def assemble(
    segments: Sequence[Segment], load: Callable[[Segment], Tensors | None]
) -> tuple[NDArray[np.void], Tensor | None, int]:
    """Return the held events of a checkpoint's segments.

    Args:
        segments: of a checkpoint.
        load: reads a segment's tensors; None when they cannot be read.

    Returns:
        ENTRY `[B]`; their payload if the segments have it, uint8 `[B, R]`; the number of events in unreadable segments.
    """
    index, payload, lost = [np.empty(0, ENTRY)], [], 0
    for segment in segments:
        tensors, live = load(segment), torch.from_numpy(segment.live)
        if tensors is None:
            lost += segment.held
            continue
        index.append(tensors["index"].numpy().reshape(-1).view(ENTRY)[segment.live])
        if "payload" in tensors:
            payload.append(tensors["payload"][live])
    return np.concatenate(index), torch.cat(payload) if payload else None, lost


def _still_live(before: Sequence[Segment], alive: NDArray[np.bool_]) -> list[Segment]:
    """Return the segments with only those events live that `alive` marks, bool `[B]` in the order of all."""
    segments, begin = [], 0
    for segment in before:
        live = segment.live.copy()
        live[live] = alive[begin : begin + segment.held]
        begin += segment.held
        segments.append(Segment(segment.number, live))
    assert begin == len(alive)
    return segments


def _half_empty(segment: Segment) -> bool:
    return 2 * segment.held < len(segment.live)


def _bytes_of(index: NDArray[np.void]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(index).view(np.uint8).reshape(len(index), ENTRY.itemsize)
