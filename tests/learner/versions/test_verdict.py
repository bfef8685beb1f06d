"""The verdict of the gate for scores: pass, fail, or inconclusive with too few events."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.learner.settings.learner import GateSettings
from anabranch.learner.versions.verdict import GateInput, compare, judge, surpasses

EVENTS = 2000
GATE = GateSettings()


def scores(accuracy, seed=0, events=EVENTS):
    """Return random scores of about this accuracy."""
    return (np.random.default_rng(seed).random(events) < accuracy).astype(np.float64)


def worse(served, drop, where=slice(None), seed=1):
    """Return the same scores, except that a fraction `drop` of these events is wrong."""
    found = served.copy()
    right = np.arange(len(served))[where][served[where] == 1]
    count = round(drop * len(served[where]))
    found[np.random.default_rng(seed).permutation(right)[:count]] = 0
    return found


def judged(candidate, served, best=None, **changes):
    new = np.arange(len(candidate)) >= len(candidate) - len(candidate) // 4
    return GateInput(candidate, served, best, **({"new": new, "old": ~new, "classes": {}} | changes))


def verdict(*arguments, gate=GATE, bounded=True, **changes):
    return judge(judged(*arguments, **changes), gate, bounded=bounded)


OLD, NEW = slice(0, 1500), slice(1500, EVENTS)


def test_equal_scores_pass():
    served = scores(0.9)
    found = verdict(served, served)
    assert (found.verdict, found.reasons) == ("pass", [])
    assert found.numbers["new_rows"] == 500
    assert found.numbers["old_rows"] == 1500
    assert found.numbers["old"] == found.numbers["old_rival"]


@pytest.mark.parametrize(("where", "name"), [(NEW, "new"), (OLD, "old")])
def test_a_model_that_is_worse_on_new_or_old_events_fails_with_numbers_and_a_reason(where, name):
    served = scores(0.9)
    found = verdict(worse(served, 0.06, where), served)
    assert found.verdict == "fail"
    (reason,) = found.reasons
    assert f"on {name} events: 0.06" in reason
    assert found.numbers[f"{name}_drop"] == pytest.approx(0.06, abs=0.001)
    assert found.numbers[f"{name}_drop_upper"] > 0.06


def test_a_measured_drop_on_old_events_fails_even_if_it_may_be_chance():
    served = scores(0.7)
    candidate = served.copy()
    candidate[np.flatnonzero(served[OLD])[:190]] = 0
    candidate[np.flatnonzero(served[OLD] == 0)[:150]] = 1
    found = verdict(candidate, served)
    assert found.verdict == "fail"
    assert found.numbers["old_drop"] == pytest.approx(40 / 1500)
    assert found.numbers["old_drop"] < 2.326 * (found.numbers["old_drop_upper"] - found.numbers["old_drop"]) / 1.645


def test_small_drops_do_not_accumulate():
    best = scores(0.9)
    served = worse(best, 0.015, OLD)
    candidate = worse(served, 0.012, OLD)
    assert verdict(candidate, served).verdict != "fail"
    found = verdict(candidate, served, best)
    assert found.verdict == "fail"
    assert found.reasons[0].startswith("worse than the best version served lately")


def test_fewer_events_than_min_rows_are_inconclusive_except_during_a_hold():
    served = scores(0.9, events=999)
    bad = worse(served, 0.5)
    assert verdict(bad, served).verdict == "inconclusive"
    assert verdict(bad, served, held=True).verdict == "fail"
    assert verdict(served, served, held=True).verdict == "pass"


def test_the_first_version_is_inconclusive():
    found = verdict(scores(0.1), None)
    assert found.verdict == "inconclusive"
    assert "no served version" in found.reasons[0]


def test_non_finite_scores_fail_except_where_no_model_has_a_finite_one():
    served = scores(0.9)
    broken = served.copy()
    broken[3] = math.nan
    assert verdict(broken, served).verdict == "fail"
    assert verdict(np.full(5, math.nan), None).verdict == "fail", "also without a served version"
    assert verdict(broken, broken).verdict == "pass", "an event that no model can score fails all versions"
    assert verdict(served, broken).verdict == "pass"


def test_a_difference_within_the_error_is_inconclusive():
    served = scores(0.9)
    swapped = served.copy()
    swapped[np.flatnonzero(served[NEW])[:20] + 1500] = 0
    swapped[np.flatnonzero(served[NEW] == 0)[:16] + 1500] = 1
    found = verdict(swapped, served)
    assert found.verdict == "inconclusive"
    assert "too few events" in found.reasons[0]
    assert found.numbers["new_drop_upper"] > 0.02


def test_errors_of_a_regression_are_compared_relative_to_the_error():
    served = -np.abs(np.random.default_rng(0).normal(100, 1, EVENTS))
    assert verdict(served * 1.01, served, bounded=False).verdict == "pass"
    assert verdict(served * 1.05, served, bounded=False).verdict == "fail"
    assert verdict(served * 1.05, served * 0, bounded=False).verdict == "fail"
    assert verdict(served * 0, served, bounded=False).verdict == "pass"


def test_the_numbers_have_each_class_and_the_worst():
    served = scores(0.9)
    first = np.arange(EVENTS) % 10 == 0
    candidate = np.where(first, 0.0, served)
    numbers = verdict(candidate, served, classes={"cat": first, "dog": ~first}).numbers
    assert numbers["class_cat_drop"] == pytest.approx(served[first].mean())
    assert numbers["class_dog_drop"] == 0
    assert (numbers["worst"], numbers["worst_rival"]) == (
        0,
        pytest.approx(min(served[first].mean(), served[~first].mean())),
    )


def test_events_since_the_start_of_a_hold_are_not_old():
    served = scores(0.9)
    since = np.arange(EVENTS) < 0
    found = verdict(served, served, held=True, old=since)
    assert found.verdict == "fail"
    assert "serve one by hand" in found.reasons[0]


def test_a_new_best_is_better_beyond_chance():
    served = scores(0.9)
    better = served.copy()
    better[np.flatnonzero(served == 0)[:5]] = 1
    assert not surpasses(judged(better, served), bounded=True)
    assert surpasses(judged(np.ones(EVENTS), served), bounded=True)
    assert not surpasses(judged(np.ones(EVENTS), served, np.ones(EVENTS)), bounded=True)


def test_an_equally_good_model_rarely_fails_where_the_limit_alone_would_fail_half():
    held, beyond = 0, 0
    for seed in range(300):
        noise = np.random.default_rng([seed, 1]).random((2, EVENTS))
        right = scores(0.9, seed)
        one, other = (np.where(each < 0.03, 1 - right, right) for each in noise)
        found = verdict(one, other)
        held += found.verdict == "fail"
        beyond += found.numbers["new_drop_upper"] > 0.02
    assert held <= 0.05 * 300
    assert beyond >= 0.3 * 300


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=8, max_size=300), st.booleans())
def test_a_drop_is_the_difference_of_the_means_and_its_upper_limit_is_larger(answers, bounded):
    candidate, served = np.array(answers, np.float64).T
    drop = compare(candidate, served, bounded=bounded)
    unit = 1 if bounded else max(served.mean(), 1e-12)
    assert drop.drop == pytest.approx((served.mean() - candidate.mean()) / unit)
    assert drop.upper >= drop.drop
    back = compare(served, candidate, bounded=True)
    assert back.drop == pytest.approx(candidate.mean() - served.mean())
    gate = GateSettings(min_rows=1)
    found = verdict(candidate, served, gate=gate)
    assert verdict(np.maximum(candidate, served), served, gate=gate).verdict != "fail", (
        "it failed without a worse score"
    )
    assert all(math.isfinite(number) for number in found.numbers.values())
    assert bool(found.reasons) == (found.verdict != "pass")


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.floats(0.035, 0.5))
def test_a_drop_far_above_the_limit_never_passes(seed, drop):
    served = scores(0.9, seed)
    assert verdict(worse(served, drop, OLD, seed), served).verdict == "fail"


def errors(label, noise, seed):
    """Return minus the error on each event of a model whose predictions are off the events' true values by `noise`."""
    true = np.random.default_rng(0).normal(size=len(label))
    return -np.abs(true + noise * np.random.default_rng(seed).normal(size=len(label)) - label)


