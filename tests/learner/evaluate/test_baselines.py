"""What a model has to beat: rules without features."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate import baselines as module
from anabranch.learner.evaluate.baselines import Baselines, compare, score_of_constant
from anabranch.learner.evaluate.stream_monitor import Prequential, Scored


def schema_of(classes=None, *, group=True, **label):
    kind = {"classes": classes} if classes else {"dtype": "float64"}
    settings = {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", **kind, **label}}
    return Schema(SchemaSettings.model_validate(settings | ({"group": {"name": "of"}} if group else {})))


def groups(*hashes):
    return np.array(hashes, np.uint64)


def one_by_one(labels, of, classes):
    """Return the sums of scores of rules that take one event after another."""
    counts, leader, last, right = {}, {}, 0, np.zeros(3)
    for label, group in zip(labels, of, strict=True):
        for rule, key in ((0, "all"), (2, group)):
            right[rule] += leader.get(key, 0) == label
            count = counts.setdefault(key, Counter())
            count[label] += 1
            if count[label] > count[leader.get(key, 0)]:
                leader[key] = label
        right[1] += last == label
        last = label
    return right.tolist()


@given(
    events=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 4)), max_size=60),
    ends=st.lists(st.integers(0, 60), max_size=4),
)
def test_each_event_sees_the_labels_of_those_before_it_however_long_rounds_are(events, ends):
    labels, of = np.array([y for y, _ in events], np.int64), groups(*(group for _, group in events))
    found, rules = np.zeros(3), Baselines(schema_of(12))
    for part, group in zip(np.split(labels, sorted(ends)), np.split(of, sorted(ends)), strict=True):
        found += np.array(rules.add(part, group))
    assert found.tolist() == one_by_one(labels.tolist(), of.tolist(), 12)
    # What is guessed next, as for events whose label comes late.
    guess = rules.guess(groups(0, 1, 2, 3, 4))
    for index in range(5):
        more = rules.score(guess[[index]], np.array([2]))
        whole = one_by_one([*labels.tolist(), 2], [*of.tolist(), index], 12)
        assert (found + more).tolist() == whole


@given(
    events=st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 2)), min_size=1, max_size=40),
    end=st.integers(0, 40),
)
def test_means_are_those_of_the_numbers_before(events, end):
    labels, of = np.array([y for y, _ in events]), groups(*(group for _, group in events))
    rules = Baselines(schema_of())
    rules._limits.extend([1e9] * 63)  # so that no number counts for less than it is
    found = np.array(rules.add(labels[:end], of[:end])) + np.array(rules.add(labels[end:], of[end:]))
    expected, seen, last = np.zeros(3), {}, 0.0
    for label, group in zip(labels.tolist(), of.tolist(), strict=True):
        for rule, key in ((0, "all"), (2, group)):
            before = seen.setdefault(key, [])
            expected[rule] -= abs(label - (sum(before) / len(before) if before else 0.0))
            before.append(label)
        expected[1] -= abs(label - last)
        last = label
    assert found == pytest.approx(expected, abs=1e-6)


def measured(rules, parts):
    """Return the scores of a model that is always right, and of the baselines, of rounds of labels."""
    found = Prequential(bounded=parts[0].dtype.kind == "i", baselines=len(rules.names))
    for part in parts:
        perfect = float(len(part)) if part.dtype.kind == "i" else 0.0
        found.add(Scored(len(part), perfect, 0.0, rules.add(part, np.zeros(len(part), np.uint64))))
    return found


def test_with_little_fraud_the_constant_is_nearly_always_right():
    labels = (np.random.default_rng(0).random(64_000) < 0.006).astype(np.int64)
    found = measured(Baselines(schema_of(2)), np.array_split(labels, 1000)).score
    assert found.other_windows(0)["overall"] == pytest.approx(0.994, abs=0.001)
    assert found.other_windows(0)["now"] == pytest.approx(0.994, abs=0.001)


def test_runs_of_one_class_are_the_last_labels_and_a_class_by_group_is_that_of_the_group():
    labels = np.repeat(np.arange(10), 100) % 2
    rules = Baselines(schema_of(2))
    constant, last, of_group = rules.add(labels, labels.astype(np.uint64))
    assert (constant, last) == (500.0, 991.0)
    assert of_group == 999.0, "all but the first of group 1"


def test_the_mean_of_numbers_is_not_moved_by_one_of_any_size():
    labels = np.random.default_rng(0).normal(3.0, 1.0, 64_000)
    labels[1000] = 1e30
    found = measured(Baselines(schema_of(group=False)), np.array_split(labels, 1000)).score
    expected = -np.sqrt(2 / np.pi)
    assert found.other_windows(0)["now"] == pytest.approx(expected, rel=0.05)
    assert found.other_windows(0)["overall"] == pytest.approx(expected, rel=0.05)
    assert found.other_windows(1)["now"] == pytest.approx(-2 / np.sqrt(np.pi), rel=0.05)


def test_the_mean_of_a_group_is_its_own_however_large():
    rules, of = Baselines(schema_of()), groups(*[1] * 9, 2)
    for _ in range(20):
        rules.add(np.array([3.0] * 9 + [400.0]), of)
    assert rules.guess(groups(1, 2))[:, 2].tolist() == [3.0, 400.0]


def test_other_labels_have_no_baselines():
    for schema in (schema_of(3, multi=True), schema_of(3, length=4)):
        rules = Baselines(schema)
        assert rules.names == ()
        assert rules.add(np.ones((4, 3), np.bool_), groups(0, 0, 0, 0)) == ()
        assert rules.guess(groups(0, 0)).shape == (2, 0)
    assert score_of_constant(np.ones((4, 3), np.bool_)) is None
    assert Baselines(schema_of(2, group=False)).names == ("constant", "last_label")


@pytest.mark.parametrize("classes", [9, None])
def test_restored_baselines_continue_as_the_original(classes):
    random = np.random.default_rng(0)
    values = random.integers(0, 9, (40, 16)) if classes else random.normal(size=(40, 16))
    of = random.integers(0, 2**63, (5, 16)).astype(np.uint64)
    whole, half, resumed = (Baselines(schema_of(classes)) for _ in range(3))
    for row in range(40):
        whole.add(values[row], of[row % 5])
    for row in range(20):
        half.add(values[row], of[row % 5])
    resumed.restore(json.loads(json.dumps(half.state())))
    for row in range(20, 40):
        resumed.add(values[row], of[row % 5])
    assert resumed.state() == whole.state()
    assert resumed.guess(of[0]).tolist() == whole.guess(of[0]).tolist()


def test_memory_is_bounded_with_any_number_of_groups():
    rules = Baselines(schema_of(1000))
    for _ in range(3):
        of = np.random.default_rng(0).integers(0, 2**63, 5000).astype(np.uint64)
        rules.add(np.zeros(5000, np.int64), of)
    assert len(json.dumps(rules.state())) < 20 * module._MOST_COUNTS


def test_one_answer_for_held_out_events():
    assert score_of_constant(np.array([1, 1, 1, 0])) == 0.75
    assert score_of_constant(np.array([1.0, 2.0, 3.0, 1e9])) == pytest.approx(-(1.5 + 0.5 + 0.5 + 10) / 4)


@pytest.mark.parametrize(
    ("score", "baseline", "error", "bounded", "words", "worse"),
    [
        (0.959, 0.928, 0.004, True, "better than the rule by 3.1 points", False),
        (0.992, 0.994, 0.0003, True, "worse than the rule by 0.2 points", True),
        (0.992, 0.9923, 0.00005, True, "worse than the rule by less than 0.1 points", True),
        (0.994, 0.9941, 0.0003, True, "no better than the rule", False),
        (0.995, 0.9941, 0.0005, True, "no better than the rule", False),
        (1.0, 1.0, 0.0, True, "equal to the rule, which is always right", False),
        (-0.5, -1.25, 0.01, False, "better than the rule by 0.75", False),
        (0.5, 0.9, math.inf, True, "", False),
    ],
)
def test_a_comparison_is_in_words_and_worse_only_where_that_is_not_by_chance(
    score, baseline, error, bounded, words, worse
):
    assert compare("the rule", score, baseline, error, bounded=bounded) == (words, worse)


def test_a_model_that_is_as_good_as_the_constant_is_seldom_called_worse_or_better():
    random, wrong = np.random.default_rng(1), 0
    for _ in range(200):
        found = Prequential(baselines=1)
        for _ in range(100):
            # Each is right on its own nine tenths of 64 events.
            found.add(Scored(64, float(random.binomial(64, 0.9)), 0.0, [float(random.binomial(64, 0.9))]))
        wrong += not found.against(0, "the rule").words.startswith("no better")
    assert wrong <= 5
    found = Prequential(baselines=1)
    for _ in range(100):
        found.add(Scored(64, float(random.binomial(64, 0.85)), 0.0, [float(random.binomial(64, 0.9))]))
    assert found.against(0, "the rule").worse


def test_the_baselines_are_of_the_same_events_as_the_models_window():
    """A change begins a new window, of the model and of what it has to beat."""
    found = Prequential(baselines=1)
    for rounds, score, baseline in ((300, 0.9, 0.8), (300, 0.3, 0.5)):
        for _ in range(rounds):
            found.add(Scored(100, 100 * score, 0.0, [100 * baseline]))
    assert found.score.now == pytest.approx(0.3, abs=0.03)
    assert found.score.other_windows(0) == {"now": pytest.approx(0.5, abs=0.015), "overall": pytest.approx(0.65)}
    resumed = Prequential(baselines=1)
    resumed.restore(json.loads(json.dumps(found.state())))
    assert resumed.state() == found.state()
    assert resumed.against(0, "the rule") == found.against(0, "the rule")
