"""The rule that a model has to beat."""

import json

import numpy as np
import pytest

from anabranch.learner.evaluate.stream_monitor import SimplestRule, score_of_constant


def test_the_most_frequent_class_so_far_is_scored_before_its_events_are_counted():
    rule = SimplestRule(bounded=True)
    assert rule.windows == {}
    rule.add(np.array([1, 1, 2]))
    assert rule.windows == {}, "nothing was known before"
    rule.add(np.array([1, 2, 2, 2]))
    assert rule.windows == {"now": 0.25, "overall": 0.25}
    rule.add(np.array([2, 2, 0, 1]))
    assert rule.windows["overall"] == (1 + 2) / 8


def test_with_little_fraud_it_is_nearly_always_right():
    labels = (np.random.default_rng(0).random(64_000) < 0.006).astype(np.int64)
    rule = SimplestRule(bounded=True)
    for part in np.array_split(labels, 1000):
        rule.add(part)
    assert rule.windows["overall"] == pytest.approx(0.994, abs=0.001)
    assert rule.windows["now"] == pytest.approx(0.994, abs=0.001)


def test_the_mean_of_numbers_is_not_moved_by_one_of_any_size():
    labels = np.random.default_rng(0).normal(3.0, 1.0, 64_000)
    labels[1000] = 1e30
    rule = SimplestRule(bounded=False)
    for part in np.array_split(labels, 1000):
        rule.add(part)
    expected = -np.sqrt(2 / np.pi)
    assert rule.windows["now"] == pytest.approx(expected, rel=0.05)
    assert rule.windows["overall"] == pytest.approx(expected, rel=0.05)


def test_other_labels_have_no_score():
    for bounded, label in ((True, np.ones((4, 3), np.bool_)), (True, np.ones(4)), (False, np.ones(4, np.int64))):
        rule = SimplestRule(bounded=bounded)
        for _ in range(3):
            rule.add(label)
        assert rule.windows == {}
    assert score_of_constant(np.ones((4, 3), np.bool_)) is None


@pytest.mark.parametrize("bounded", [True, False])
def test_a_restored_rule_continues_as_the_original(bounded):
    random = np.random.default_rng(0)
    values = random.integers(0, 9, (40, 16)) if bounded else random.normal(size=(40, 16))
    whole, half, resumed = (SimplestRule(bounded=bounded) for _ in range(3))
    for row in values:
        whole.add(row)
    for row in values[:20]:
        half.add(row)
    resumed.restore(json.loads(json.dumps(half.state())))
    for row in values[20:]:
        resumed.add(row)
    assert resumed.state() == whole.state()


def test_one_answer_for_held_out_events():
    assert score_of_constant(np.array([1, 1, 1, 0])) == 0.75
    assert score_of_constant(np.array([1.0, 2.0, 3.0, 1e9])) == pytest.approx(-(1.5 + 0.5 + 0.5 + 10) / 4)