@pytest.mark.parametrize("value", [0.0, 1e3, 1e6, 1e30])
@pytest.mark.parametrize("share", [0.001, 0.05, 0.2])
def test_labels_of_any_size_make_no_worse_model_of_a_regression_pass(value, share):
    label = np.random.default_rng(0).normal(size=EVENTS)
    label[np.random.default_rng(9).random(EVENTS) < share] += value
    served = errors(label, 0.1, seed=1)
    found = verdict(errors(label, 1.0, seed=2), served, bounded=False)
    assert found.verdict == "fail"
    assert 4 < found.numbers["old_drop"] < 10
    assert all(math.isfinite(number) for number in found.numbers.values())
    assert verdict(errors(label, 0.07, seed=3), served, bounded=False).verdict == "pass"


def test_events_that_most_models_predict_exactly_do_not_hide_the_others():
    served = np.where(np.arange(EVENTS) % 10 < 8, 0.0, -0.1 - np.random.default_rng(0).random(EVENTS))
    assert verdict(served, served, bounded=False).verdict == "pass"
    found = verdict(2 * served, served, bounded=False)
    assert found.verdict == "fail"
    assert found.numbers["old_drop"] == pytest.approx(1.0)
    assert verdict(np.zeros(EVENTS), np.zeros(EVENTS), bounded=False).verdict == "pass"


def test_two_equal_models_of_a_regression_fail_as_rarely_as_their_limits_say():
    """A normal and a heavy-tailed error, where some events are beyond the limit of one model, and of both."""
    for seed, sample in enumerate((np.random.default_rng(5).normal, np.random.default_rng(6).standard_cauchy)):
        shared = np.random.default_rng(seed).normal(size=(200, EVENTS))
        failed = 0
        for each in shared:
            served, candidate = (-np.abs(each + 0.05 * sample(size=EVENTS)) for _ in range(2))
            drop = compare(candidate, served, bounded=False)
            failed += drop.possible(0.0)
        assert failed <= 6, "1 % of 200, and chance"
