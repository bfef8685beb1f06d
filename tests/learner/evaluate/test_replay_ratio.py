"""The adaptive replay ratio, on simulated models."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.learner.evaluate.replay_ratio import AdaptiveReplayRatio, Ratio, ScoreSum, make_ratio
from anabranch.learner.settings.learner import LearnerSettings

ROWS = 32


@dataclass
class Model:
    """The score of a model on old events: it converges to `with_` where they are replayed, else to `without`."""

    new: float
    without: float
    with_: float
    old: float = 1.0

    def step(self, ratio):
        goal = self.without + (self.with_ - self.without) * min(1.0, 4 * ratio)
        self.old += 0.05 * (goal - self.old)


def run(ratio, model, steps, seed=0, change=None, rows=ROWS):
    """Return the ratio of each step; a step has `rows` new events, and scores as many old ones."""
    random = np.random.default_rng(seed)
    ratios = []
    for step in range(steps):
        if change is not None:
            change(step)
        ratios.append(ratio.now)
        old = ScoreSum(rows, float(random.binomial(rows, model.old))) if ratio.probes(step) else None
        model.step(ratio.now)
        ratio.observe(ScoreSum(rows, float(random.binomial(rows, model.new))), old)
    return ratios


def test_nothing_is_replayed_without_forgetting():
    assert not any(run(AdaptiveReplayRatio(0.5, bounded=True), Model(0.8, 0.78, 0.8, old=0.8), 5000))


def test_the_full_ratio_is_reached_soon_where_replay_prevents_forgetting():
    ratios = run(AdaptiveReplayRatio(0.5, bounded=True), Model(0.97, 0.1, 0.95), 1500)
    assert ratios[0] == 0
    assert 1.0 in ratios[:250]
    assert min(ratios[ratios.index(1.0) :]) > 0.6


@pytest.mark.parametrize("seed", range(20))
def test_a_trial_starts_once_it_can_show_a_gain(seed):
    """A trial that starts as soon as forgetting exceeds the bar would have to undo all of the forgetting."""
    ratios = run(AdaptiveReplayRatio(0.5, bounded=True), Model(0.97, 0.4, 0.93), 1500, seed)
    begun = next(step for step, ratio in enumerate(ratios) if ratio)
    assert min(ratios[begun:]) > 0.3


@pytest.mark.parametrize(("gain", "weight", "least", "most"), [(0.35, 0.5, 0.25, 0.5), (0.35, 0.8, 1.0, 1.0)])
def test_the_ratio_is_in_proportion_to_the_gain(gain, weight, least, most):
    """The cost of replay for new events grows with the ratio: a stream that gains little pays little."""
    ratios = run(AdaptiveReplayRatio(weight, bounded=True), Model(0.9, 0.9 - gain, 0.9), 2000)
    after = ratios[ratios.index(1.0) + 200 :]
    assert least * 0.8 <= min(after) <= max(after) <= most


def test_a_weight_of_one_for_old_events_replays_at_the_full_ratio():
    assert run(AdaptiveReplayRatio(1.0, bounded=True), Model(0.9, 0.7, 0.9), 600)[-1] == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
def test_forgetting_that_decreases_after_the_trial_stays_low():
    """The model recovers slowly: the gain of replay is known only long after the trial."""
    ratio, model, old = AdaptiveReplayRatio(0.5, bounded=True), Model(0.97, 0.1, 0.95), []

    def change(step):
        model.with_ = 0.5 + 0.45 * min(1.0, step / 2000)
        old.append(model.old)

    run(ratio, model, 60_000, change=change)
    assert min(old[4000:]) > 0.7


def test_a_trial_without_benefit_stops_replay():
    """Old events are only harder than the newest: a trial is short, and the next starts only at a larger drop."""
    ratios = run(AdaptiveReplayRatio(0.5, bounded=True), Model(0.9, 0.6, 0.62), 10_000)
    assert 0 < np.count_nonzero(ratios) <= 2 * 200
    assert ratios[-1] == 0


def test_the_ratio_decays_while_forgetting_is_low_and_rises_when_it_grows():
    ratio, model = AdaptiveReplayRatio(0.5, bounded=True), Model(0.97, 0.1, 0.95)

    def change(step):
        model.without = 0.93 if 500 <= step < 36_000 else 0.1

    ratios = run(ratio, model, 37_000, change=change)
    assert ratios[499] > 0.6
    assert ratios[35_999] < 0.1
    assert max(ratios[36_000:]) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("harder", [0.0, 0.12])
@pytest.mark.parametrize(("old_weight", "rows"), [(0.5, 10), (0.5, 64), (0.8, 64)])
def test_replay_stops_where_it_no_longer_helps(old_weight, rows, harder):
    """The stream drifts: from then on old events are harder than the newest, with or without replay."""
    ratio, model = AdaptiveReplayRatio(old_weight, bounded=True), Model(0.97, 0.1, 0.95)

    def change(step):
        if step == 2000:
            model.without = model.with_ = 0.97 - harder

    ratios = run(ratio, model, 70_000, change=change, rows=rows)
    assert min(ratios[1000:2000]) > 0.6
    assert np.mean(ratios[-10_000:]) < 0.15


def test_replay_stays_on_where_it_helps_less_than_before():
    """More classes were added: full replay reaches a lower score than before, but gains as much."""
    ratio, model = AdaptiveReplayRatio(0.5, bounded=True), Model(0.97, 0.1, 0.95)

    def change(step):
        if step == 2000:
            model.with_ = 0.7

    ratios = run(ratio, model, 40_000, change=change)
    assert min(ratios[2000:]) > 0.1
    assert model.old > 0.5


@pytest.mark.slow
def test_forgetting_within_half_the_cost_does_not_raise_the_ratio():
    """Forgetting settles at about half of `cost`, and sometimes slightly above."""
    ratio, model, old = AdaptiveReplayRatio(0.5, bounded=True), Model(0.97, 0.1, 0.95), []
    run(ratio, model, 60_000, change=lambda _: old.append(model.old), rows=256)
    assert min(old[30_000:]) > 0.97 - 0.1 - 0.1
    assert np.mean(old[30_000:]) < 0.95


@pytest.mark.slow
def test_the_sampling_error_of_few_events_does_not_raise_the_ratio():
    """There is no forgetting; at this weight, half of `cost` equals the sampling error of ten events."""
    ratio, model = AdaptiveReplayRatio(0.8, bounded=True), Model(0.9, 0.1, 0.9)

    def change(step):
        model.without = 0.1 if step < 2000 else 0.9

    assert np.mean(run(ratio, model, 60_000, change=change, rows=10)[-10_000:]) < 0.15


def test_a_weight_of_zero_stops_the_replay_of_a_checkpoint():
    before, after = AdaptiveReplayRatio(0.5, bounded=True), AdaptiveReplayRatio(0.0, bounded=True)
    assert run(before, Model(0.97, 0.1, 0.95), 1000)[-1] > 0.6
    after.restore(json.loads(json.dumps(before.state())))
    assert not any(run(after, Model(0.97, 0.1, 0.95), 1000))


def test_a_state_from_the_steps_before_a_trial_continues_as_the_original():
    whole = AdaptiveReplayRatio(0.5, bounded=True)
    begun = run(whole, Model(0.97, 0.1, 0.95), 1000).index(1.0)
    checkpoint, resumed, model = (
        AdaptiveReplayRatio(0.5, bounded=True),
        AdaptiveReplayRatio(0.5, bounded=True),
        Model(0.97, 0.1, 0.95),
    )
    run(checkpoint, model, begun - 25)
    resumed.restore(json.loads(json.dumps(checkpoint.state())))
    starts = [run(each, replace(model), 60, seed=1).index(1.0) for each in (resumed, checkpoint)]
    assert starts[0] == starts[1] < 40


@pytest.mark.parametrize(("old_weight", "replays"), [(0.0, False), (0.2, False), (0.5, True), (1.0, True)])
def test_the_weight_of_old_events_decides_whether_replay_pays(old_weight, replays):
    """Replay gains 0.4: enough at equal weights, not where old events have a quarter of the weight of new ones."""
    assert any(run(AdaptiveReplayRatio(old_weight, bounded=True), Model(0.9, 0.5, 0.9), 1000)) == replays


def test_forgetting_of_a_regression_is_relative_to_the_error():
    for unit in (1e-3, 1.0, 1e6):
        ratio = AdaptiveReplayRatio(0.5, bounded=False)
        for step in range(400):
            old = ScoreSum(ROWS, -5 * unit * ROWS) if ratio.probes(step) else None
            ratio.observe(ScoreSum(ROWS, -1 * unit * ROWS), old)
        assert ratio.forgetting == pytest.approx(0.8)


def test_forgetting_of_a_perfect_regression_is_zero():
    ratio = AdaptiveReplayRatio(0.5, bounded=False)
    for _ in range(100):
        ratio.observe(ScoreSum(ROWS, 0.0), ScoreSum(ROWS, 0.0))
    assert (ratio.forgetting, ratio.now) == (0.0, 0.0)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=600),
    st.floats(0, 1),
    st.integers(0, 599),
)
def test_a_restored_state_continues_as_the_original_within_bounds(scores, weight, at):
    whole, half = AdaptiveReplayRatio(weight, bounded=True), AdaptiveReplayRatio(weight, bounded=True)

    def learn(ratio, step):
        new, old = scores[step]
        ratio.observe(ScoreSum(ROWS, new * ROWS), ScoreSum(ROWS, old * ROWS) if ratio.probes(step) else None)
        assert 0 <= ratio.now <= 1
        return ratio.now

    ratios = [learn(whole, step) for step in range(len(scores))]
    for step in range(min(at, len(scores))):
        learn(half, step)
    resumed = AdaptiveReplayRatio(weight, bounded=True)
    resumed.restore(json.loads(json.dumps(half.state())))
    assert [learn(resumed, step) for step in range(min(at, len(scores)), len(scores))] == ratios[at:]
    assert resumed.state() == whole.state()


def test_make_ratio_returns_the_ratio_of_the_config():
    fixed = make_ratio(LearnerSettings(replay_ratio=1.5), bounded=True)
    assert type(fixed) is Ratio
    assert fixed.now == 1.5
    assert not fixed.probes(0)
    auto = make_ratio(LearnerSettings(replay_ratio="auto"), bounded=True)
    assert isinstance(auto, AdaptiveReplayRatio)
    auto.restore(fixed.state())
    assert auto.now == 0
    fixed.restore(auto.state())
    assert fixed.now == 1.5
