"""How often checkpoints write an event: segments of events are merged as they grow and empty."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from anabranch.commands.planning.store_size import PlannedStore
from replay.checkpoint.segments import PIECE_BYTES, Segment, Tensors, advance
from replay.snapshot import ENTRY, StoreDelta

_ADDED = 64
"""Events that a checkpoint of the simulation adds at most; the store is as much smaller."""
_HELD = 100_000
_CHECKPOINTS = 1_000


def writes_per_event(
    store: PlannedStore, event_bytes: int, held: int, added: float, since: float = math.inf, events: float = math.inf
) -> float:
    """Return how many events checkpoints write for each event that is added.

    Checkpoints of a smaller store with the same proportions are made, without payload.

    Args:
        store: the store.
        event_bytes: of an event in a segment.
        held: events that are held at first, in one segment; 0 while the store fills.
        added: events that are added between two checkpoints, in place of others once the store is full.
        since: events that were added before, since `held` events were in one segment. Segments need fewer merges until
            so many are replaced as are held.
        events: events that are added in the time that counts.
    """
    if added <= 0:
        return 0.0
    scale = min(_ADDED / added, _HELD / store.events)
    capacity, new = max(1, round(store.events * scale)), max(1, round(added * scale))
    most = max(1, round(PIECE_BYTES / event_bytes * scale))
    random = np.random.default_rng(0)
    first = min(capacity, round(held * scale))
    segments: Sequence[Segment] = [Segment("0", np.ones(first, np.bool_))] if first else []
    written = total = 0
    rounds = min(_CHECKPOINTS, max(1, (2 if held else 1) * capacity // new))
    before = rounds // 2 if held else 0  # it is the same from then on
    if since + events < 2 * capacity / scale:
        before = min(before, int(since / added))
        rounds = min(rounds, before + max(1, round(events / added)))
    for number in range(1, rounds + 1):
        count = sum(segment.held for segment in segments)
        alive = np.ones(count, np.bool_)
        alive[random.choice(count, min(count, max(0, count + new - capacity)), replace=False)] = False
        change = StoreDelta(number - 1 if segments else None, alive, np.zeros(new, ENTRY), None)
        result = advance(segments, change, number, _load, most)
        segments = result.segments
        if number > before:
            written += sum(len(each.tensors["index"]) for each in result.new.values())
            total += new
    return written / total


def _load(segment: Segment) -> Tensors:
    return {"index": torch.zeros((len(segment.live), ENTRY.itemsize), dtype=torch.uint8)}
