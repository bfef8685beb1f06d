"""The sketch of quantiles, against all values sorted."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.learner.model.features.numbers import SIZE, QuantileSketch, empty_sketches

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
