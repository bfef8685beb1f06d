"""Verdicts by slices: on versions that are worse in one country alone, and on those that are as good."""

import io
import math
from datetime import timedelta

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from rich.console import Console
from torch import nn

from anabranch.commands.versions.show import Listed, render_one
from anabranch.core.errors import SettingsError
from anabranch.core.shutdown import Deadline
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.holdout import YOUNG, HoldoutSet
from anabranch.learner.evaluate.measures import Outcomes, measure_of
from anabranch.learner.evaluate.scoring import Scorer
from anabranch.learner.evaluate.slices import Slices
from anabranch.learner.model.task import Classification, TaskMeasure
from anabranch.learner.settings.learner import GateSettings, VersionsSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.stream.record_times import RecordTimes
from anabranch.learner.stream.trained_through import PartitionProgress
from anabranch.learner.versions.format import Versions, reference_to
from anabranch.learner.versions.gate import QualityGate
from anabranch.learner.versions.publisher import Publisher, Snapshot, VersionWriter
from anabranch.learner.versions.verdict import GateInput, judge

ROWS = 4000
COUNTRIES = [f"C{number}" for number in range(1, 25)]
SCHEMA = Schema(
    SchemaSettings.model_validate(
        {
            "features": {
                "country": {"dtype": "string", "encode": {"vocab": COUNTRIES}},
                "amount": {"dtype": "float32"},
            },
            "label": {"name": "y", "classes": 2},
        }
    )
)
NAMES = ("country", "amount")


class Shops:
    """Held-out events of countries, of which the first have the most, and versions that are right so often."""

    def __init__(self, seed, rows=ROWS):
        self.random = np.random.default_rng(seed)
        self.country = np.minimum(self.random.geometric(0.15, rows), len(COUNTRIES))
        self.columns = {
            "feature.country": self.country,
            "feature.amount": self.random.normal(size=rows).astype(np.float32),
            "label": (self.random.random(rows) < 0.3).astype(np.int64),
        }

    def right(self, share, where=None, share_there=0.0):
        """Whether a version is right for each event: for a share of them, and for another share of a country's."""
        shares = np.where(self.country == where, share_there, share)
        return (self.random.random(len(shares)) < shares).astype(float)

    def verdict(self, candidate, served, names=NAMES, measures=(), outcomes=None, **more):
        new = np.arange(len(candidate)) >= len(candidate) - len(candidate) // YOUNG
        slices, settings = Slices(names, SCHEMA).of(self.columns), GateSettings(slices=names)
        inputs = GateInput(
            candidate,
            served,
            None,
            new,
            ~new,
            {},
            measures=measures,
            outcomes=outcomes or {},
            label=self.columns["label"],
            slices=slices,
            **more,
        )
        return judge(inputs, settings, bounded=True)


def by_slices(verdict):
    return [reason for reason in verdict.reasons if " where " in reason]


def failed(count, version):
    """Return how many of so many verdicts fail for a slice; `version` makes the candidate's scores of the served."""
    fails = 0
    for seed in range(count):
        shops = Shops(seed)
        served = shops.right(0.9)
        fails += bool(by_slices(shops.verdict(version(shops, served), served)))
    return fails


@pytest.mark.slow
@pytest.mark.parametrize("differ", [0.05, 1.0])
def test_of_1000_versions_that_are_as_good_hardly_one_fails_for_a_slice(differ):
    """They differ in a part of the events; the bound is for slices of any size, so that the true rate is lower."""

    def as_good(shops, served):
        return np.where(shops.random.random(len(served)) < differ, shops.right(0.9), served)

    assert failed(1000, as_good) <= 5


