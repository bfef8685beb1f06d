"""The holdout set: which events it keeps."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.events.identity import identity_hash, keyed_hash
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.holdout import HeldOutShare, HoldoutSet
from anabranch.learner.settings.learner import GateSettings


@pytest.mark.parametrize(
    ("held_out", "trained", "shown"),
    [
        (100, 9_900, None),
        (280, 9_720, None),
        (400, 9_600, "4.00%"),
        (30, 9_970, "0.30%"),
        (0, 10_000, "0.00%"),
        (0, 1000, None),
        (100, 900, None),
        (200, 0, "100.00%"),
    ],
)
def test_a_minute_with_far_more_or_fewer_held_out_events_is_a_warning(held_out, trained, shown):
    clock = SimpleNamespace(now=0.0)
    measured = HeldOutShare(0.01, lambda: clock.now)
    measured.update({"held_out": 7, "trained": 100})
    clock.now = 59.0
    measured.update({"held_out": 7 + held_out, "trained": 100 + trained})
    assert measured.warning is None
    clock.now = 61.0
    measured.update({"held_out": 7 + held_out, "trained": 100 + trained})
    assert (measured.warning is None) == (shown is None)
    assert shown is None or str(measured.warning).startswith(
        f"{shown} of the labelled events of a minute were held out"
    )
    clock.now = 125.0
    measured.update({"held_out": 7 + held_out, "trained": 100 + trained})
    assert measured.warning is None, "no event came since"


def test_without_held_out_events_nothing_is_expected():
    clock = SimpleNamespace(now=0.0)
    measured = HeldOutShare(0.0, lambda: clock.now)
    for minute in range(3):
        clock.now = 61.0 * minute
        measured.update({"held_out": 0, "trained": 100_000 * minute})
    assert measured.warning is None


NAMES = [TopicPartition("events", 0)]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=20), st.integers(4, 50))
def test_the_set_is_bounded_and_keeps_the_youngest_events_and_a_fair_share_of_each_class(schema, batches, most):
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
def test_events_are_taken_by_their_index_in_the_order_of_arrival(schema, counts, numbers):
    holdout, offset = HoldoutSet(schema, 1000, 0), 0
    for count in counts:
        holdout.add(fake_columns(schema, range(offset, offset + count)), NAMES)
        offset += count
    assert holdout.older == offset - offset // 4
    indices = np.array(numbers) % offset
    taken = holdout.take(indices)
    assert taken["offset"].tolist() == sorted(indices.tolist()), "whatever parts there are"
    expected = fake_columns(schema, taken["offset"].tolist())
    assert all(np.array_equal(taken[name], expected[name]) for name in schema.payload())


def test_held_out_events_are_independent_of_the_reservoir():
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


@pytest.mark.parametrize("name", ["key_hash", "group_hash"])
def test_one_key_does_not_crowd_out_the_others_once_the_set_is_full(name):
    settings = {"features": {"x": {"dtype": "float32", "shape": [1]}}, "label": {"name": "y", "classes": 3}}
    settings |= {"key": {"name": "who"}, "group": {"name": "of"}}
    holdout, offset = HoldoutSet(Schema(SchemaSettings.model_validate(settings)), 400, 0), 0

    def add(count, own):
        nonlocal offset
        columns = fake_columns(holdout_schema, range(offset, offset + count), label=[0, 1, 2])
        columns |= {"key_hash": own, "group_hash": np.zeros_like(own)}
        columns[name] = own
        holdout.add(columns, NAMES)
        offset += count

    holdout_schema = Schema(SchemaSettings.model_validate(settings))
    add(300, np.full(300, 7, np.uint64))
    assert len(holdout.held.columns["label"]) == 300, "nobody else has events"
    add(400, np.arange(1000, 1400, dtype=np.uint64))
    for _ in range(30):
        add(100, np.full(100, 7, np.uint64))
        columns = holdout.held.columns
        assert len(columns["label"]) == 400
        assert np.count_nonzero(columns[name] == 7) <= 20
        assert columns["offset"][columns[name] == 7].max() == offset - 1


def test_few_keys_with_equally_many_events_keep_the_youngest(schema):
    holdout = HoldoutSet(schema, 400, 0)
    columns = fake_columns(schema, range(5000), label=[0, 1, 2])
    columns["key_hash"] = np.arange(5000).astype(np.uint64) % 4 + 1
    for begin in range(0, 5000, 50):
        holdout.add({key: column[begin : begin + 50] for key, column in columns.items()}, NAMES)
    held = holdout.held.columns
    assert set(range(4900, 5000)) <= set(held["offset"].tolist())
    assert np.quantile(held["offset"], 0.3) < 2500, "old events stay"


def test_events_without_a_key_have_no_share(schema):
    holdout = HoldoutSet(schema, 400, 0)
    columns = fake_columns(schema, range(1000), label=[0, 1, 2])
    columns["key_hash"] = np.where(np.arange(1000) < 900, 0, np.arange(1000)).astype(np.uint64)
    holdout.add(columns, NAMES)
    assert len(holdout.held.columns["label"]) == 400
    assert np.count_nonzero(holdout.held.columns["key_hash"] == 0) > 250


def test_events_get_other_labels_where_they_are_in_the_set(schema):
    holdout = HoldoutSet(schema, 100, 0)
    holdout.relabel(fake_columns(schema, range(9), label=[1]), NAMES)
    for first in (0, 3):
        holdout.add(fake_columns(schema, range(first, first + 3), label=[0]), NAMES)
    before = holdout.held
    holdout.relabel(fake_columns(schema, [9, 4, 1], label=[1, 2, 1]), NAMES)
    assert holdout.held.columns["label"].tolist() == [0, 1, 0, 0, 2, 0]
    assert before.columns["label"].tolist() == [0] * 6
    assert len(holdout) == 6
