"""Which events are held out."""

import numpy as np

from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.events.hold_out import held_out, shuffle_seed
from anabranch.ingest.settings.stream import HoldOut
from anabranch.learner.settings.learner import GateSettings

HALF = HoldOut(fraction=0.5, seed=3)
N = 64


def columns(key, group):
    return {"offset": np.arange(N), "row": np.zeros(N, np.int32), "key_hash": key, "group_hash": group}


def test_each_event_is_decided_by_its_group_else_its_key_else_itself():
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


def test_with_another_secret_other_keys_are_held_out():
    keys = np.arange(1, 100_001, dtype=np.uint64)
    none, row = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.int32)
    events = {"offset": np.arange(len(keys)), "row": row, "key_hash": keys, "group_hash": none}
    gate = GateSettings(holdout_fraction=0.01)
    first, second = (held_out(gate.hold_out(StreamSecret.fixed(seed)), events, none) for seed in (0, 1))
    assert first.tolist() == held_out(gate.hold_out(StreamSecret.fixed(0)), events, none).tolist()
    for held in (first, second):
        assert abs(held.mean() - 0.01) < 0.0015
    assert (first & second).sum() < 40, "of 1,000, ten are held out under both by chance"


def test_the_order_of_rows_in_files_reveals_nothing_of_the_secret():
    seeds = {shuffle_seed(HoldOut(fraction=0, seed=seed)) for seed in (0, 1, 2**127)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
