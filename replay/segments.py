"""The segments in which checkpoints store events, so that a checkpoint writes the changes and not the whole store.

A segment is a file with events that were added one after the other. It is written once; later checkpoints link to it,
and store one bit for each of its events: whether it is still held. A new segment is merged with the previous ones that
are at most twice as long, or half empty. So there are few segments, and each event is written only a few times (the
logarithmic method: Bentley and Saxe 1980; log-structured merge trees do the same).

Segments are at most `PIECE_BYTES` long, and are not merged into longer ones. So an erased event costs that many bytes,
and a checkpoint rewrites at most as many, or as many as are new. Adjacent segments that are half empty together are
rewritten as one.

Legend: A new events, B events held at the previous checkpoint, R bytes of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.replay.snapshot import ENTRY, StoreDelta

Tensors = Mapping[str, Tensor]

PIECE_BYTES = 2**28
"""Bytes of a segment, with the rows of its events."""
_GROWTH = 2


@dataclass(frozen=True)
class Segment:
    """One file of events.

    Attributes:
        name: of the file: the number of the checkpoint that it was written for, and `-<n>` after the first one.
        live: which events of the file are still held, bool.
    """

    name: str
    live: NDArray[np.bool_]

    @property
    def held(self) -> int:
        """How many of its events are still held."""
        return int(np.count_nonzero(self.live))


@dataclass(frozen=True)
class NewSegment:
    """A segment that a checkpoint writes.

    Attributes:
        tensors: of its events.
        merged: the earlier segments whose events it has first, in order.
    """

    tensors: Tensors
    merged: Sequence[Segment]


@dataclass(frozen=True)
class Written:
    """The segments of a checkpoint.

    Attributes:
        segments: all, in order.
        new: those that are not of the previous checkpoint, by name.
    """

    segments: Sequence[Segment]
    new: Mapping[str, NewSegment]


@dataclass(frozen=True)
class Merges:
    """The segments whose events a checkpoint writes again.

    Attributes:
        tail: the index of the first one that is merged with the new events, and with all after it.
        runs: the first and last index of adjacent ones before it that become one segment.
    """

    tail: int
    runs: Sequence[tuple[int, int]]


def most_events(row_bytes: int, entry: np.dtype[np.void] = ENTRY) -> int:
    """Return how many events a segment may have, given the bytes of their rows in the checkpoint."""
    return max(1, PIECE_BYTES // (entry.itemsize + row_bytes))


def advance(
    before: Sequence[Segment], change: StoreDelta, number: int, load: Callable[[Segment], Tensors], limit: int
) -> Written:
    """Return the segments of checkpoint `number`.

    Args:
        before: the segments of the checkpoint that the change is relative to.
        change: the events that were added and removed since.
        number: of the new checkpoint.
        load: reads a segment's tensors.
        limit: events of a segment.
    """
    segments = _still_live(before, change.alive) if change.base is not None else []
    count = len(change.index)
    found = merges([each.held for each in segments], [len(each.live) for each in segments], count, limit)
    segments, tail = segments[: found.tail], segments[found.tail :]
    writer, kept, at = _Writer(number, change, load), list[Segment](), 0
    for begin, end in found.runs:
        kept += [*segments[at:begin], writer.write(segments[begin:end], slice(0, 0))]
        at = end
    kept += segments[at:]
    kept = [segment for segment in kept if segment.held]
    if count or any(segment.held for segment in tail) or not kept:
        kept += [
            writer.write([] if begin else tail, slice(begin, begin + limit)) for begin in range(0, count or 1, limit)
        ]
    return Written(kept, writer.new)


def merges(held: Sequence[float], lengths: Sequence[float], count: float, limit: float) -> Merges:
    """Return which segments are written again with `count` new events.

    Args:
        held: how many events of each segment are still held.
        lengths: how many it has.
        count: new events.
        limit: events of a segment.
    """
    tail, length = len(held), count
    while tail and length + held[tail - 1] <= limit:
        if _GROWTH * length < held[tail - 1] and 2 * held[tail - 1] >= lengths[tail - 1]:
            break
        tail -= 1
        length += held[tail]
    budget = max(limit, count) - (length - count)
    return Merges(tail, _half_empty_runs(held[:tail], lengths[:tail], limit, budget))


class _Writer:
    """Makes the new segments of a checkpoint."""

    def __init__(self, number: int, change: StoreDelta, load: Callable[[Segment], Tensors]) -> None:
        self._number, self._change, self._load = number, change, load
        self.new: dict[str, NewSegment] = {}

    def write(self, merged: Sequence[Segment], new: slice) -> Segment:
        """Return a segment with the held events of earlier ones, and a slice of the new events."""
        merged = [segment for segment in merged if segment.held]
        tensors = {"index": torch.from_numpy(_bytes_of(self._change.index[new]))}
        if self._change.payload is not None:
            tensors["payload"] = self._change.payload[new]
        if merged:
            tensors = self._joined(merged, tensors)
        name = f"{self._number}-{len(self.new)}" if self.new else str(self._number)
        self.new[name] = NewSegment(tensors, merged)
        return Segment(name, np.ones(len(tensors["index"]), np.bool_))

    def _joined(self, merged: Sequence[Segment], new: Tensors) -> dict[str, Tensor]:
        """Return the tensors of held events of earlier segments and of new ones. Each row is copied once: those of a
        store in memory are most of what a checkpoint takes."""
        held = sum(segment.held for segment in merged)
        joined = {name: rows.new_empty(held + len(rows), *rows.shape[1:]) for name, rows in new.items()}
        at = 0
        for segment in merged:
            tensors, live = self._load(segment), torch.from_numpy(np.flatnonzero(segment.live))
            for name, rows in joined.items():
                torch.index_select(tensors[name], 0, live, out=rows[at : at + segment.held])
            at += segment.held
        for name, rows in joined.items():
            rows[at:] = new[name]
        return joined


def assemble(
    segments: Sequence[Segment], load: Callable[[Segment], Tensors | None], entry: np.dtype[np.void] = ENTRY
) -> tuple[NDArray[np.void], Tensor | None, int]:
    """Return the held events of a checkpoint's segments.

    Args:
        segments: of a checkpoint.
        load: reads a segment's tensors; None when they cannot be read.
        entry: the dtype of an event.

    Returns:
        The events, `entry` `[B]`; their payload if the segments have it, uint8 `[B, R]`; the number of events in
        unreadable segments.
    """
    index, payload, lost = [np.empty(0, entry)], [], 0
    for segment in segments:
        tensors, live = load(segment), torch.from_numpy(segment.live)
        if tensors is None:
            lost += segment.held
            continue
        index.append(tensors["index"].numpy().reshape(-1).view(entry)[segment.live])
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
        segments.append(Segment(segment.name, live))
    assert begin == len(alive)
    return segments


def _half_empty_runs(
    held: Sequence[float], lengths: Sequence[float], limit: float, budget: float
) -> list[tuple[int, int]]:
    """Return the first and last index of adjacent segments that are half empty together, at most `limit` events.

    They are those that waste most, and have `budget` events in all.
    """
    if all(2 * stay >= length for stay, length in zip(held, lengths, strict=True)):
        return []  # together they are not either
    runs, chosen = [], list[tuple[int, int]]()
    staying, whole = [0, *accumulate(held)], [0, *accumulate(lengths)]
    for begin in range(len(held)):
        for end in range(begin + 1, len(held) + 1):
            stay = staying[end] - staying[begin]
            waste = whole[end] - whole[begin] - stay
            if stay > limit:
                break
            if waste > stay > 0:
                runs.append((waste, -stay, begin, end))
    for _, negative, begin, end in sorted(runs, reverse=True):
        if -negative <= budget and all(end <= first or begin >= last for first, last in chosen):
            chosen.append((begin, end))
            budget += negative
    return sorted(chosen)


def _bytes_of(index: NDArray[np.void]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(index).view(np.uint8).reshape(len(index), index.dtype.itemsize)