def test_a_version_that_is_worse_in_one_country_alone_fails():
    shops = Shops(1)
    served = shops.right(0.95)
    worse = np.where(shops.country == 10, shops.right(0.7), served)
    without = shops.verdict(worse, served, names=())
    assert without.verdict != "fail", "the drop is too small on all events"
    verdict = shops.verdict(worse, served)
    rows, drop = int((shops.country == 10).sum()), float((served - worse)[shops.country == 10].mean())
    assert verdict.verdict == "fail"
    (reason,) = verdict.reasons
    assert reason.startswith(f"worse than the served version where country = C10: {drop:.4f} (at most ")
    compared = sum(each.compared for each in verdict.slices.values())
    assert f"{rows} events), of 0.02 that are allowed; in {compared} comparisons of slices, of which 1 fail" in reason
    assert "versions that are as good fail in 0.5% of verdicts at most" in reason
    report = verdict.slices["country = C10"]
    assert (report.rows, report.compared, report.worse) == (rows, True, True)
    assert (report.accuracy, report.drop) == (worse[shops.country == 10].mean(), pytest.approx(drop))
    assert [name for name, each in verdict.slices.items() if each.worse] == ["country = C10"]


@pytest.mark.slow
def test_nearly_all_versions_that_are_worse_in_one_country_fail():
    assert failed(200, lambda shops, served: np.where(shops.country == 3, shops.right(0.75), served)) >= 195


def test_slices_with_too_few_events_are_named_and_fail_no_version():
    shops = Shops(2, rows=1500)
    served = np.ones(1500)
    least = min(
        (each for each in range(1, 20) if (shops.country == each).any()), key=lambda c: (shops.country == c).sum()
    )
    verdict = shops.verdict(np.where(shops.country == least, 0.0, served), served, names=("country",))
    assert not by_slices(verdict)
    report = verdict.slices[f"country = C{least}"]
    assert (report.rows < 50, report.compared, report.drop, report.accuracy) == (True, False, None, 0.0)
    assert report.words().endswith("not compared")


def test_a_drop_that_is_certain_and_allowed_fails_no_version():
    shops = Shops(3, rows=40_000)
    served = np.ones(40_000)
    first = np.flatnonzero(shops.country == 1)
    candidate = served.copy()
    candidate[first[::100]] = 0.0
    assert not by_slices(shops.verdict(candidate, served)), "one of a hundred, and two are allowed"
    candidate[first[::25]] = 0.0
    assert by_slices(shops.verdict(candidate, served))


def test_the_served_version_itself_and_a_better_one_pass():
    shops = Shops(4)
    served = shops.right(0.9)
    for candidate in (served, np.ones(ROWS)):
        verdict = shops.verdict(candidate, served)
        assert (verdict.verdict, verdict.reasons) == ("pass", [])
        assert all((each.drop or 0.0) <= 0 for each in verdict.slices.values())


def test_measures_are_compared_in_each_slice():
    """The version ranks by chance in one country, where the accuracy of both is that of always answering 0."""
    shops = Shops(5)
    label = shops.columns["label"] = (shops.random.random(ROWS) < 0.15).astype(np.int64)
    odds = 3 * label + shops.random.normal(size=ROWS) - 8
    worse = np.where(shops.country == 2, shops.random.normal(size=ROWS) - 8, odds)
    right = (label == 0).astype(float)
    outcomes = {
        name: Outcomes("two-classes", each[:, None], label) for name, each in (("candidate", worse), ("served", odds))
    }
    measures = [(measure_of("average_precision", "two-classes"), 0.2)]
    verdict = shops.verdict(right, right, measures=measures, outcomes=outcomes)
    (reason,) = by_slices(verdict)
    assert reason.startswith("worse than the served version where country = C2 by average_precision: 0.")
    report = verdict.slices["country = C2"]
    marks = shops.country == 2
    expected = measures[0][0].value(outcomes["candidate"].where(marks))
    assert report.measures == {"average_precision": pytest.approx(expected)}
    assert verdict.slices["country = C9"].measures == {}, "it has too few positives"


