"""Errors count as ten medians at most."""

import numpy as np
import pytest

from anabranch.learner.evaluate.adwin import Adwin, Winsorizer, limit_of, winsorized
from anabranch.learner.evaluate.stream_monitor import Prequential, Scored


def test_errors_beyond_ten_medians_count_as_ten():
    scores = np.array([-1.0, -2.0, -3.0, -1e30, 5.0, 0.0, 0.0, 0.0, np.nan])
    assert limit_of(scores) == 30.0
    assert winsorized(scores)[:8].tolist() == [-1.0, -2.0, -3.0, -30.0, 5.0, 0.0, 0.0, 0.0]
    assert limit_of(np.zeros(5)) == np.inf


def test_values_are_bounded_by_the_newest_ones_at_any_scale():
    for scale in (1e-6, 1.0, 1e6):
        bounds = Winsorizer()
        assert [bounds.add(scale) for _ in range(20)] == [scale] * 20
        assert bounds.add(-1e30) == pytest.approx(-10 * scale)
        assert [bounds.add(50 * scale) for _ in range(60)][-1] == 50 * scale, "what stays is no outlier"


@pytest.mark.parametrize("at", [0, 3, 7, 8, 1000])
@pytest.mark.parametrize("outlier", [1e6, 1e30])
def test_one_error_of_any_size_hides_no_drift(at, outlier):
    """The mean error of 64 events rises from 1 to 5."""
    random = np.random.default_rng(1)
    window = Adwin(bounded=False)
    values = np.abs(random.normal(np.repeat([1.0, 5.0], [3000, 500]), 0.3)) * 64
    values[at] += outlier
    found = [step for step, value in enumerate(values.tolist()) if window.add(value, 64)]
    assert found
    assert 3000 <= found[0] < 3040
    assert window.mean == pytest.approx(5.0, abs=0.2)


def test_the_error_since_the_beginning_is_not_that_of_one_event():
    measured = Prequential(bounded=False)
    for step in range(1000):
        measured.add(Scored(64, -64.0 if step != 500 else -1e20, 64.0))
    assert measured.score.overall == pytest.approx(-1.009, abs=0.001)
    assert measured.score.now == pytest.approx(-1.009, abs=0.001)
