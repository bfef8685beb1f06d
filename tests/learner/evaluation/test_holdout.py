"""The holdout set: which events it keeps."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.stream_secret import StreamSecret
from ingest.events.identity import identity_hash, keyed_hash
from ingest.events.partition import TopicPartition
from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from learner.config import GateSettings
from learner.evaluation.holdout import HoldoutSet

NAMES = [TopicPartition("events", 0)]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=20), st.integers(4, 50))
def test_the_set_is_bounded_and_keeps_the_youngest_events_and_a_fair_share_of_each_class(
    schema: Schema, batches: list[tuple[int, int]], most: int
) -> None:
    holdout = HoldoutSet(schema, most, 0)
    offset = 0
    for count, label in batches:
        holdout.add(fake_columns(schema, range(offset, offset + count), label=[label]), NAMES)
        offset += count
        assert len(holdout.held) == min(offset, most)
        times = holdout.held.columns["time_ms"] // 10
        assert (np.diff(times) > 0).all(), "the order of arrival is lost"
        young = range(offset - min(offset, most // 4), offset)
        assert set(young) <= set(times.tolist())
    # Of the old events, no class that had more has two fewer than another.
    old = holdout.held.columns["label"][: len(holdout.held) - most // 4]
    seen = np.bincount(np.concatenate([np.full(count, label) for count, label in batches]), minlength=3)
    kept = np.bincount(old, minlength=3)
    if offset > most:
        assert kept.sum() == most - most // 4
        assert ((seen > 0) <= (np.bincount(holdout.held.columns["label"], minlength=3) > 0)).all() or most < 12


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=80), st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_events_are_taken_by_their_index_in_the_order_of_arrival(
    schema: Schema, counts: list[int], numbers: list[int]
) -> None:
    holdout, offset = HoldoutSet(schema, 1000, 0), 0
    for count in counts:
        holdout.add(fake_columns(schema, range(offset, offset + count)), NAMES)
        offset += count
    assert holdout.older == offset - offset // 4
    indices = np.array(numbers) % offset
    taken = holdout.take(indices)
    assert sorted(taken["offset"].tolist()) == sorted(indices.tolist())
    expected = fake_columns(schema, taken["offset"].tolist())
    assert all(np.array_equal(taken[name], expected[name]) for name in schema.payload())


def test_held_out_events_are_independent_of_the_reservoir() -> None:
    """With one hash for both, the reservoir would prefer the held-out events."""
    for seed in range(5):
        secret = StreamSecret.fixed(seed)
        hold_out = GateSettings(holdout_fraction=0.2).hold_out(secret)
        offsets = np.arange(20_000)
        identity = identity_hash(np.zeros(len(offsets), np.uint64), offsets, np.zeros(len(offsets), np.int32))
        held = keyed_hash(identity, hold_out.seed) < np.uint64(int(hold_out.fraction * 2**64))
        priority = keyed_hash(identity, secret.number("replay")) / 2**64
        assert abs(held.mean() - 0.2) < 0.02
        assert abs(priority[held].mean() - 0.5) < 0.03
        assert abs(np.mean(priority[held] < 0.1) - 0.1) < 0.03


def test_events_get_other_labels_where_they_are_in_the_set(schema: Schema) -> None:
    holdout = HoldoutSet(schema, 100, 0)
    holdout.relabel(fake_columns(schema, range(9), label=[1]), NAMES)
    for first in (0, 3):
        holdout.add(fake_columns(schema, range(first, first + 3), label=[0]), NAMES)
    before = holdout.held
    holdout.relabel(fake_columns(schema, [9, 4, 1], label=[1, 2, 1]), NAMES)
    assert holdout.held.columns["label"].tolist() == [0, 1, 0, 0, 2, 0]
    assert before.columns["label"].tolist() == [0] * 6
    assert len(holdout) == 6
