"""How many events checkpoints write: segments of events are merged as they grow and empty.

The checkpoints from an empty start on are simulated, by the numbers of events in their segments alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from anabranch.replay.segments import merges

_CHECKPOINTS = 50_000
"""Checkpoints that are simulated of the time that counts; if it has more, the time between them is longer."""
_IN_ALL = 5_000
_MOST_RUNS = 16
"""A time with few checkpoints is simulated several times, with at most so many in all, and the mean is taken."""
_EARLIER = 1 / 64
"""Of checkpoints before the time that counts: the time between two, as a part of that from them to it. Old segments are
long."""
_REPLACED = 2
"""Once so many times the events of a full store were admitted, it is open when all of them are merged next."""
_GONE = 0.5
"""A segment with fewer events has none."""

Admitted = Callable[[float, float], float]
"""Returns how many events a store admits from one second after its empty start to another, on average."""


def written_events(admitted: Admitted, capacity: int, limit: int, every: float, begin: float, end: float) -> float:
    """Return how many events checkpoints write, on average.

    How many are admitted between two of them varies as that of a Poisson process does: of equal numbers, segments would
    have equal sizes, and the rules of merging compare sizes.

    Args:
        admitted: of the store.
        capacity: events that it holds; once it is full, each admitted event replaces another.
        limit: events of a segment.
        every: seconds between checkpoints.
        begin: second after the empty start at which the time that counts begins.
        end: second at which it ends.
    """
    events, since = admitted(begin, end), begin
    if events < capacity and admitted(0.0, begin) > _REPLACED * capacity:
        since = begin / 2  # so that a day on which all events happen to be merged is not every day
    moments, first = checkpoint_moments(every, since, end)
    means = [admitted(*pair) for pair in zip([0.0, *moments], moments, strict=False)]
    runs = max(1, min(_MOST_RUNS, _IN_ALL // len(moments)))
    random, written = np.random.default_rng(0), 0.0
    for _ in range(runs):
        segments = SegmentSizes(capacity, limit)
        writes = [segments.checkpoint(count) for count in random.poisson(means).tolist()]
        written += sum(writes[first:]) / runs
    return written * events / admitted(since, end)


def checkpoint_moments(every: float, begin: float, end: float) -> tuple[Sequence[float], int]:
    """Return the seconds of the simulated checkpoints, and the index of the first one after `begin`."""
    counted = min(_CHECKPOINTS, max(1, round((end - begin) / every)))
    moments, distance = list[float](), 0.0
    while distance < begin:
        moments.append(begin - distance)
        distance += max(every, _EARLIER * distance)
    moments.reverse()
    return [*moments, *np.linspace(begin, end, counted + 1)[1:].tolist()], len(moments)


@dataclass
class SegmentSizes:
    """The segments of a store's last checkpoint, as numbers of events."""

    capacity: int
    limit: int
    """Events of a segment."""
    held: list[float] = field(default_factory=list)
    """Events of each segment that are still in the store, on average."""
    lengths: list[float] = field(default_factory=list)
    """Events of each."""

    def checkpoint(self, admitted: float) -> float:
        """Make a checkpoint after so many events were admitted; return how many it writes.

        Any event of a full store is replaced, also one that has come since the last checkpoint.
        """
        before = sum(self.held)
        stay = math.exp(-max(0.0, before + admitted - self.capacity) / self.capacity)
        count = min(self.capacity, before + admitted) - before * stay
        held, lengths = [each * stay for each in self.held], self.lengths
        found = merges(held, lengths, count, self.limit)
        last = count + sum(held[found.tail :])
        sizes, written, at = list[tuple[float, float]](), last, 0
        for begin, end in found.runs:
            merged = sum(held[begin:end])
            sizes += [*zip(held[at:begin], lengths[at:begin], strict=True), (merged, merged)]
            written, at = written + merged, end
        sizes += zip(held[at : found.tail], lengths[at : found.tail], strict=True)
        whole, rest = divmod(last, self.limit)
        sizes += [*[(self.limit, self.limit)] * int(whole), (rest, rest)]
        sizes = [size for size in sizes if size[0] >= _GONE]
        self.held, self.lengths = [size[0] for size in sizes], [size[1] for size in sizes]
        return written
