"""Moments and quantiles, against all values; one value, however large, moves no scale, and a change does."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.features.numbers import SIZE, LearnedNumber, Moments, QuantileSketch, empty_sketches

FINITE = st.floats(-1e6, 1e6)
VALUES = arrays(np.float64, st.tuples(st.integers(0, 12), st.just(2)), elements=FINITE | st.just(np.nan))


def nothing():
    return Moments(np.zeros(2), np.zeros(2), np.zeros(2))


def welford(values):
    """One value after the other, as River's `StandardScaler` does (Welford 1962)."""
    count, mean, squares = 0.0, np.zeros(values.shape[1]), np.zeros(values.shape[1])
    for value in values:
        count += 1
        before = value - mean
        mean = mean + before / count
        squares = squares + before * (value - mean)
    return Moments(np.full(values.shape[1], count), mean, squares)


@given(st.lists(VALUES, max_size=6))
def test_merged_moments_are_those_of_all_values_without_the_missing_ones(parts):
    merged = nothing()
    for part in parts:
        merged = merged.merged(Moments.of(part))
    everything = np.concatenate([np.empty((0, 2)), *parts])
    for index, values in enumerate(everything.T):
        present = values[~np.isnan(values)]
        assert merged.count[index] == len(present)
        if len(present):
            scale = 1 + np.abs(present).max()
            assert merged.mean[index] == pytest.approx(present.mean(), abs=1e-12 * scale)
            assert merged.squares[index] == pytest.approx(((present - present.mean()) ** 2).sum(), abs=1e-10 * scale**2)


@given(VALUES, VALUES, VALUES)
def test_the_order_of_merging_makes_no_difference_but_rounding(one, two, three):
    a, b, c = map(Moments.of, (one, two, three))
    left, right = a.merged(b).merged(c), c.merged(a.merged(b))
    other = a.merged(c.merged(b))
    for each in (right, other):
        np.testing.assert_array_equal(left.count, each.count)
        np.testing.assert_allclose(left.mean, each.mean, rtol=1e-12, atol=1e-6)
        np.testing.assert_allclose(left.squares, each.squares, rtol=1e-9, atol=1e-2)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_moments_of_a_long_stream_are_rivers_and_those_of_all_values(offset):
    generator = np.random.default_rng(0)
    values = offset + generator.lognormal(0, 2, (20_000, 3))
    merged = Moments(*(np.zeros(3) for _ in range(3)))
    for begin in range(0, len(values), 37):
        merged = merged.merged(Moments.of(values[begin : begin + 37]))
    for mean, deviation in (
        (welford(values).mean, welford(values).deviation),
        (values.mean(axis=0), values.std(axis=0)),
    ):
        np.testing.assert_allclose(merged.mean, mean, rtol=1e-9)
        np.testing.assert_allclose(merged.deviation, deviation, rtol=1e-6)


PARTS = np.linspace(0.02, 0.98, 49)
N = 50_000
STREAMS = {
    "normal": lambda random: random.normal(size=N),
    "long-tailed": lambda random: random.lognormal(0, 3, N),
    "ascending": lambda _: np.arange(N, dtype=np.float64),
    "descending": lambda _: -np.arange(N, dtype=np.float64),
    "two regimes": lambda random: np.concatenate([random.normal(0, 1, N // 2), random.normal(50, 5, N // 2)]),
    "alternating": lambda _: np.where(np.arange(N) % 2, 1.0, -1.0) * np.arange(N),
}


def sketch():
    items, used, odd = empty_sketches(1)
    return QuantileSketch(items[0], used[0], odd[0])


@pytest.mark.parametrize("name", STREAMS)
def test_ranks_are_within_the_bound_and_in_practice_within_one_percent(name):
    values = STREAMS[name](np.random.default_rng(0))
    found = sketch()
    for begin in range(0, N, 61):
        found.add(values[begin : begin + 61])
    ranks = np.searchsorted(np.sort(values), found.quantiles(PARTS)) / N
    assert np.abs(ranks - PARTS).max() <= min(0.01, math.log2(N / SIZE) / (2 * SIZE))


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=SIZE - 1), st.integers(1, 50))
def test_few_values_are_kept_as_they_are(values, size):
    found = sketch()
    for begin in range(0, len(values), size):
        found.add(np.array(values[begin : begin + size]))
    middles = (np.arange(len(values)) + 0.5) / len(values)
    np.testing.assert_allclose(found.quantiles(middles), np.sort(values), rtol=1e-9, atol=1e-6)


def test_a_stream_that_fills_the_last_level_goes_on_with_weights_that_are_halved():
    items, used, odd = np.zeros((4, 64)), np.zeros(4, np.int64), np.zeros(4, np.int64)
    small, random = QuantileSketch(items, used, odd), np.random.default_rng(0)
    for _ in range(100):
        small.add(random.normal(size=50))
        assert (used < 64).all()
    assert np.abs(small.quantiles(np.array([0.25, 0.5, 0.75])) - [-0.6745, 0.0, 0.6745]).max() < 0.2


RANDOM = np.random.default_rng
BATCH = 50


def number_of(dtype="float32", **feature):
    features = {"x": {"dtype": dtype, **feature}}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 2}}))
    return LearnedNumber(schema.features[0], schema.settings.features["x"])


