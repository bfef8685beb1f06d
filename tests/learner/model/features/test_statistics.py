"""Moments that are merged are those of all values; the sketch of quantiles, against all values sorted."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from anabranch.learner.model.features.numbers import SIZE, Moments, QuantileSketch, empty_sketches

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
