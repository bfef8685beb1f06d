"""Test-then-train windows and drift, on simulated streams."""

import json
import math

import numpy as np
import pytest

from anabranch.learner.evaluate.stream_monitor import Drift, Prequential, Scored
from anabranch.learner.settings.learner import DriftSettings

ROWS = 32


def steps(levels, each=300, seed=0):
    """Return `each` steps at each accuracy."""
    random = np.random.default_rng(seed)
    return [Scored(ROWS, float(random.binomial(ROWS, level)), ROWS * (1 - level)) for level in np.repeat(levels, each)]


def settings(**changes):
    return DriftSettings.model_validate(changes)


class TestPrequential:
    def test_the_window_follows_a_change_and_overall_is_the_mean_of_all(self):
        found = Prequential()
        scored = steps([0.9, 0.6])
        for each in scored:
            found.add(each)
        assert found.score.now == pytest.approx(0.6, abs=0.03)
        assert found.loss.now == pytest.approx(0.4, abs=0.03)
        assert found.window < len(scored) * ROWS * 0.6
        assert found.score.overall == sum(each.score for each in scored) / (ROWS * len(scored))
        assert found.loss.overall == pytest.approx(0.25)

    def test_a_non_finite_loss_does_not_change_the_mean(self):
        found = Prequential()
        for loss in (3.0, math.inf, 3.0, math.nan):
            found.add(Scored(10, 5.0, loss))
        assert found.loss.now == found.loss.overall == pytest.approx(0.3)

    def test_a_non_finite_score_does_not_change_the_mean(self):
        found = Prequential()
        for score in (math.nan, 5.0, -math.inf, 5.0):
            found.add(Scored(10, score, 3.0))
        assert found.score.now == found.score.overall == 0.5
        assert found.window == 20
        assert found.loss.now == found.loss.overall == pytest.approx(0.3)
        resumed = Prequential()
        resumed.restore(json.loads(json.dumps(found.state(), allow_nan=False)))
        assert resumed.score.overall == 0.5

    def test_a_restored_state_continues_as_the_original(self):
        whole, half, resumed = Prequential(), Prequential(), Prequential()
        scored = steps([0.9, 0.6])
        for each in scored:
            whole.add(each)
        for each in scored[:250]:
            half.add(each)
        resumed.restore(json.loads(json.dumps(half.state())))
        for each in scored[250:]:
            resumed.add(each)
        assert resumed.state() == whole.state()

    def test_all_measurements_are_none_before_the_first_event(self):
        found = Prequential()
        assert (found.score.now, found.loss.now, found.score.overall, found.loss.overall, found.window) == (
            None,
        ) * 4 + (0,)


class TestDrift:
    def test_each_fall_of_the_accuracy_is_one_drift_and_a_rise_is_none(self):
        drift = Drift(settings())
        found = [at for at, each in enumerate(steps([0.5, 0.9, 0.6, 0.95, 0.7])) if drift.add(at, each)]
        assert [at // 300 for at in found] == [2, 4]
        assert (drift.count, drift.step) == (2, found[-1])

    def test_a_stationary_stream_has_no_drift(self):
        drift = Drift(settings())
        assert not any(drift.add(at, each) for at, each in enumerate(steps([0.8], each=20_000)))

    def test_factors_rise_at_a_drift_and_decrease_linearly(self):
        drift = Drift(settings(actions=["raise-lr", "raise-replay"], lr_factor=3, replay_factor=2, steps=4))
        assert drift.factors == (1, 1)
        each = iter(enumerate(steps([0.9, 0.5])))
        next(at for at, scored in each if drift.add(at, scored))
        assert drift.pending
        assert drift.factors[0] == 1
        drift.respond()
        factors = [drift.factors]
        for at, scored in each:
            drift.add(at, scored)
            factors.append(drift.factors)
        assert factors[:6] == [(3, 2), (2.5, 1.75), (2, 1.5), (1.5, 1.25), (1, 1), (1, 1)]

    def test_a_non_finite_score_is_no_drift_and_does_not_delay_the_decrease_of_factors(self):
        drift = Drift(settings(actions=["raise-lr"], lr_factor=3, steps=4))
        each = iter(enumerate(steps([0.9, 0.5])))
        next(at for at, scored in each if drift.add(at, scored))
        drift.respond()
        before = drift.state()["window"]
        assert not any(drift.add(at, Scored(ROWS, math.nan, 1.0)) for at in range(600, 604))
        assert drift.factors[0] == 1
        assert drift.state()["window"] == before

    def test_the_action_mark_changes_no_factor(self):
        drift = Drift(settings())
        assert any(drift.add(at, each) for at, each in enumerate(steps([0.9, 0.5])))
        assert (drift.factors, drift.checkpoints) == ((1, 1), False)

    def test_drift_is_not_detected_without_an_action(self):
        drift = Drift(settings(actions=[]))
        assert not any(drift.add(at, each) for at, each in enumerate(steps([0.9, 0.1])))

    def test_drift_is_detected_in_an_unbounded_error(self):
        random = np.random.default_rng(0)
        drift = Drift(settings(), bounded=False)
        errors = np.abs(random.normal(size=(600, ROWS))).sum(axis=1) * np.repeat([1e4, 3e4], 300)
        found = [at for at, error in enumerate(errors.tolist()) if drift.add(at, Scored(ROWS, -error, error))]
        assert len(found) == 1
        assert 300 <= found[0] < 400

    def test_a_restored_state_continues_as_the_original(self):
        scored = list(enumerate(steps([0.9, 0.6, 0.9, 0.5])))
        options = settings(actions=["raise-lr"], steps=100)
        whole, half, resumed = Drift(options), Drift(options), Drift(options)
        found = [whole.add(*each) for each in scored]
        for each in scored[:330]:
            half.add(*each)
        resumed.restore(json.loads(json.dumps(half.state())))
        assert [resumed.add(*each) for each in scored[330:]] == found[330:]
        assert (resumed.state(), resumed.factors) == (whole.state(), whole.factors)