def observe(number, values):
    for begin in range(0, len(values), BATCH):
        number.observe(values[begin : begin + BATCH])


def inputs(number, values):
    found: NDArray[Any] = number(torch.from_numpy(values))["x"].numpy()
    return found


KINDS = [
    ("float32", {"scale": "standard"}, 3.4e38),
    ("float32", {"scale": "standard"}, -1e9),
    ("float32", {"scale": "standard"}, 1e4),
    ("float64", {"scale": "standard"}, 1.7e308),
    ("float16", {"scale": "standard"}, 65504.0),
    ("int64", {"scale": "standard"}, 2**62),
    ("int32", {"scale": "standard"}, -(2**31)),
    ("float32", {"scale": "robust"}, 3.4e38),
    ("float32", {"scale": "quantile"}, 3.4e38),
    ("float32", {"missing": "mean"}, 3.4e38),
    ("float32", {"scale": "standard", "missing": "indicator"}, -3.4e38),
]


@pytest.mark.parametrize(("dtype", "feature", "bomb"), KINDS)
@pytest.mark.parametrize("at", [0, 1, 40, 1000])
def test_one_event_does_not_change_what_the_model_gets_of_the_others(dtype, feature, bomb, at):
    values = RANDOM(1).normal(size=2000) * 100
    poisoned = np.insert(values, at, bomb).astype(dtype)
    if dtype.startswith("int"):
        poisoned[at] = int(bomb)
    clean, found = number_of(dtype, **feature), number_of(dtype, **feature)
    observe(clean, values.astype(dtype))
    observe(found, poisoned)
    probe = np.array([-100, 0, 100] + ([np.nan] if "missing" in feature else [])).astype(dtype)
    np.testing.assert_allclose(inputs(found, probe), inputs(clean, probe), rtol=0.15, atol=1.6)
    scaled = np.ptp(inputs(found, probe[:3])) / np.ptp(inputs(clean, probe[:3]))
    assert 0.85 < scaled < 1.1
    assert found.clipped == 1


@pytest.mark.parametrize("scale", ["standard", "robust"])
def test_one_event_does_not_take_a_rare_value_from_the_model(scale):
    values = (RANDOM(0).random(6000) < 0.02).astype(np.float32)
    poisoned = values.copy()
    poisoned[1234] = 1e30
    clean, found = number_of(scale=scale), number_of(scale=scale)
    observe(clean, values)
    observe(found, poisoned)
    probe = np.array([0, 1], np.float32)
    np.testing.assert_allclose(np.diff(inputs(found, probe)), np.diff(inputs(clean, probe)), rtol=0.2)


@pytest.mark.parametrize("make", [lambda dice: dice.normal(5, 3, 4000), lambda dice: dice.exponential(2, 4000)])
def test_ordinary_values_have_the_mean_and_deviation_of_all(make):
    values = make(RANDOM(3)).astype(np.float32)
    number = number_of(scale="standard")
    observe(number, values)
    assert number.clipped == 0
    expected = (values - values.mean(dtype=np.float64)) / values.std(dtype=np.float64)
    np.testing.assert_allclose(inputs(number, values), expected, atol=1e-4)


def test_a_scale_follows_a_stream_that_changes():
    number, dice = number_of(scale="standard"), RANDOM(5)
    observe(number, dice.normal(0, 1, 4000).astype(np.float32))
    observe(number, dice.normal(10_000, 500, 12_000).astype(np.float32))
    found = inputs(number, np.array([9_000, 11_000], np.float32))
    assert np.ptp(found) > 0.3
    assert np.abs(found).max() < 5


def test_how_events_are_batched_makes_no_difference():
    values = np.insert(RANDOM(2).normal(size=300), 7, 1e20).astype(np.float32)
    one, parts = number_of(scale="standard"), number_of(scale="standard")
    one.observe(values)
    for value in values:
        parts.observe(value[None])
    for name in ("anchor", "exponents", "first"):
        assert np.array_equal(one.state[name], parts.state[name]), name
    np.testing.assert_allclose(one.state["mean"], parts.state["mean"], atol=0.2)


def test_no_value_of_an_event_is_kept_once_there_is_an_anchor():
    number = number_of(scale="standard")
    number.observe(RANDOM(2).normal(size=31).astype(np.float32))
    assert number.state["first"].any()
    number.observe(np.ones(1, np.float32))
    assert not number.state["first"].any()


def test_a_factor_that_falls_a_hundredfold_is_known():
    number, dice = number_of(scale="standard"), RANDOM(5)
    observe(number, dice.normal(0, 1, 2000).astype(np.float32))
    assert number.fell < 1.1
    observe(number, dice.normal(0, 1000, 20_000).astype(np.float32))
    assert number.fell > 100
