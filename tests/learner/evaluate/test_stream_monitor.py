"""The stream monitor: the scores of a step in, the settings of the next one out."""

import json
import logging
import math
from typing import Any

import pytest

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.adwin import LIMIT
from anabranch.learner.evaluate.replay_ratio import ScoreSum
from anabranch.learner.evaluate.stream_monitor import NOT_SCORED, RunningMean, Scored, StreamMonitor
from anabranch.learner.settings.learner import LearnerSettings

ROWS = 100
NO = (0.0, 0.0)
"""What the baselines score."""
SCHEMA = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}})
)


def make(*actions):
    drift: dict[str, Any] = {"actions": actions, "lr_factor": 3.0, "replay_factor": 2.0, "steps": 10}
    return StreamMonitor(LearnerSettings.model_validate({"replay_ratio": 0.5, "drift": drift}), SCHEMA)


def drift_of(monitor):
    """Observe good steps, then bad ones until one shows a drift; return its number."""
    for step in range(50):
        assert not monitor.observe(step, Scored(ROWS, 0.9 * ROWS, 0.0, NO), None).drifted
    return next(
        step for step in range(50, 100) if monitor.observe(step, Scored(ROWS, 0.1 * ROWS, 0.0, NO), None).drifted
    )


def test_the_settings_are_raised_by_the_response_to_a_drift_not_by_the_drift():
    monitor = make("raise-lr", "raise-replay")
    drift_of(monitor)
    assert (monitor.adjustments.lr_factor, monitor.adjustments.replay_ratio) == (1.0, 0.5)
    assert not monitor.adjustments.checkpoint_first
    monitor.respond()
    assert (monitor.adjustments.lr_factor, monitor.adjustments.replay_ratio) == (3.0, 1.0)
    for step in range(10):
        monitor.observe(step, Scored(ROWS, 0.1 * ROWS, 0.0, NO), None)
    assert (monitor.adjustments.lr_factor, monitor.adjustments.replay_ratio) == (1.0, 0.5)


def test_a_drift_says_whether_a_checkpoint_comes_before_the_response():
    monitor = make("checkpoint", "raise-lr")
    drift_of(monitor)
    assert monitor.adjustments.checkpoint_first


def test_a_restored_monitor_gives_the_same_settings():
    monitor, restored = make("raise-lr", "raise-replay"), make("raise-lr", "raise-replay")
    drift_of(monitor)
    monitor.respond()
    restored.restore(json.loads(json.dumps(monitor.state())))
    assert restored.adjustments == monitor.adjustments
    new, old = Scored(ROWS, 0.2 * ROWS, 1.0, NO), ScoreSum(ROWS, 0.1 * ROWS)
    assert restored.observe(1, new, old) == monitor.observe(1, new, old)
    assert restored.state() == monitor.state()


@pytest.mark.parametrize("scored_every", [2, 25])
def test_the_settings_fall_back_over_steps_whose_events_have_no_label_yet(scored_every):
    monitor = make("raise-lr", "raise-replay")
    drift_of(monitor)
    monitor.respond()
    factors = []
    for step in range(12):
        factors.append(monitor.adjustments.lr_factor)
        monitor.observe(step, Scored(ROWS, 0.1 * ROWS, 0.0, NO) if not step % scored_every else NOT_SCORED, None)
    assert factors == [pytest.approx(3.0 - 0.2 * step) for step in range(10)] + [1.0, 1.0]


def test_a_drift_is_signalled_once_while_its_response_is_due():
    monitor = make("checkpoint", "raise-lr")
    drift_of(monitor)
    for step in range(40):
        assert not monitor.observe(step, NOT_SCORED, None).drifted
        assert not monitor.adjustments.checkpoint_first
    assert monitor.drift.count == 1
    assert monitor.drift.pending
    assert monitor.adjustments.lr_factor == 1.0


def test_a_score_that_is_not_finite_is_reported_once(caplog):
    monitor = make()
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            monitor.observe(step, Scored(ROWS, math.nan, 1.0, NO), None)
    assert len(caplog.records) == 1
    assert monitor.prequential.score.now is None


@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("wild", [1e4, 1e30])
def test_one_wild_label_among_the_first_does_not_spoil_the_mean_since_the_beginning(at, wild):
    mean, resumed = RunningMean(bounded=False, others=1), RunningMean(bounded=False, others=1)
    for number in range(100):
        error = wild if number == at else 1.0
        mean.add(-error * ROWS, ROWS, [-2 * error * ROWS])
        if number == 4:
            resumed.restore(json.loads(json.dumps(mean.state())))
            mean = resumed
    assert mean.overall == pytest.approx(-(99 + LIMIT) / 100)
    assert mean.other_windows(0)["overall"] == pytest.approx(-2 * (99 + LIMIT) / 100)
