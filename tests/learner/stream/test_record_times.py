"""Record times: the error of quantiles is within the promised rank, for any number of events."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.learner.stream.record_times import RecordTimes


@given(st.lists(st.lists(st.integers(1, 10**12), max_size=50), max_size=20), st.integers(1, 60))
def test_the_quantiles_of_few_events_are_exact(parts, most):
    bag, others = RecordTimes(), RecordTimes()
    for number, part in enumerate(parts):
        (bag if number % 2 else others).add(np.array(part, np.int64))
    bag.join(others)
    every = sorted(time for part in parts for time in part)
    assert bag.rows == len(every)
    found = bag.quantiles(most).tolist()
    assert found == sorted(found)
    if len(every) <= most:
        assert found == every
    else:
        assert len(found) == most
        assert set(found) <= set(every)


@pytest.mark.parametrize("size", [1, 64, 5000])
def test_the_quantiles_of_a_million_events_are_within_a_hundredth(size):
    bag, times = RecordTimes(), np.random.default_rng(0).exponential(1e6, 1_000_000 - 1_000_000 % size).astype(np.int64)
    for part in times.reshape(-1, size)[: 1_000_000 if size > 1 else 100_000]:
        bag.add(part)
    quantiles = bag.quantiles(100)
    ranks = np.searchsorted(np.sort(times), quantiles) / len(times)
    assert np.abs(ranks - (np.arange(100) + 0.5) / 100).max() < 0.01
    assert bag._held <= 4096


def test_quantiles_are_weighted_by_the_events_that_they_represent():
    bag = RecordTimes()
    bag.add(np.array([10, 20], np.int64), 900)
    bag.add(np.array([30], np.int64), 100)
    assert bag.rows == 1000
    assert bag.quantiles(10).tolist() == [10] * 5 + [20] * 4 + [30]
