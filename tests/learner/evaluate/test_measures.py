"""Measures against scikit-learn, naive definitions, and what is known of intervals."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from anabranch.learner.evaluate.measures import (
    FadedCounts,
    Outcomes,
    Window,
    delong,
    measure_of,
    measures_of,
    probability_of,
    resamples,
)

EXACT = 1e-6
SKETCHED = 1e-3


def two_classes(rows=3000, rate=0.05, seed=0, *, ties=False, groups=None, signal=1.5):
    """Outcomes of a fair model of rare positives; `ties` rounds its log-odds."""
    rng = np.random.default_rng(seed)
    latent = rng.normal(size=rows) * signal + math.log(rate / (1 - rate))
    label = (rng.random(rows) < 1 / (1 + np.exp(-latent))).astype(np.int64)
    odds = latent + rng.normal(size=rows) * 0.3
    odds = np.round(odds) if ties else odds
    return Outcomes("two-classes", odds[:, None], label, groups)


def classes_of(logits, label):
    """Outcomes of more than two classes, from their logits."""
    log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    best, rows = log_p.argmax(axis=1), np.arange(len(label))
    of_label = logits[rows, label]
    above = (logits >= of_label[:, None]).sum(axis=1) - 1
    columns = np.stack([best, np.exp(log_p[rows, best]), log_p[rows, label], above], axis=1)
    return Outcomes("classes", columns, label)


def value(name, outcomes, weights=None):
    return measure_of(name, outcomes.kind, groups=outcomes.group is not None).value(outcomes, weights)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_measures_of_two_classes_are_those_of_scikit_learn(ties, weighted):
    outcomes = two_classes(ties=ties)
    label, odds = outcomes.label, outcomes.predicted[:, 0]
    p, weights = probability_of(odds), np.random.default_rng(1).integers(0, 4, len(label)).astype(float)
    given = {"sample_weight": weights} if weighted else {}
    expected = {
        "average_precision": metrics.average_precision_score(label, odds, **given),
        "roc_auc": metrics.roc_auc_score(label, odds, **given),
        "log_loss": metrics.log_loss(label, p, **given),
        "brier": metrics.brier_score_loss(label, p, **given),
    }
    for name, number in expected.items():
        assert value(name, outcomes, weights if weighted else None) == pytest.approx(number, abs=EXACT), name


def test_the_recall_at_a_precision_is_that_of_the_curve():
    outcomes = two_classes(rate=0.3)
    precision, recall, _ = metrics.precision_recall_curve(outcomes.label, outcomes.predicted[:, 0])
    for percent in (50, 70, 90):
        expected = recall[precision >= percent / 100].max()
        assert value(f"recall_at_precision_{percent}", outcomes) == pytest.approx(expected, abs=EXACT)
    assert value("recall_at_precision_90", Outcomes("two-classes", np.zeros((50, 1)), np.arange(50) % 10 == 0)) == 0.0


def test_the_recall_at_a_budget_counts_the_highest_scores_and_a_part_of_ties():
    outcomes = two_classes(rows=2000)
    highest = np.argsort(-outcomes.predicted[:, 0])
    for percent in (1, 5, 0.5):
        found = outcomes.label[highest[: round(2000 * percent / 100)]].sum() / outcomes.label.sum()
        assert value(f"recall_at_budget_{percent}", outcomes) == pytest.approx(found, abs=EXACT)
    constant = Outcomes("two-classes", np.zeros((1000, 1)), (np.arange(1000) < 10).astype(int))
    assert value("recall_at_budget_5", constant) == pytest.approx(0.05)


def test_the_calibration_error_is_that_of_its_definition():
    outcomes = two_classes(rate=0.4)
    p = probability_of(outcomes.predicted[:, 0])
    error = 0.0
    for low in np.arange(15) / 15:
        inside = (p >= low) & (p < low + 1 / 15)
        if inside.any():
            error += inside.mean() * abs(outcomes.label[inside].mean() - p[inside].mean())
    assert value("ece", outcomes) == pytest.approx(error, abs=EXACT)


def test_measures_of_classes_are_those_of_scikit_learn():
    rng = np.random.default_rng(3)
    label = rng.choice(12, size=2000, p=np.arange(1, 13) / 78)
    logits = rng.normal(size=(2000, 12)) + 1.5 * (label[:, None] == np.arange(12))
    outcomes, predicted = classes_of(logits, label), logits.argmax(axis=1)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert value("balanced_accuracy", outcomes) == pytest.approx(
        metrics.balanced_accuracy_score(label, predicted), abs=EXACT
    )
    assert value("macro_f1", outcomes) == pytest.approx(metrics.f1_score(label, predicted, average="macro"), abs=EXACT)
    assert value("log_loss", outcomes) == pytest.approx(metrics.log_loss(label, p), abs=EXACT)
    for k in (1, 3, 5):
        expected = metrics.top_k_accuracy_score(label, p, k=k)
        assert value(f"top_{k}", outcomes) == pytest.approx(expected, abs=EXACT)


def test_macro_f1_counts_classes_that_are_only_predicted():
    label, predicted = np.array([0, 0, 1, 1]), np.array([0, 2, 1, 1])
    outcomes = Outcomes("classes", np.stack([predicted, *np.zeros((3, 4))], axis=1), label)
    expected = metrics.f1_score(label, predicted, average="macro", zero_division=0)
    assert value("macro_f1", outcomes) == pytest.approx(expected, abs=EXACT)


def test_mean_average_precision_is_the_mean_over_the_classes_that_occur():
    rng = np.random.default_rng(4)
    label = rng.random((500, 6)) < [0.02, 0.1, 0.3, 0.5, 0.05, 0.0]
    odds = rng.normal(size=(500, 6)) + label
    each = [metrics.average_precision_score(label[:, c], odds[:, c]) for c in range(5)]
    assert value("mean_average_precision", Outcomes("labels", odds, label)) == pytest.approx(np.mean(each), abs=EXACT)


def test_measures_of_numbers_are_those_of_scikit_learn():
    rng = np.random.default_rng(5)
    label = rng.normal(size=800) * 10
    predicted = label + rng.standard_t(3, size=800)
    outcomes = Outcomes("number", predicted[:, None], label)
    assert value("mae", outcomes) == pytest.approx(metrics.mean_absolute_error(label, predicted), abs=EXACT)
    assert value("rmse", outcomes) == pytest.approx(metrics.root_mean_squared_error(label, predicted), abs=EXACT)
    for percent in (10, 50, 90):
        expected = metrics.mean_pinball_loss(label, predicted, alpha=percent / 100)
        assert value(f"pinball_{percent}", outcomes) == pytest.approx(expected, abs=EXACT)


def test_a_constant_has_what_the_best_single_prediction_has():
    """As scikit-learn says it of the shares of the classes, and of the mean, median or quantile."""
    rng = np.random.default_rng(8)
    two, weights = two_classes(rows=800, rate=0.1), rng.integers(1, 4, 800).astype(float)
    share = np.full(800, np.average(two.label, weights=weights))
    classes = rng.choice(4, size=500, p=[0.1, 0.2, 0.5, 0.2])
    shares = np.tile(np.bincount(classes) / 500, (500, 1))
    several = rng.random((400, 3)) < [0.02, 0.3, 0.6]
    number = rng.gamma(1.0, size=600)
    numbers, many = Outcomes("number", number[:, None], number), classes_of(rng.normal(size=(500, 4)), classes)
    cases = [
        (two, "average_precision", weights, share[0]),
        (two, "roc_auc", weights, 0.5),
        (two, "log_loss", weights, metrics.log_loss(two.label, share, sample_weight=weights)),
        (two, "brier", weights, metrics.brier_score_loss(two.label, share, sample_weight=weights)),
        (two, "ece", weights, 0.0),
        (two, "recall_at_budget_1", weights, 0.01),
        (many, "balanced_accuracy", None, 0.25),
        (many, "macro_f1", None, metrics.f1_score(classes, np.full(500, 2), average="macro")),
        (many, "log_loss", None, metrics.log_loss(classes, shares)),
        (many, "top_1", None, metrics.accuracy_score(classes, np.full(500, 2))),
        (many, "top_3", None, 1 - shares.min()),
        (many, "ece", None, 0.0),
        (classes_of(np.zeros((4, 4)), np.arange(4)), "top_3", None, 0.75),
        (Outcomes("labels", several, several), "mean_average_precision", None, several.mean(axis=0).mean()),
        (numbers, "mae", None, np.abs(number - np.median(number)).mean()),
        (numbers, "rmse", None, number.std()),
        (numbers, "pinball_90", None, metrics.mean_pinball_loss(number, [np.quantile(number, 0.9)] * 600, alpha=0.9)),
    ]
    for outcomes, name, of_each, expected in cases:
        measure = measure_of(name, outcomes.kind)
        assert measure.constant(outcomes, of_each) == pytest.approx(expected, abs=EXACT), name
        one_class = outcomes.where(outcomes.label == outcomes.label[0]) if outcomes.kind != "labels" else outcomes
        assert not math.isinf(measure.constant(one_class)), name


@pytest.mark.parametrize("ties", [False, True])
def test_ndcg_and_mrr_are_means_over_the_groups(ties):
    rng = np.random.default_rng(6)
    group = rng.integers(1, 41, size=600).astype(np.uint64) * 7919
    gain = rng.integers(0, 4, size=600) * (group % 5 > 0)  # a fifth of the groups has no gain
    score = np.round(gain + rng.normal(size=600) * 2, 0 if ties else 9)
    ndcg, reciprocal = [], []
    for each in np.unique(group):
        of_group, gains = score[group == each], gain[group == each]
        if gains.any() and len(gains) > 1:
            ndcg.append(metrics.ndcg_score([gains], [of_group], k=5))
            rank = 1 + ((of_group >= of_group[gains > 0].max()) & (gains == 0)).sum()
            reciprocal.append(1 / rank)
    alone = np.zeros(3, np.uint64)  # events without a group do not count
    score, gain, group = np.append(score, [1, 2, 3]), np.append(gain, [1, 0, 3]), np.append(group, alone)
    outcomes = Outcomes("number", score[:, None], gain.astype(float), group)
    assert value("ndcg_5", outcomes) == pytest.approx(np.mean(ndcg), abs=EXACT)
    assert value("mrr", outcomes) == pytest.approx(np.mean(reciprocal), abs=EXACT)


def test_a_constant_model_ranks_like_chance():
    outcomes = Outcomes("two-classes", np.full((1000, 1), -3.0), (np.arange(1000) % 50 == 0).astype(int))
    assert outcomes.constant
    assert value("average_precision", outcomes) == pytest.approx(0.02)
    assert value("roc_auc", outcomes) == pytest.approx(0.5)
    classes = classes_of(np.zeros((100, 10)), np.arange(100) % 10)
    assert classes.constant
    assert value("top_5", classes) == 0.0


def test_a_measure_of_one_class_is_not_defined():
    outcomes = Outcomes("two-classes", np.arange(10.0)[:, None], np.zeros(10, np.int64))
    for name in ("average_precision", "roc_auc", "recall_at_budget_1", "recall_at_precision_90"):
        assert measure_of(name, "two-classes").estimate(outcomes) is None
    assert measure_of("log_loss", "two-classes").estimate(outcomes) is not None
    assert measure_of("roc_auc", "two-classes").compare(outcomes, outcomes) is None


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.integers(0, 3)), min_size=1, max_size=30),
    st.sampled_from(measures_of("two-classes")),
)
def test_a_weight_is_as_many_events(events, name):
    odds, label, weight = map(np.array, zip(*events, strict=True))
    outcomes = Outcomes("two-classes", odds[:, None].astype(float), label.astype(np.int64))
    once, often = value(name, outcomes, weight), value(name, outcomes.where(np.repeat(np.arange(len(odds)), weight)))
    assert once == pytest.approx(often, abs=1e-9, nan_ok=True)


@pytest.mark.slow
def test_the_interval_has_the_true_value_in_19_of_20_samples():
    """Of 300 samples, chance has 285 with a standard deviation of 4; the bootstrap of few positives has fewer."""
    truth = two_classes(rows=400_000, seed=99)
    for name, least in (("average_precision", 0.87), ("roc_auc", 0.9), ("log_loss", 0.9), ("brier", 0.87)):
        measure, inside = measure_of(name, "two-classes"), 0
        expected = measure.value(truth)
        for seed in range(300):
            estimate = measure.estimate(two_classes(rows=1000, seed=seed))
            inside += estimate.low <= expected <= estimate.high
        assert least <= inside / 300 <= 0.99, name


def test_delong_is_its_definition():
    first, second = two_classes(rows=120, rate=0.2, seed=1, ties=True), two_classes(rows=120, rate=0.2, seed=2)
    second = Outcomes("two-classes", second.predicted, first.label)
    wins = []
    for each in (first, second):
        positive, negative = (each.predicted[first.label == c, 0] for c in (1, 0))
        wins.append((positive[:, None] > negative) + 0.5 * (positive[:, None] == negative))
    above, below = np.cov([w.mean(axis=1) for w in wins]), np.cov([w.mean(axis=0) for w in wins])
    expected = above / wins[0].shape[0] + below / wins[0].shape[1]
    assert delong([first, second]) == pytest.approx(expected, abs=1e-12)


def test_groups_are_sampled_whole():
    outcomes = two_classes(rows=60, groups=np.repeat(np.arange(1, 21), 3).astype(np.uint64))
    weights = resamples(outcomes).reshape(-1, 20, 3)
    assert (weights == weights[:, :, :1]).all()
    assert (weights[:, :, 0].sum(axis=1) == 20).all()


def test_a_drop_is_relative_where_a_measure_has_no_bound():
    label = np.zeros(200)
    better, worse = (Outcomes("number", np.full((200, 1), error), label) for error in (1.0, 1.1))
    assert measure_of("mae", "number").compare(worse, better).drop == pytest.approx(0.1)
    higher = two_classes()
    lower = Outcomes("two-classes", -higher.predicted, higher.label)
    difference = measure_of("roc_auc", "two-classes").compare(lower, higher)
    assert difference.drop == pytest.approx(difference.baseline - difference.candidate)
    assert difference.drop > 10 * difference.error > 0


@pytest.mark.parametrize("name", measures_of("two-classes"))
def test_faded_counts_give_the_measure_of_the_whole_stream(name):
    outcomes, counts = two_classes(rows=50_000), FadedCounts(math.inf)
    for first in range(0, 50_000, 997):
        counts.add(outcomes.where(np.arange(first, min(50_000, first + 997))))
    estimate = counts.estimate(measure_of(name, "two-classes"))

    assert estimate.value == pytest.approx(value(name, outcomes), abs=SKETCHED)
    assert estimate.low <= estimate.value <= estimate.high
    assert estimate.rows == 50_000


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.floats(1.0, 100.0))
def test_events_fade_alike_however_they_are_divided_into_rounds(sizes, half_life):
    outcomes = two_classes(rows=sum(sizes))
    rounds, single = FadedCounts(half_life), FadedCounts(half_life)
    for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        rounds.add(outcomes.where(np.arange(end - size, end)))
    for index in range(len(outcomes)):
        single.add(outcomes.where(np.array([index])))
    assert rounds.state()["at"] == single.state()["at"]
    assert rounds.state()["counts"] == pytest.approx(single.state()["counts"])
    assert rounds.state()["squares"] == pytest.approx(single.state()["squares"])
    again = FadedCounts(half_life)
    again.restore(rounds.state())
    assert again.state() == rounds.state()


@pytest.mark.parametrize("name", ["average_precision", "log_loss", "brier"])
def test_the_interval_of_counts_is_that_of_their_events(name):
    outcomes, counts, measure = two_classes(rows=5000), FadedCounts(np.inf), measure_of(name, "two-classes")
    counts.add(outcomes)
    of_events, of_counts = measure.estimate(outcomes), counts.estimate(measure)
    assert of_counts.high - of_counts.low == pytest.approx(of_events.high - of_events.low, rel=0.02)


def test_faded_counts_follow_a_change():
    good, counts = two_classes(rows=20_000, rate=0.2), FadedCounts(2000)
    bad = Outcomes("two-classes", -good.predicted, good.label)
    measure = measure_of("roc_auc", "two-classes")
    counts.add(good)
    before = counts.estimate(measure).value
    counts.add(bad)
    assert counts.estimate(measure).value == pytest.approx(1 - before, abs=0.02)


@given(st.lists(st.integers(0, 25), min_size=1, max_size=8))
def test_a_window_has_the_newest_events(sizes):
    outcomes = two_classes(rows=sum(sizes), groups=np.arange(sum(sizes)).astype(np.uint64) + 1)
    window = Window("two-classes", 1, (), 20)
    for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        window.add(outcomes.where(np.arange(end - size, end)))
    kept = min(20, len(outcomes))
    assert len(window) == kept
    newest = outcomes.where(np.arange(len(outcomes) - kept, len(outcomes)))
    assert window.outcomes.predicted == pytest.approx(newest.predicted.astype(np.float32))
    assert window.outcomes.label.tolist() == newest.label.tolist()
    assert window.outcomes.group is None if not kept else window.outcomes.group.tolist() == newest.group.tolist()


def test_events_without_a_finite_prediction_are_left_out():
    window, counts = Window("two-classes", 1, (), 20), FadedCounts(10)
    new = Outcomes("two-classes", np.array([[1.0], [np.nan], [np.inf], [2.0]]), np.array([0, 1, 1, 1]))
    window.add(new)
    counts.add(new)
    assert window.outcomes.predicted.tolist() == [[1.0], [2.0]]
    assert sum(counts.state()["counts"]) == pytest.approx(1 + 0.5**0.1)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("auc", "two-classes", '"auc" is no measure of this task, which has average_precision, roc_auc'),
        ("roc_auc", "number", '"roc_auc" is no measure'),
        ("ndcg_10", "two-classes", '"ndcg_10" is no measure'),
        ("top", "classes", '"top" is no measure'),
        ("mae_5", "number", '"mae_5" is no measure'),
        ("recall_at_budget_100", "two-classes", 'the number of the measure "recall_at_budget_100" is not between'),
        ("pinball_0", "number", 'the number of the measure "pinball_0"'),
    ],
)
def test_a_measure_that_the_task_has_not_is_named(name, kind, words):
    with pytest.raises(ValueError, match=words):
        measure_of(name, kind)


@pytest.mark.parametrize(
    ("name", "outcomes"),
    [
        ("average_precision", two_classes(rows=80, rate=0.2)),
        ("average_precision", two_classes(rows=80, rate=0.2, ties=True)),
        ("log_loss", two_classes(rows=80)),
        ("brier", two_classes(rows=80)),
        ("mae", Outcomes("number", np.arange(30.0)[:, None], np.arange(30.0) ** 2)),
    ],
)
def test_the_influence_of_an_event_is_the_derivative_by_its_weight(name, outcomes):
    measure, step = measure_of(name, outcomes.kind), 1e-6
    for weights in (np.ones(len(outcomes)), np.linspace(0.5, 2.0, len(outcomes))):
        around = [
            [measure.value(outcomes, weights + sign * step * row) for sign in (1, -1)] for row in np.diag(weights)
        ]
        derivatives = np.subtract(*np.transpose(around)) / (2 * step) / weights
        assert measure.influence(outcomes, weights) == pytest.approx(derivatives, abs=1e-7)