def test_events_that_came_while_nothing_passed_are_not_compared():
    shops = Shops(6)
    served = shops.right(0.95)
    new = np.arange(ROWS) >= ROWS - ROWS // YOUNG
    candidate = np.where((shops.country == 1) & ~new, 0.0, served)
    inputs = {"label": shops.columns["label"], "slices": Slices(["country"], SCHEMA).of(shops.columns)}
    held = GateInput(candidate, served, None, new, np.zeros(ROWS, np.bool_), {}, held=True, **inputs)
    assert not by_slices(judge(held, GateSettings(slices=NAMES), bounded=True))


@pytest.mark.parametrize("served", [None, np.ones(100)])
def test_without_a_verdict_slices_have_their_score(served):
    shops = Shops(7, rows=100)
    verdict = shops.verdict(np.ones(100), served)
    assert verdict.verdict == "inconclusive"
    assert sum(each.rows for name, each in verdict.slices.items() if name.startswith("country")) == 100
    assert not any(each.compared for each in verdict.slices.values())


def test_errors_of_a_regression_are_compared_as_fractions():
    shops = Shops(8)
    served = -np.abs(shops.random.normal(size=ROWS))
    worse = np.where(shops.country == 1, 1.5 * served, served)
    shops.columns["label"] = shops.random.normal(size=ROWS).astype(np.float32)
    slices = Slices(NAMES, SCHEMA).of(shops.columns)
    new = np.arange(ROWS) >= ROWS - ROWS // YOUNG
    inputs = GateInput(worse, served, None, new, ~new, {}, label=shops.columns["label"], slices=slices)
    verdict = judge(inputs, GateSettings(slices=NAMES), bounded=False)
    report = verdict.slices["country = C1"]
    assert any("country = C1: 4" in reason or "country = C1: 5" in reason for reason in verdict.reasons)
    assert report.worse
    assert report.error == pytest.approx(float(np.abs(worse[shops.country == 1]).mean()), rel=0.05)
    assert report.constant is not None
    assert math.isfinite(report.upper)


