"""The test keeps its error rate however often it is read, and finds what is better."""

import math
from itertools import count

import numpy as np
import pytest

from anabranch.learner.extensions.search.evidence import ALPHA, ErrorLevel, Evidence, log_threshold

_RUNS, _STEPS = 300, 200


def ever_above(differences, limit):
    """Whether the wealth reaches `limit` at any step."""
    evidence = Evidence()
    for difference in differences:
        evidence.add(difference)
        if evidence.log_wealth >= math.log(limit):
            return True
    return False


@pytest.mark.parametrize("kind", ["normal", "of a few events", "heavy tails", "hanging together in size"])
def test_equal_models_are_rarely_shown_to_differ_at_any_step(kind):
    """A wealth of 10 is ever reached in at most one of ten runs; here the bound of three standard errors counts."""
    generator = np.random.default_rng(0)
    differences = generator.normal(0, 0.1, (_RUNS, _STEPS))
    if kind == "of a few events":
        differences = generator.integers(-1, 2, (_RUNS, _STEPS)) / 4
    elif kind == "heavy tails":
        differences = generator.standard_cauchy((_RUNS, _STEPS)) / 100
    elif kind == "hanging together in size":
        differences *= np.exp(generator.normal(0, 0.5, (_RUNS, _STEPS)).cumsum(axis=1) / 4)
    reached = sum(ever_above(run, 10) for run in differences.tolist())
    assert reached <= _RUNS / 10 + 3 * math.sqrt(_RUNS * 0.1 * 0.9)


def test_all_challengers_together_get_one_error_rate():
    assert sum(math.exp(-log_threshold(number)) for number in range(1, 10_000)) == pytest.approx(ALPHA, rel=1e-3)


@pytest.mark.parametrize(("gain", "most"), [(0.1, 60), (0.02, 500)])
def test_a_better_challenger_is_found_soon(gain, most):
    generator, evidence = np.random.default_rng(0), Evidence()
    steps = count(1)
    while evidence.log_wealth < log_threshold(1):
        evidence.add(float(generator.normal(gain, 0.1)))
        step = next(steps)
    assert step <= most


def test_one_lucky_step_proves_little():
    evidence = Evidence()
    for difference in (1e-6, 1e-6, 1.0):
        evidence.add(difference)
    assert evidence.log_wealth < 2 * math.log(1.8) + 1e-9


def test_equal_steps_change_nothing():
    evidence = Evidence()
    evidence.add(0.0)
    assert vars(evidence) == vars(Evidence())


def test_errors_of_any_size_are_compared():
    assert ErrorLevel().difference(3e30, 1e30) == pytest.approx(1 / 3)
    assert not math.isfinite(ErrorLevel().difference(1.0, math.inf))  # which ends a challenger
    assert ErrorLevel().difference(0.0, 0.0) == 0.0
    assert ErrorLevel().difference(0.0, 1e-3) == -1.0


def test_a_huge_error_in_few_steps_weighs_more_than_tiny_ones_in_many():
    """As of a learning rate that is too high, where many labels in turn are equal."""
    level, evidence, fractions = ErrorLevel(), Evidence(), Evidence()
    for step in range(400):
        error, its = 0.5, (5.0 if step % 3 == 0 else 0.01)
        evidence.add(level.difference(error, its))
        fractions.add((error - its) / (error + its))
        level.add(error)
    assert fractions.log_wealth > log_threshold(1)
    assert evidence.log_wealth < 2


def test_the_unit_of_a_difference_is_of_earlier_steps():
    level = ErrorLevel()
    level.add(1.0)
    assert level.difference(0.4, 0.2) == pytest.approx(0.1)
    level.add(-3.0)
    assert level.difference(0.4, 0.2) == pytest.approx(0.05)
    for error in (math.nan, math.inf):
        level.add(error)
    assert level.difference(0.4, 0.2) == pytest.approx(0.05)


def test_one_error_of_any_size_does_not_make_later_differences_small():
    level = ErrorLevel()
    for step in range(200):
        level.add(1e30 if step == 100 else 1.0)
    assert level.size < 1.1
    assert level.difference(1.0, 0.5) > 0.2
    for _ in range(100):
        level.add(1e4)
    assert level.size > 1e3, "what stays is the size of errors"
