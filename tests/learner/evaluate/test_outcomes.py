"""Outcomes of outputs, and what the stream's monitor makes of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.baselines import Baselines
from anabranch.learner.evaluate.measures import Outcomes, measure_of, probability_of
from anabranch.learner.evaluate.outcomes import (
    Estimates,
    StreamOutcomes,
    TaskMeasures,
    kind_of,
    log_probabilities,
    predicted_by,
    predictions_of,
)
from anabranch.learner.evaluate.stream_monitor import Scored, StreamMonitor, scored
from anabranch.learner.model.answer_rule import AnswerRule, Calibration
from anabranch.learner.model.answers import Answers
from anabranch.learner.model.task import Classification, MultiLabel, Regression, TaskMeasure, TokenClassification
from anabranch.learner.settings.learner import LearnerSettings

SCHEMA = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}})
)

NONE_RIGHT = [0.0] * len(Baselines(SCHEMA).names)
"""The scores of baselines."""


def test_a_task_has_the_measures_of_its_kind():
    assert kind_of(Classification(), 2) == "two-classes"
    assert kind_of(Classification(), 10) == "classes"
    assert kind_of(MultiLabel(), 10) == "labels"
    assert kind_of(MultiLabel(), 1000) is None
    assert kind_of(Regression(), None) == "number"
    assert kind_of(TokenClassification(), 5) is None
    assert kind_of(object(), 2) is None


def test_outcomes_of_two_classes_are_log_odds():
    output = torch.randn(50, 2, dtype=torch.float16)
    odds = predicted_by("two-classes", output, torch.zeros(50)).numpy()[:, 0]
    assert probability_of(odds) == pytest.approx(output.float().softmax(1)[:, 1].numpy(), abs=1e-6)


def test_outcomes_of_classes_are_those_of_their_definition():
    output, label = torch.randn(200, 7), torch.randint(7, (200,))
    predicted = predicted_by("classes", output, label).numpy()
    p = output.softmax(1).numpy()
    rows = np.arange(200)
    assert predicted[:, 0].tolist() == p.argmax(1).tolist()
    assert predicted[:, 1] == pytest.approx(p.max(1), abs=1e-6)
    assert predicted[:, 2] == pytest.approx(np.log(p[rows, label]), abs=1e-5)
    assert predicted[:, 3].tolist() == (p > p[rows, label][:, None]).sum(1).tolist()
    assert predicted_by("classes", torch.zeros(1, 7), torch.tensor([3])).numpy()[0, 3] == 6, "ties are less likely"


def test_measures_are_of_answers_and_what_is_kept_is_of_the_model():
    stream, task = StreamOutcomes(keep=True), Classification()
    output, label = torch.randn(12_000, 2), np.random.default_rng(0).integers(2, size=12_000)
    for begin in range(0, 12_000, 500):
        if begin == 11_000:
            stream.answers = Answers(AnswerRule(Calibration("platt", 1, bias=[0.0, 3.0])), 2)
        stream.add(predictions_of(task, [output[begin : begin + 500]], label[begin : begin + 500]))
    log_NC, label_N = log_probabilities(stream.recent or ())
    assert label_N.tolist() == label[2000:].tolist()
    assert log_NC == pytest.approx(output[2000:].log_softmax(1).numpy(), abs=1e-6)
    assert stream.newest is not None
    odds = (output[7000:, 1] - output[7000:, 0]).numpy()
    odds[4000:] += 3
    assert stream.newest.predicted[:, 0] == pytest.approx(odds, abs=1e-5)
    assert StreamOutcomes().recent is None
    wide = StreamOutcomes(keep=True)
    for _ in range(3):
        wide.add(predictions_of(task, [torch.zeros(1000, 1000)], np.zeros(1000, np.int64)))
    assert len(wide.recent or ()) == 3, "those of 2,097 events are kept, in whole batches"


@pytest.mark.parametrize("sizes", [[1] * 30, [64] * 30, [700, 1, 3000, 2500]])
def test_the_window_has_the_newest_events_however_they_are_added(sizes):
    stream, task = StreamOutcomes(), Classification()
    output, label = torch.randn(sum(sizes), 2), np.random.default_rng(0).integers(2, size=sum(sizes))
    for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
        stream.add(predictions_of(task, [output[end - size : end]], label[end - size : end]))
    measure = measure_of("roc_auc", "two-classes")
    kept = slice(-5000, None)
    odds = (output[kept, 1] - output[kept, 0]).numpy()
    positive, negative = odds[label[kept] == 1], odds[label[kept] == 0]
    expected = (positive[:, None] > negative).mean()
    estimate = stream.estimate("now", measure)
    assert estimate.value == pytest.approx(expected, abs=1e-6)
    assert estimate.rows == min(5000, sum(sizes))
    if sum(sizes) <= 5000:
        assert stream.estimate("faded", measure).value == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("read_after", [(), (1, 2, 40)])
def test_predictions_that_have_left_the_window_before_it_is_read_are_never_computed(read_after):
    stream, task, generator = StreamOutcomes(), Classification(), np.random.default_rng(0)
    sizes = [*generator.integers(1, 500, 60).tolist(), 6000, 3, 4999]
    output, label = torch.randn(sum(sizes), 3), generator.integers(3, size=sum(sizes))
    end = 0
    for number, size in enumerate(sizes):
        begin, end = end, end + size
        stream.add(predictions_of(task, [output[begin:end]], label[begin:end]))
        waiting = sum(len(each.label_B) for each in stream._waiting)
        assert waiting - len(stream._waiting[0].label_B) < 5000
        if number in read_after:
            assert len(stream.newest) == min(5000, end)
    kept = slice(end - 5000, end)
    expected = predicted_by("classes", output[kept], torch.from_numpy(label[kept]))
    assert stream.newest.predicted == pytest.approx(expected.numpy(), abs=1e-6)
    assert stream.newest.label.tolist() == label[kept].tolist()


def test_with_many_labels_the_window_is_shorter_so_that_estimates_take_no_longer():
    stream, random = StreamOutcomes(), np.random.default_rng(0)
    label = random.random((1000, 200)) < 0.1
    stream.add(predictions_of(MultiLabel(), [torch.from_numpy(random.standard_normal((1000, 200)))], label))
    assert len(stream.newest) == 500
    assert stream.newest.label.tolist() == label[-500:].tolist()


def test_late_labels_count_when_they_come_for_the_prediction_from_before():
    monitor, task = StreamMonitor(LearnerSettings(), SCHEMA), Classification()
    output = torch.randn(40, 2).numpy()
    label = np.arange(40) % 2
    early, late = (scored(task, output[part], label[part]) for part in (slice(0, 10), slice(10, 40)))
    monitor.observe(1, replace(early + late, baselines=NONE_RIGHT), None)
    measure = measure_of("log_loss", "two-classes")
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(output), torch.from_numpy(label)).item()
    assert monitor.outcomes.estimate("now", measure).value == pytest.approx(loss, abs=1e-5)
    again = StreamMonitor(LearnerSettings(), SCHEMA)
    again.restore(monitor.state())
    assert again.outcomes.estimate("now", measure) is None, "the window begins again"
    assert again.outcomes.estimate("faded", measure) == monitor.outcomes.estimate("faded", measure)


def test_predictions_that_wait_take_bounded_memory():
    stream = StreamOutcomes()
    for _ in range(10):
        wide = torch.zeros(4, 100_000)
        stream.add(predictions_of(Classification(), [wide], np.zeros(4, np.int64)))
        assert sum(output.nbytes for each in stream._waiting for output in each.outputs) < 8 << 20


def test_scores_without_predictions_have_no_measures():
    monitor = StreamMonitor(LearnerSettings(), SCHEMA)
    monitor.observe(1, Scored(10, 5.0, 5.0, NONE_RIGHT), None)
    assert monitor.outcomes.estimate("now", measure_of("ece", "two-classes")) is None
    assert monitor.outcomes.estimate("faded", measure_of("ece", "two-classes")) is None


def test_estimates_are_renewed_one_after_the_other_within_their_share(monkeypatch):
    clock, used = [100.0], [0.0]
    monkeypatch.setattr("anabranch.learner.evaluate.outcomes.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("anabranch.learner.evaluate.outcomes.time.thread_time", lambda: used[0])
    measures = [measure_of(name, "two-classes") for name in ("roc_auc", "ece", "brier")]
    estimates, renewed = Estimates(["now"], measures), []

    def estimate(window, measure):
        renewed.append((window, measure.name))
        used[0] += 0.01

    for _ in range(1000):
        estimates.renew(estimate)
        clock[0] += 0.04
    assert len(renewed) == pytest.approx(5, abs=1), "0.01 s each in 40 s are an 800th of the time"
    assert renewed[:4] == [("now", "roc_auc"), ("now", "ece"), ("now", "brier"), ("now", "roc_auc")]
    assert estimates.now == {}


def test_windows_that_come_and_go_leave_each_its_turn_and_the_share_what_it_is(monkeypatch):
    clock, used = [100.0], [0.0]
    monkeypatch.setattr("anabranch.learner.evaluate.outcomes.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("anabranch.learner.evaluate.outcomes.time.thread_time", lambda: used[0])
    measures = [measure_of(name, "two-classes") for name in ("roc_auc", "ece", "brier")]
    estimates, renewed = Estimates((), measures, 50), []

    def estimate(window, measure):
        renewed.append((window, measure.name))
        used[0] += 0.02
        return measure.estimate(outcomes_of(50))

    for version in range(100):  # one a second, of which the newest eight are followed
        estimates.follow([*map(str, range(max(0, version - 7), version + 1)), "all"])
        for _ in range(4):
            estimates.renew(estimate)
            clock[0] += 0.25
    assert len(renewed) == pytest.approx(100, abs=5), "0.02 s each are a 50th of the time"
    assert {name for window, name in renewed if window == "all"} == {"roc_auc", "ece", "brier"}
    assert {window for _, window in estimates.now} <= {"all", *map(str, range(92, 100))}


class Priced(Classification):
    """Measures what missed and false alarms cost."""

    def __init__(self, of, name="cost", **more):
        self.measures = [TaskMeasure(name, of, **more)]


def cost_of(probability_N, label_N):
    """The mean cost of decisions at 0.3: 5 for each 1 that is missed, 1 for each false alarm."""
    alarm_N = probability_N > 0.3
    return float((5 * ((label_N == 1) & ~alarm_N) + ((label_N == 0) & alarm_N)).mean())


def outcomes_of(rows=400, seed=1, shift=0.0, groups=None):
    random = np.random.default_rng(seed)
    odds = random.normal(size=rows)
    label = (random.random(rows) < probability_of(odds)).astype(np.int64)
    return Outcomes("two-classes", (odds + shift)[:, None].astype(np.float32), label, groups)


def test_a_measure_of_ones_own_is_what_numpy_says():
    known = TaskMeasures.of(Priced(cost_of, higher=False), SCHEMA, ["cost"])
    measure, outcomes = known.each["cost"], outcomes_of()
    odds, label = outcomes.predicted[:, 0].astype(float), outcomes.label
    costs = np.where(label == 1, 5.0 * (odds <= np.log(0.3 / 0.7)), odds > np.log(0.3 / 0.7))
    assert known.values(outcomes)["cost"] == pytest.approx(costs.mean())
    assert known.warning is None
    estimate = measure.estimate(outcomes)
    assert estimate.low < estimate.value < estimate.high
    assert estimate.high - estimate.low == pytest.approx(3.92 * costs.std() / np.sqrt(400), rel=0.35)
    assert estimate.constant == pytest.approx((label == 0).mean() if label.mean() > 0.3 else 5 * label.mean())
    assert measure.estimate_of_counts(outcomes, np.ones(400), 1.0) is None, "events have no fractions there"


def test_versions_are_compared_in_pairs_by_a_measure_of_ones_own():
    measure = TaskMeasures.of(Priced(cost_of, higher=False), SCHEMA).each["cost"]
    served, worse = outcomes_of(4000), outcomes_of(4000, shift=2.5)
    same = measure.compare(served, served)
    assert (same.drop, same.error) == (0.0, 0.0)
    costs = [
        np.array(
            [cost_of(p[None], y[None]) for p, y in zip(probability_of(each.predicted[:, 0]), each.label, strict=True)]
        )
        for each in (worse, served)
    ]
    found = measure.compare(worse, served)
    assert found.drop == pytest.approx((costs[0] - costs[1]).mean())
    assert found.error == pytest.approx((costs[0] - costs[1]).std() / np.sqrt(4000), rel=0.3)


def boom(probability_N, label_N):
    raise ZeroDivisionError("of\nmine")


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (boom, 'the measure "cost" of model.task raised ZeroDivisionError: of mine, on 400 events'),
        (lambda p, y: float("nan"), 'the measure "cost" of model.task returned nan, on 400 events'),
        (lambda p, y: p, 'the measure "cost" of model.task raised TypeError: '),
        (lambda p: 0.0, 'the measure "cost" of model.task raised TypeError: '),
    ],
)
def test_a_measure_of_ones_own_that_raises_or_is_not_defined_is_one_sentence(of, words, caplog):
    known = TaskMeasures.of(Priced(of), SCHEMA)
    outcomes = outcomes_of()
    for _ in range(2):
        assert "cost" not in known.values(outcomes)
        assert "log_loss" in known.values(outcomes)
        assert known.warning.startswith(words)
        assert "\n" not in known.warning
    assert len(caplog.records) == 1
    assert known.each["cost"].estimate(outcomes) is None
    assert known.each["cost"].compare(outcomes, outcomes) is None


def test_a_measure_of_ones_own_may_write_into_what_it_gets_and_fail_on_some_resamples():
    def of(probability_N, label_N):
        if probability_N.max() < largest:
            raise ValueError
        probability_N[:], label_N[:] = 0.0, 0
        return 1.0

    outcomes = outcomes_of()
    before, largest = outcomes.predicted.copy(), float(probability_of(outcomes.predicted[:, 0]).max())
    known = TaskMeasures.of(Priced(of), SCHEMA)
    assert known.values(outcomes)["cost"] == 1.0
    assert (outcomes.predicted == before).all()
    assert outcomes.label.any()
    assert known.each["cost"].estimate(outcomes).low == 1.0


@pytest.mark.parametrize(
    ("task", "output", "label", "dtype", "shape"),
    [
        (Classification, torch.randn(20, 3), np.arange(20) % 3, np.int64, (20,)),
        (Regression, torch.randn(20, 1), np.arange(20, dtype=np.float32), np.float64, (20,)),
        (MultiLabel, torch.randn(20, 3), np.ones((20, 3), np.bool_), np.float64, (20, 3)),
    ],
)
def test_what_a_measure_of_ones_own_gets(task, output, label, dtype, shape):
    got = []

    class Own(task):
        measures = (TaskMeasure("of_mine", lambda *arrays: got.append(arrays) or 0.5),)

    classes = None if task is Regression else 3
    given = (
        {"name": "y", "classes": classes, "multi": task is MultiLabel} if classes else {"name": "y", "dtype": "float32"}
    )
    schema = Schema(SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": given}))
    known = TaskMeasures.of(Own(), schema)
    predicted = predicted_by(known.kind, output, torch.from_numpy(label)).numpy()
    assert known.values(Outcomes(known.kind, predicted, label))["of_mine"] == 0.5
    (prediction_N, label_N), *_ = got
    assert (prediction_N.dtype, prediction_N.shape, label_N.dtype) == (dtype, shape, label.dtype)
    answered = Own().predict(output)
    expected = answered["probabilities" if task is MultiLabel else "prediction"].numpy()
    assert prediction_N == pytest.approx(expected, abs=1e-6)
    assert (label_N == label).all()


@pytest.mark.parametrize(
    ("measures", "words"),
    [
        ([cost_of], "measures of the task has to be a list of TaskMeasure"),
        (list, "measures of the task has to be a list of TaskMeasure"),
        ([TaskMeasure("roc_auc", cost_of)], "'roc_auc' is no name for a measure, or it is taken"),
        ([TaskMeasure("recall_at_budget_7", cost_of)], "'recall_at_budget_7' is no name"),
        ([TaskMeasure("old", cost_of)], "'old' is no name"),
        ([TaskMeasure("My measure", cost_of)], "'My measure' is no name"),
        ([TaskMeasure("cost", cost_of)] * 2, 'two measures of the task are called "cost"'),
    ],
)
def test_what_cannot_be_a_measure_of_ones_own_is_refused_in_one_sentence(measures, words):
    task = Classification()
    task.measures = measures
    with pytest.raises(SettingsError, match=words) as caught:
        TaskMeasures.of(task, SCHEMA)
    assert str(caught.value).startswith("model.task: ")
    assert "\n" not in str(caught.value)


def test_measures_of_a_task_without_known_predictions_are_refused():
    task = TokenClassification()
    task.measures = [TaskMeasure("cost", cost_of)]
    with pytest.raises(SettingsError, match='derive it from "classification", "multilabel" or "regression"'):
        TaskMeasures.of(task, SCHEMA)


def test_the_measures_that_a_task_has_are_named_with_ones_own():
    with pytest.raises(
        SettingsError, match=r'"costs" is no measure of this task, which has .*recall_at_budget_1, cost$'
    ):
        TaskMeasures.of(Priced(cost_of), SCHEMA, ["costs"])