class ByCountry(nn.Module):
    """Answers by the country alone."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Embedding(len(COUNTRIES) + 1, 2)

    def forward(self, country, amount):
        return self.logits(country) + 0 * amount[:, None]


def right_in(wrong=()):
    """Return weights that answer 1 in countries of odd numbers, where events have it, and fail in others."""
    answer = np.arange(len(COUNTRIES) + 1) % 2
    answer[list(wrong)] = 1 - answer[list(wrong)]
    return {"logits.weight": 5 * nn.functional.one_hot(torch.from_numpy(answer)).float()}


class Published:
    """A publisher, and held-out events of all countries."""

    def __init__(self, path, names=("country",), task=None, **gate):
        self.versions, self.holdout, self.step = Versions(path), HoldoutSet(SCHEMA, 2000, 1), 0
        settings = GateSettings.model_validate({"slices": list(names), "min_rows": 100, **gate})
        named = () if settings.measures == "auto" else settings.measures
        scorer = Scorer(ByCountry(), task or Classification(), SCHEMA, torch.device("cpu"), measures=named)
        reference = reference_to(ModelSettings(factory="m:build"))
        writer = VersionWriter(self.versions, reference, SCHEMA, 1)
        verdicts = LearnerMetrics(CollectorRegistry()).gate_verdicts
        gate = QualityGate(self.versions, settings, scorer, reference)
        self.publisher = Publisher(writer, gate, VersionsSettings(), verdicts)
        columns, shops = fake_columns(SCHEMA, range(2000)), Shops(9, rows=2000)
        columns |= shops.columns | {"label": shops.country % 2}
        self.holdout.add(columns, [TopicPartition("shops", 0)])

    def publish(self, weights, holdout=None):
        self.step += 1
        rows = (holdout or self.holdout).held
        progress = {"shops:0": PartitionProgress(self.step)}
        snapshot = Snapshot(self.step, weights, progress, rows, None, RecordTimes())
        self.publisher.publish_last((self.step, ()), lambda: snapshot, Deadline(timedelta(seconds=60)))
        found = self.versions.verdict(self.publisher.number)
        assert found is not None
        return found


def screen_of(published):
    versions, number = published.versions, published.publisher.number
    one = Listed(number, versions.manifest(number), versions.verdict(number), 1, [], None)
    console = Console(file=io.StringIO(), width=300)
    console.print(render_one(one))
    return console.file.getvalue()


def test_what_is_published_has_its_slices_on_disk_and_on_the_screen(tmp_path):
    published = Published(tmp_path)
    assert published.publish(right_in()).verdict == "inconclusive"
    assert published.publish(right_in()).verdict == "pass"
    verdict = published.publish(right_in([9]))
    assert verdict.verdict == "fail"
    assert published.publisher.slices == verdict.slices
    assert published.publish(right_in()).verdict == "pass"
    published.publish(right_in([9]))
    screen = screen_of(published)
    line = next(line for line in screen.splitlines() if line.startswith("slices"))
    assert "country = C9 0.0% of " in line
    assert "one answer has 100.0%, worse than the served version by 1.0000" in line
    assert f"where country = C9: {1:.4f} (at most" in screen


def test_erased_events_are_in_no_slice_and_a_restored_holdout_set_has_the_same_slices(tmp_path):
    published = Published(tmp_path, names=NAMES)
    before = published.publish(right_in()).slices
    restored = HoldoutSet(SCHEMA, 2000, 1)
    restored.restore(published.holdout.tensors())
    assert published.publish(right_in(), restored).slices.keys() == before.keys()
    rows = {name: each.rows for name, each in published.publisher.slices.items()}
    assert rows == {name: each.rows for name, each in before.items()}
    columns = restored.held.columns
    restored.remove(columns["hash"].astype(np.uint64)[columns["feature.country"] == 3])
    after = published.publish(right_in(), restored)
    assert "country = C3" in before
    assert "country = C3" not in after.slices
    assert after.verdict == "pass"


def test_a_learner_does_not_start_with_a_slice_of_no_feature(tmp_path):
    with pytest.raises(
        SettingsError, match=r'^gate.slices: "town" is no feature of \[schema.features\]; write one of '
    ):
        Published(tmp_path, names=["town"])


class Own(Classification):
    measures = (TaskMeasure("right", lambda probability, label: ((probability > 0.5) == label).mean()),)


def test_a_measure_of_ones_own_is_in_the_manifest_and_judges(tmp_path):
    published = Published(tmp_path, task=Own(), measures={"right": 0.01})
    published.publish(right_in())
    manifest = published.versions.manifest(published.publisher.number)
    assert (manifest.measure, manifest.metrics["right"]) == ("right", 1.0)
    constant = (published.holdout.held.columns["label"] == 1).mean()
    assert manifest.constant["right"] == pytest.approx(max(constant, 1 - constant))
    verdict = published.publish(right_in([9]))
    assert verdict.verdict == "fail"
    assert verdict.numbers["right"] < 1.0
    assert "worse than the served version by right: 0." in verdict.reasons[2]
    assert verdict.slices["country = C9"].worse
    assert "judged by  right" in screen_of(published)


def test_a_measure_of_ones_own_that_raises_is_a_warning_and_versions_are_published(tmp_path):
    task = Classification()
    task.measures = [TaskMeasure("odd", lambda probability, label: label[len(label)])]
    published = Published(tmp_path, task=task, measures={"odd": 0.01})
    published.publish(right_in())
    verdict = published.publish(right_in())
    assert verdict.reasons[0] == "odd is not defined on these held-out events"
    warning = published.publisher.gate.scorer.measures.warning
    assert warning.startswith('the measure "odd" of model.task raised IndexError: index 2000 is out of bounds')
    assert "odd" not in published.versions.manifest(published.publisher.number).metrics
