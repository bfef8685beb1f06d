"""What versions learn of the newest events to answer with: against plain definitions, and in torch as in numpy."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch.learner.errors import ModelError
from anabranch.learner.evaluate.calibration import FEWEST, calibrated, learned_rule, pooled, threshold_of_budget
from anabranch.learner.evaluate.measures import Outcomes, measure_of
from anabranch.learner.model.answer_rule import AnswerRule, Calibration
from anabranch.learner.model.answers import Answers
from anabranch.learner.settings.model import TaskSettings

KINDS = [("temperature", 2), ("temperature", 4), ("platt", 2), ("platt", 4), ("isotonic", 2)]


def log_softmax(logits_NC):
    return torch.tensor(logits_NC).log_softmax(dim=1).numpy()


@functools.cache
def overconfident(classes, rows=4000, seed=0):
    """Return log-probabilities that are twice too sure, and shifted as by class-balanced replay, and labels."""
    generator = np.random.default_rng(seed)
    true_NC = log_softmax(generator.normal(0, 1.5, (rows, classes)) - 1.5 * np.arange(classes))
    label_N = (generator.random((rows, 1)) > np.exp(true_NC)[:, :-1].cumsum(axis=1)).sum(axis=1)
    return log_softmax(2 * true_NC + 3.0 * np.arange(classes)), label_N


def rule_of(kind, log_NC, label_N, before=None, **more):
    return learned_rule(TaskSettings(calibrate=kind, **more), log_NC, label_N, before)


def loss_of(log_NC, label_N):
    return -float(log_NC[np.arange(len(label_N)), label_N].mean())


@pytest.mark.parametrize(("kind", "classes"), KINDS)
def test_probabilities_are_better_on_other_events_and_torch_has_the_same_ones(kind, classes):
    log_NC, label_N = overconfident(classes)
    rule = rule_of(kind, log_NC, label_N)
    other_NC, other_N = overconfident(classes, seed=1)
    found_NC = calibrated(rule.calibration, other_NC)
    assert loss_of(found_NC, other_N) < loss_of(other_NC, other_N)
    if kind != "temperature":
        perfect = log_softmax((other_NC - 3.0 * np.arange(classes)) / 2)
        assert loss_of(found_NC, other_N) < loss_of(perfect, other_N) + 0.01
    answers_NC = Answers(rule, classes)(torch.from_numpy(other_NC))
    np.testing.assert_allclose(answers_NC.exp().numpy(), np.exp(found_NC), atol=1e-6)
    shifted = Answers(rule, classes)(torch.from_numpy(other_NC) + 7.0)
    torch.testing.assert_close(shifted, answers_NC, atol=1e-4, rtol=1e-4)
    assert rule.calibration.figures["log_loss"] <= rule.calibration.figures["log_loss_before"]
    assert rule.calibration.rows == len(label_N)


@pytest.mark.parametrize(("kind", "classes"), KINDS[:4])
def test_no_other_scale_and_biases_have_less_log_loss(kind, classes):
    log_NC, label_N = overconfident(classes)
    found = rule_of(kind, log_NC, label_N).calibration
    best = loss_of(calibrated(found, log_NC), label_N)
    for step in (-0.02, 0.02):
        others = [Calibration(found.kind, 1, scale=found.scale + step, bias=found.bias)]
        for index in range(len(found.bias)):
            bias = [each + step * (index == at) for at, each in enumerate(found.bias)]
            others.append(Calibration(found.kind, 1, scale=found.scale, bias=bias))
        assert all(loss_of(calibrated(other, log_NC), label_N) > best for other in others)


def test_a_scale_is_the_inverse_of_the_temperature_of_logits():
    log_NC, label_N = overconfident(3)
    once, twice = (rule_of("temperature", log_softmax(t * log_NC), label_N).calibration.scale for t in (1, 2))
    assert once == pytest.approx(2 * twice, rel=1e-3)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=10))
def test_pooled_values_are_those_of_the_definition(parts):
    value_K, weight_K = (np.array(each, float) for each in zip(*parts, strict=True))

    def mean(begin, end):
        return np.average(value_K[begin:end], weights=weight_K[begin:end])

    rows = range(len(parts))
    expected = [max(min(mean(a, b + 1) for b in rows if b >= i) for a in rows if a <= i) for i in rows]
    found_K, block_K = pooled(value_K, weight_K)
    np.testing.assert_allclose(found_K, expected, atol=1e-12)
    assert (np.diff(block_K) >= 0).all()


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 40]), st.floats(-4, 4))
@example(384 + 10**6, 1, -4.0)  # two parts have the same share, whose means differ by rounding
def test_isotonic_answers_rise_with_those_of_the_model(seed, values, middle):
    generator = np.random.default_rng(seed)
    odds_N = generator.choice(generator.normal(0, 5, values), 1000) + generator.normal(0, 1e-3, 1000)
    label_N = (generator.random(1000) < 1 / (1 + np.exp(-odds_N - middle))).astype(int)
    label_N[:10] = [0, 1] * 5
    log_NC = log_softmax(np.stack([np.zeros(1000), odds_N], axis=1))
    rule = rule_of("isotonic", log_NC, label_N)
    assert rule.misfit(2) is None
    assert len(rule.calibration.odds) <= 50
    line = torch.linspace(-30, 30, 4001)
    answers = Answers(rule, 2)(torch.stack([torch.zeros_like(line), line], dim=1))
    assert (answers[:, 1] - answers[:, 0]).diff().min() >= -1e-5
    assert answers.isfinite().all()


def test_the_answers_of_isotonic_calibration_have_the_frequencies_of_its_parts():
    odds_N = np.repeat([-2.0, 0.0, 2.0], 1000)
    label_N = np.concatenate([np.arange(1000) < count for count in (10, 20, 400)]).astype(int)
    log_NC = log_softmax(np.stack([np.zeros(3000), odds_N], axis=1))
    found = np.exp(calibrated(rule_of("isotonic", log_NC, label_N).calibration, log_NC))[:, 1]
    np.testing.assert_allclose(found[[0, 1500, 2500]], [0.01, 0.02, 0.4], rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "label", "why"),
    [
        (FEWEST - 1, None, "only 199 new events with a label are known, of 200 needed"),
        (1000, 1, "fewer than two classes have 5 of the newest 1,000 events"),
    ],
)
@pytest.mark.parametrize("kind", ["temperature", "platt", "isotonic"])
def test_too_few_events_change_nothing_or_keep_what_the_version_before_had(kind, rows, label, why):
    log_NC, label_N = overconfident(2, rows)
    label_N = label_N if label is None else np.full(rows, label)
    rule = rule_of(kind, log_NC, label_N)
    assert (rule.calibration.rows, rule.calibration.why, rule.changes) == (0, why, False)
    assert why in rule.sentence
    before = rule_of(kind, *overconfident(2), alert_budget=0.02)
    kept = rule_of(kind, log_NC[:10], label_N[:10], before, alert_budget=0.02)
    assert kept == before
    other = rule_of("temperature" if kind != "temperature" else "platt", log_NC, label_N, before)
    assert other.calibration.rows == 0, "the calibration before is of another kind"


def test_a_model_that_ranks_the_wrong_way_round_keeps_its_order():
    log_NC, label_N = overconfident(2)
    rule = rule_of("platt", log_NC, 1 - label_N)
    assert 0 < rule.calibration.scale <= 0.01


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3), st.floats(0.003, 0.9))
def test_a_budget_is_used_and_not_exceeded(seed, digits, budget):
    odds_N = np.random.default_rng(seed).normal(0, 3, 300).round(digits).astype(np.float32)
    threshold = threshold_of_budget(odds_N.astype(np.float64), budget)
    assert (odds_N >= threshold).sum() <= budget * len(odds_N)
    largest = odds_N[odds_N < threshold].max()
    assert (odds_N >= largest).sum() > int(budget * len(odds_N)), "with the next lower score there would be too many"


def test_a_budget_finds_as_many_as_the_measure_says():
    log_NC, label_N = overconfident(2)
    rule = rule_of("isotonic", log_NC, label_N, alert_budget=0.05)
    answers = Answers(rule, 2).answer({"prediction": torch.zeros(1), "probabilities": torch.from_numpy(np.exp(log_NC))})
    flagged_N = answers["prediction"].numpy() == 1
    assert flagged_N.sum() == 200
    odds_N = log_NC[:, 1] - log_NC[:, 0]
    recall = measure_of("recall_at_budget_5", "two-classes").value(Outcomes("two-classes", odds_N[:, None], label_N))
    assert (flagged_N & (label_N == 1)).sum() / label_N.sum() == pytest.approx(recall, abs=1e-9)


@pytest.mark.parametrize(
    ("task", "classes"),
    [
        ({"costs": [1, 20]}, 2),
        ({"costs": [[0, 1, 5], [2, 0, 1], [9, 3, 0]]}, 3),
        ({"threshold": 0.05}, 2),
        ({}, 3),
    ],
)
def test_the_class_is_that_of_the_least_expected_cost_or_above_the_threshold(task, classes):
    rule = learned_rule(TaskSettings.model_validate(task), *overconfident(classes))
    p_BC = torch.rand(500, classes, generator=torch.Generator().manual_seed(0)) ** 4
    p_BC /= p_BC.sum(dim=1, keepdim=True)
    found = Answers(rule, classes).answer({"prediction": torch.zeros(500), "probabilities": p_BC})
    assert torch.equal(found["probabilities"], p_BC)
    for p, decided in zip(p_BC.tolist(), found["prediction"].tolist(), strict=True):
        if "threshold" in task:
            assert decided == (p[1] >= 0.05)
        elif "costs" in task:
            costs = [[0, 1], [20, 0]] if classes == 2 else task["costs"]
            each = [sum(p[label] * costs[label][at] for label in range(classes)) for at in range(classes)]
            assert each[decided] == pytest.approx(min(each))
        else:
            assert p[decided] == max(p)


@pytest.mark.parametrize(
    "rule",
    [
        AnswerRule(Calibration("platt", 9, bias=[0.0, 1.0])),
        AnswerRule(Calibration("isotonic", 9, odds=[0.0], calibrated=[0.0])),
        AnswerRule(odds=0.5),
        AnswerRule(costs=[[0.0, 1.0], [1.0, 0.0]]),
        AnswerRule(Calibration("temperature", 9, scale=-1.0)),
        AnswerRule(Calibration("temperature", 9, scale=math.nan)),
    ],
)
def test_a_rule_of_another_number_of_classes_is_refused(rule):
    with pytest.raises(ModelError, match="not one of 3 classes"):
        Answers(rule, 3)


def test_outputs_that_are_not_finite_stay_so():
    rule = rule_of("isotonic", *overconfident(2), alert_budget=0.1)
    assert Answers(rule, 2)(torch.tensor([[0.0, math.nan], [0.0, 1.0]])).isnan().any(dim=1).tolist() == [True, False]


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ({"threshold": 0.5, "costs": [1, 2]}, "costs and threshold each decide the prediction; keep one of them"),
        ({"threshold": 0.5, "alert_budget": 0.1}, "threshold and alert_budget each decide"),
        ({"threshold": 1}, "less than 1"),
        ({"costs": [1, -2]}, "greater than or equal to 0"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(task, sentence):
    with pytest.raises(ValueError, match=sentence):
        TaskSettings.model_validate(task)


@pytest.mark.parametrize(
    ("task", "of", "classes", "sentence"),
    [
        ({"threshold": 0.5}, "regression", None, 'task.threshold is for model.task = "classification"'),
        ({"calibrate": "platt"}, "multilabel", 3, 'task.calibrate is for model.task = "classification"'),
        ({"costs": [1, 2]}, "my_task:Own", 2, 'and it is "my_task:Own"; remove it'),
        ({"costs": [1, 2]}, "classification", 3, "task.costs has to be 3 rows of 3 numbers"),
        ({"costs": [[1, 2], [3]]}, "classification", ("a", "b"), "task.costs has to be 2 rows of 2 numbers"),
        ({"alert_budget": 0.1}, "classification", 3, "task.alert_budget is for two classes, and schema.label has 3"),
        ({"calibrate": "isotonic"}, "classification", 3, 'task.calibrate = "isotonic" is for two classes'),
        ({"calibrate": "platt"}, "classification", 100, 'has 100; write "temperature"'),
        ({"calibrate": "platt", "costs": [1, 2]}, "classification", 2, None),
        ({}, "regression", None, None),
    ],
)
def test_what_does_not_fit_the_label_is_one_sentence(task, of, classes, sentence):
    found = [text for _, text in TaskSettings.model_validate(task).conflicts(of, classes)]
    assert len(found) == (sentence is not None)
    assert sentence is None or sentence in found[0]
