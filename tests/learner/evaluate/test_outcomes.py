"""Outcomes of outputs, and what the stream's monitor makes of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.baselines import Baselines
from anabranch.learner.evaluate.measures import measure_of, probability_of
from anabranch.learner.evaluate.outcomes import (
    Estimates,
    StreamOutcomes,
    kind_of,
    log_probabilities,
    predicted_by,
    predictions_of,
)
from anabranch.learner.evaluate.stream_monitor import Scored, StreamMonitor, scored
from anabranch.learner.model.answer_rule import AnswerRule, Calibration
from anabranch.learner.model.answers import Answers
from anabranch.learner.model.task import Classification, MultiLabel, Regression, TokenClassification
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
    estimates, renewed = Estimates({"now": measures}), []

    def estimate(window, measure):
        renewed.append((window, measure.name))
        used[0] += 0.01

    for _ in range(1000):
        estimates.renew(estimate)
        clock[0] += 0.04
    assert len(renewed) == pytest.approx(5, abs=1), "0.01 s each in 40 s are an 800th of the time"
    assert renewed[:4] == [("now", "roc_auc"), ("now", "ece"), ("now", "brier"), ("now", "roc_auc")]
    assert estimates.now == {}
