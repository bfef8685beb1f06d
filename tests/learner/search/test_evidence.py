"""The test keeps its error rate however often it is read, and finds what is better."""

import math
from itertools import count

import numpy as np
import pytest

from learner.search.evidence import ALPHA, Evidence, log_threshold, relative_difference

_RUNS, _STEPS = 300, 200


def ever_above(differences: list[float], limit: float) -> bool:
    """Whether the wealth reaches `limit` at any step."""
    evidence = Evidence()
    for difference in differences:
        evidence.add(difference)
        if evidence.log_wealth >= math.log(limit):
            return True
    return False


@pytest.mark.parametrize("kind", ["normal", "of a few events", "heavy tails", "hanging together in size"])
def test_equal_models_are_rarely_shown_to_differ_at_any_step(kind: str) -> None:
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


def test_all_challengers_together_get_one_error_rate() -> None:
    assert sum(math.exp(-log_threshold(number)) for number in range(1, 10_000)) == pytest.approx(ALPHA, rel=1e-3)


@pytest.mark.parametrize(("gain", "most"), [(0.1, 60), (0.02, 500)])
def test_a_better_challenger_is_found_soon(gain: float, most: int) -> None:
    generator, evidence = np.random.default_rng(0), Evidence()
    steps = count(1)
    while evidence.log_wealth < log_threshold(1):
        evidence.add(float(generator.normal(gain, 0.1)))
        step = next(steps)
    assert step <= most


def test_one_lucky_step_proves_little() -> None:
    evidence = Evidence()
    for difference in (1e-6, 1e-6, 1.0):
        evidence.add(difference)
    assert evidence.log_wealth < 2 * math.log(1.8) + 1e-9


def test_equal_steps_change_nothing() -> None:
    evidence = Evidence()
    evidence.add(0.0)
    assert vars(evidence) == vars(Evidence())


def test_errors_of_any_size_are_compared() -> None:
    assert relative_difference(3e30, 1e30) == pytest.approx(0.5)
    assert relative_difference(1.0, math.inf) != relative_difference(1.0, math.inf)  # NaN, which ends a challenger
    assert relative_difference(0.0, 0.0) == 0.0
