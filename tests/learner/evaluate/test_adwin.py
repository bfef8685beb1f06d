"""The window equals that of the reference, and its state restores it completely."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


LEVELS = st.lists(st.floats(0.05, 0.95), min_size=1, max_size=4)


def stream(levels, seed, *, bits):
    """Return 500 values at each level: bits with that mean, or numbers close to it."""
    random = np.random.default_rng(seed)
    means = np.repeat(levels, 500)
    values = random.random(len(means)) < means if bits else np.clip(random.normal(means, 0.1), 0, 1)
    return values.astype(float).tolist()


@pytest.mark.slow
@pytest.mark.timeout(300)  # a first import of scipy may take minutes while others keep the disk busy
@settings(max_examples=25)
@given(LEVELS, st.integers(0, 1000), st.booleans())
def test_length_mean_and_changes_equal_those_of_river(levels, seed, bits):
    from river.drift import ADWIN  # brings scipy, which takes half a second

    ours, theirs = Adwin(every=32), ADWIN(clock=32)
    for value in stream(levels, seed, bits=bits):
        changed = ours.add(value)
        theirs.update(value)
        assert bool(changed) == theirs.drift_detected
        assert ours.length == theirs.width
        assert ours.mean == pytest.approx(theirs.estimation, abs=1e-9)
        if changed:
            ours = Adwin(every=32)  # river resets after a change; the paper's window, and ours, continues


def test_a_change_is_returned_with_its_sign_and_the_window_keeps_later_values():
    for before, after in ((0.9, 0.5), (0.5, 0.9)):
        window = Adwin()
        changes = [window.add(value) for value in stream([before] * 4 + [after] * 4, 0, bits=True)]
        found = [change for change in changes if change]
        assert found
        assert all(math.copysign(1, change) == math.copysign(1, after - before) for change in found)
        assert changes.index(found[0]) < 2000 + 150
        assert window.mean == pytest.approx(after, abs=0.05)


@pytest.mark.parametrize("bounded", [True, False])
def test_the_window_keeps_all_values_without_a_change(bounded):
    random = np.random.default_rng(0)
    window = Adwin(bounded=bounded)
    for total in random.binomial(64, 0.8, 20_000).tolist():
        assert window.add(total, 64) == 0
    assert window.weight == 64 * 20_000
    assert window.mean == pytest.approx(0.8, abs=1e-3)


def test_changes_of_unbounded_errors_are_detected_at_any_scale():
    random = np.random.default_rng(1)
    for scale in (1e-4, 1.0, 1e6):
        window = Adwin(bounded=False)
        errors = np.abs(random.normal(size=2000)) * np.repeat([1.0, 2.0], 1000) * scale
        changes = [at for at, error in enumerate(errors.tolist()) if window.add(error)]
        assert changes
        assert 1000 <= changes[0] < 1400


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=120))
def test_values_are_weighted(values):
    window = Adwin(delta=1e-12)
    for weight, mean in values:
        window.add(weight * mean, weight)
    newest = values[len(values) - window.length :]
    assert window.weight == sum(weight for weight, _ in newest)
    expected = sum(weight * mean for weight, mean in newest) / window.weight
    assert window.mean == pytest.approx(expected, abs=1e-9)


@settings(max_examples=25)
@given(LEVELS, st.integers(0, 1000), st.integers(0, 1999))
def test_a_restored_window_continues_as_the_original(levels, seed, at):
    whole, half = Adwin(), Adwin()
    values = stream(levels, seed, bits=False)
    changes = [whole.add(value) for value in values]
    for value in values[:at]:
        half.add(value)
    resumed = Adwin()
    resumed.restore(json.loads(json.dumps(half.state())))
    assert [resumed.add(value) for value in values[at:]] == changes[at:]
    assert resumed.state() == whole.state()


def test_memory_grows_with_the_logarithm_of_the_window():
    window = Adwin()
    for _ in range(50_000):
        window.add(0.5)
    assert window.length == 50_000
    assert sum(len(row) for row in window.state()["rows"]) <= 6 * 15


def test_an_empty_window_has_no_mean():
    assert Adwin().mean is None
