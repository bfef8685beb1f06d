"""A stream of payments of which six in a thousand are fraud: what its status says of a model, and of a constant one."""

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from anabranch.commands.status import Status, render
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.measures import Outcomes, measure_of
from anabranch.learner.evaluate.outcomes import class_counts
from anabranch.learner.evaluate.stream_monitor import Scored, StreamMonitor
from anabranch.learner.loop.reporter import Reporter
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.status.report import LearnerReport

PAYMENTS, ROUND, NEWEST = 120_000, 512, 5000
PAYMENT = {"features": {"amount": {"dtype": "float32"}}, "label": {"name": "fraud", "classes": 2}}
SCHEMA = Schema(SchemaSettings.model_validate(PAYMENT))


@pytest.fixture(scope="module")
def payments():
    """The risk that a model may know, and whether each payment is fraud: ROC AUC 0.85 can be reached."""
    random = np.random.default_rng(7)
    risk = random.normal(size=PAYMENTS)
    noise = random.logistic(size=PAYMENTS)
    score = 1.45 * risk + noise
    return risk, (score > np.quantile(score, 0.994)).astype(np.int64)


def status_of(risk, fraud, threshold):
    """Return the screen and the report of a model that answers 1 above a threshold of the risk."""
    monitor, answer = StreamMonitor(LearnerSettings(), SCHEMA), (risk > threshold).astype(np.int64)
    groups = np.zeros(PAYMENTS, np.uint64)
    for begin in range(0, PAYMENTS, ROUND):
        part = slice(begin, begin + ROUND)
        right, rules = float((answer[part] == fraud[part]).sum()), monitor.baselines.add(fraud[part], groups[part])
        monitor.observe(begin, Scored(len(fraud[part]), right, 0.0, rules), None)
    newest = Outcomes("two-classes", (risk - threshold)[-NEWEST:, None], fraud[-NEWEST:])
    # The reporter's own, without the rest of a learner.
    reporter: Any = SimpleNamespace(
        _loop=SimpleNamespace(monitor=SimpleNamespace(**vars(monitor) | {"outcomes": SimpleNamespace(newest=newest)})),
        _parts=SimpleNamespace(
            publisher=SimpleNamespace(
                scoring=SimpleNamespace(evaluation=SimpleNamespace(constant={})),
                gate=SimpleNamespace(scorer=SimpleNamespace(schema=SCHEMA)),
            )
        ),
    )
    report = LearnerReport(
        pid=1,
        generation=1,
        started=0.0,
        time=1.0,
        steps=PAYMENTS // ROUND,
        accuracy=monitor.prequential.score.windows,
        baselines=Reporter._baselines(reporter),
        newest_classes=Reporter._classes(reporter),
    )
    console = Console(file=io.StringIO(), width=400)
    console.print(render(Status("payments", "var", 1.0, report, None)))
    text: Any = console.file
    return text.getvalue(), report


def test_status_names_what_always_answering_no_has_and_how_many_frauds_were_found(payments):
    risk, fraud = payments
    outcomes = Outcomes("two-classes", risk[:, None], fraud)
    assert measure_of("roc_auc", "two-classes").value(outcomes) == pytest.approx(0.85, abs=0.02)
    shown, report = status_of(risk, fraud, np.quantile(risk, 0.998))
    frauds = int(fraud[-NEWEST:].sum())
    found = report.newest_classes["1"]
    assert (found.support, found.answered) == (frauds, int((risk[-NEWEST:] > np.quantile(risk, 0.998)).sum()))
    assert 0 < found.found < 5, "nearly none, as the accuracy does not show"
    assert report.accuracy["overall"] > 0.99
    assert f"1: {found.found:,} of the newest {frauds} found" in shown
    assert "always answering 0: now 99.4%, overall 99.4%" in shown
    assert report.baselines["constant"].comparison.startswith("worse than always answering 0 by 0.")
    assert report.baselines["constant"].worse


def test_a_model_that_always_says_no_is_named_as_no_better_than_that(payments):
    shown, report = status_of(*payments, threshold=np.inf)
    assert "now the model is no better than always answering 0" in shown
    assert "0 of the newest" in shown
    assert "never answered" in shown
    assert not report.baselines["constant"].worse


def test_of_many_classes_each_has_its_counts():
    predicted = np.array([[2, 0.9, -0.1, 0], [0, 0.5, -1.0, 1], [2, 0.8, -0.2, 0]])
    counts = class_counts(Outcomes("classes", predicted, np.array([2, 1, 0])), 3)
    assert counts is not None
    assert counts.tolist() == [[1, 0, 1], [1, 0, 0], [1, 1, 2]]
    assert class_counts(Outcomes("number", predicted[:, :1], np.zeros(3)), 3) is None
