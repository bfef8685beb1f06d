"""The history: whatever is added, each resolution holds the means of the newest points and no more."""

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.serving.dashboard.time_series import RESOLUTIONS, History

SMALL = ((1, 5), (10, 4))
SAMPLES = st.lists(st.tuples(st.floats(0, 30), st.none() | st.floats(-1e3, 1e3)), max_size=60)


@given(SAMPLES, st.integers(0, 400))
def test_every_resolution_holds_the_means_of_its_newest_points(samples, since):
    history = History(["a"], SMALL)
    added, now = defaultdict(list), 0.0
    for pause, value in samples:
        now += pause
        history.add(now, {"a": value})
        for step, _ in SMALL:
            added[step, int(now // step)].append(value)
    for step, points in SMALL:
        newest = int(now // step)
        expected = {
            bucket * step: [value for value in values if value is not None]
            for (resolution, bucket), values in added.items()
            if resolution == step and bucket > newest - points and bucket >= since // step
        }
        found = history.since(since, step)
        assert found["step"] == step
        assert found["time"] == sorted(expected)
        for time, mean in zip(found["time"], found["series"]["a"], strict=True):
            known = expected[time]
            assert math.isnan(mean) if not known else mean == pytest.approx(np.mean(known), abs=1e-4)


def test_a_clock_that_is_set_back_takes_with_it_what_came_later():
    history = History(["a"], SMALL)
    for moment in (100, 101, 102, 100.5):
        history.add(moment, {"a": moment})
    assert history.since(0, 1)["time"] == [100]
    history.add(101, {"a": 7.0})
    assert history.since(0, 1)["series"]["a"] == [100.25, 7.0]


def test_ten_minutes_two_hours_and_a_week_are_kept():
    assert [step * points for step, points in RESOLUTIONS] == [600, 7200, 7 * 86400]
