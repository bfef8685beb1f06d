"""Which events are held out."""

import numpy as np

from ingest.config import HoldOut
from ingest.events.block import Array
from ingest.events.hold_out import held_out

HALF = HoldOut(fraction=0.5, seed=3)
N = 64


def columns(key: Array, group: Array) -> dict[str, Array]:
    return {"offset": np.arange(N), "row": np.zeros(N, np.int32), "key_hash": key, "group_hash": group}


def test_each_event_is_decided_by_its_group_else_its_key_else_itself() -> None:
    base, none = np.full(N, 7, np.uint64), np.zeros(N, np.uint64)
    key, group = np.full(N, 11, np.uint64), np.full(N, 12, np.uint64)
    kind = np.arange(N) % 3
    mixed = held_out(HALF, columns(np.where(kind > 0, key, none), np.where(kind > 1, group, none)), base)
    by_itself, by_key, by_group = (
        held_out(HALF, columns(*hashes), base) for hashes in ((none, none), (key, none), (none, group))
    )
    assert mixed.tolist() == np.choose(kind, [by_itself, by_key, by_group]).tolist()
    assert 0 < by_itself.sum() < N
    assert (len(set(by_key.tolist())), len(set(by_group.tolist()))) == (1, 1)
