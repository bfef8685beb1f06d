"""Verdicts by measures: between versions whose accuracy is the same."""

import numpy as np
import pytest
import torch

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.holdout import YOUNG, HoldoutRows, HoldoutSet
from anabranch.learner.evaluate.measures import Difference, Outcomes, measure_of, probability_of
from anabranch.learner.evaluate.outcomes import TaskMeasures
from anabranch.learner.evaluate.scoring import Scorer
from anabranch.learner.model.task import Classification, Regression, TaskMeasure, TokenClassification
from anabranch.learner.settings.learner import GateSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.versions.format import Versions, reference_to
from anabranch.learner.versions.gate import MeasureChoice, QualityGate
from anabranch.learner.versions.verdict import DropEvidence, GateInput, judge

ROWS = 2000
SEPARATION = 1.5
"""Distance of the means of both classes, in standard deviations: an ROC AUC of 0.86."""


class Payments:
    """Held-out events of rare positives, and versions that know their risk up to some noise."""

    def __init__(self, positives, seed, rows=ROWS):
        self.random = np.random.default_rng(seed)
        self.label = np.zeros(rows, np.int64)
        self.label[self.random.permutation(rows)[:positives]] = 1
        self.risk = self.random.normal(size=rows) + SEPARATION * self.label

    def version(self, noise):
        """Log-odds that are calibrated, up to their prior."""
        seen = self.risk + noise * self.random.normal(size=len(self.risk))
        odds = (SEPARATION * seen - SEPARATION**2 / 2) / (1 + noise**2)
        prior = np.log(self.label.mean() / (1 - self.label.mean()))
        return Outcomes("two-classes", (odds + prior)[:, None], self.label)

    def verdict(self, candidate, served, measures, best=None):
        """Judge: no version calls any event positive, so that all have the same accuracy."""
        score = (self.label == 0).astype(float)
        new = np.arange(len(score)) >= len(score) - len(score) // YOUNG
        outcomes = {"candidate": candidate, "served": served} | ({} if best is None else {"best": best})
        each = measures
        if isinstance(measures, dict):
            each = [(measure_of(name, "two-classes"), limit) for name, limit in measures.items()]
        best_scores = None if best is None else score
        inputs = GateInput(score, score, best_scores, new, ~new, {}, measures=each, outcomes=outcomes)
        return judge(inputs, GateSettings(), bounded=True)


def failed(positives, noise, *, count, measure, limit=0.01, of_served=0.0):
    """Return the part of versions with a noise that fails, and the mean drop of their measure."""
    fails, drops = 0, []
    for seed in range(count):
        payments = Payments(positives, seed)
        verdict = payments.verdict(payments.version(noise), payments.version(of_served), {measure: limit})
        fails += verdict.verdict == "fail"
        drops.append(verdict.numbers[f"{measure}_drop"])
    return fails / count, float(np.mean(drops))


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["roc_auc", "average_precision"])
@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_of_1000_versions_that_are_as_good_5_fail_at_most(measure, noise):
    share, drop = failed(40, noise, of_served=noise, count=1000, measure=measure)
    assert abs(drop) < 0.002
    assert share <= 0.005 + 2.33 * np.sqrt(0.005 / 1000)  # of a rate of 0.5 %, chance exceeds that once in 100 times


@pytest.mark.slow
def test_a_version_that_ranks_worse_is_held_back_once_there_are_enough_positives():
    """Its ROC AUC is 0.02 lower; 40 positives cannot show that, whatever the test: its standard error is 0.013."""
    few, drop = failed(40, 0.45, count=300, measure="roc_auc")
    assert drop == pytest.approx(0.02, abs=0.003)
    assert 0.08 <= few <= 0.3
    many, _ = failed(400, 0.45, count=300, measure="roc_auc")
    assert many >= 0.95


def batches_until_certain(drop, error, *, most, seed):
    """Return after how many batches, with normal drops, evidence is certain; None if it is not."""
    random, evidence = np.random.default_rng(seed), DropEvidence()
    for number in range(1, most + 1):
        evidence.add(Difference(0.0, 0.0, random.normal(drop, error), error, 40), 40)
        if evidence.certain(0.01, 1):
            return number
    return None


def test_evidence_of_equal_versions_is_certain_in_one_row_of_100_at_most():
    found = [batches_until_certain(0.0, 0.02, most=100, seed=seed) for seed in range(300)]
    assert sum(number is not None for number in found) <= 3


def test_evidence_of_a_drop_that_no_batch_shows_adds_up():
    found = [batches_until_certain(0.02, 0.015, most=60, seed=seed) for seed in range(100)]
    assert None not in found
    assert np.median(found) <= 9
    assert np.quantile(found, 0.95) <= 15


def test_evidence_of_a_drop_that_is_allowed_or_of_the_same_predictions_is_never_certain():
    evidence = DropEvidence()
    assert not evidence.certain(0.01, 1)
    for _ in range(1000):
        evidence.add(Difference(0.5, 0.501, 0.001, 0.0001, 40), 40)
        assert not evidence.certain(0.01, 1)
    assert (evidence.weight, evidence.drop) == (40_000, pytest.approx(0.001))
    same = DropEvidence()
    same.add(Difference(0.5, 0.5, 0.0, 0.0, 40), 40)
    assert not same.certain(0.0, 1)


class Serving:
    """A gate that judges by ROC AUC, versions that say no to every event, and new held-out events for each."""

    def __init__(self, path):
        self.schema = Schema(
            SchemaSettings.model_validate(
                {"features": {"x": {"dtype": "float32", "shape": [2]}}, "label": {"name": "y", "classes": 2}}
            )
        )
        settings = GateSettings.model_validate({"measures": {"roc_auc": 0.01}})
        device = torch.device("cpu")
        scorer = Scorer(torch.nn.Linear(2, 2), Classification(), self.schema, device, measures=settings.measures)
        self.gate = QualityGate(Versions(path), settings, scorer, reference_to(ModelSettings(factory="m:build")))
        self.random, self.holdout = np.random.default_rng(1), HoldoutSet(self.schema, 2000, 1)
        self.number = self.events = 0

    def hold_out(self, positives, rows):
        columns, label = fake_columns(self.schema, range(self.events, self.events + rows)), np.zeros(rows, np.int64)
        label[self.random.permutation(rows)[:positives]] = 1
        x = self.random.normal(size=(rows, 2))
        x[:, 0] += SEPARATION * label
        columns |= {"feature.x": x.astype(np.float32), "label": label}
        self.holdout.add(columns, [TopicPartition("payments", 0)])
        self.events += rows

    def judge(self, noise):
        """Judge a version with this part of noise in its log-odds, after 2,000 new events, and monitor."""
        self.hold_out(40, 2000)
        odds, rows = torch.tensor([1.0, noise]), self.holdout.held
        weights = {"weight": torch.stack([0 * odds, odds]), "bias": torch.tensor([0.0, -20.0])}
        found, self.number = self.gate.scorer.score_and_find(weights, rows.columns), self.number + 1
        verdict = self.gate.judge(found, rows)
        self.gate.record_published(self.number, weights, found, rows, verdict)
        self.gate.monitor(rows)
        return verdict


@pytest.mark.slow
def test_versions_that_rank_a_little_worse_are_withdrawn_together_and_their_successors_fail_until_they_do_not(tmp_path):
    serving = Serving(tmp_path)
    serving.judge(0.0)
    for _ in range(25):
        serving.judge(0.45)
        if serving.gate.withdrawn:
            break
    assert serving.gate.withdrawn == 1
    (good,) = serving.gate.needed
    assert good == 1, "the version before them serves, and nothing else is needed"
    later = [serving.judge(0.45) for _ in range(4)]
    assert [verdict.verdict for verdict in later] == ["fail"] * 4
    assert "worse than version 1 by roc_auc: 0." in later[-1].reasons[-1]
    again = [serving.judge(0.0).verdict for _ in range(8)]
    assert again[-1] != "fail"


@pytest.mark.parametrize(("noise", "ends"), [(0.0, True), (0.45, False)])
def test_holding_back_ends_also_where_most_events_of_the_set_are_older(tmp_path, noise, ends):
    """Of 80 new positives, the set keeps 5 among its older events, since 20,000 came before."""
    serving = Serving(tmp_path)
    for _ in range(5):
        serving.hold_out(4000, 8000)
    serving.judge(0.0)
    serving.judge(0.0)
    serving.gate.by_measures.hold_back("worse", serving.holdout.held)
    assert serving.judge(0.0).verdict == "fail", "40 positives are too few"
    assert any(serving.judge(noise).verdict != "fail" for _ in range(25)) == ends


def test_evidence_waits_for_events_of_both_classes_and_a_good_row_ends(tmp_path):
    serving = Serving(tmp_path)
    serving.judge(0.1)
    serving.judge(0.1)
    monitor = serving.gate.by_measures
    assert (monitor.last_good.number, monitor.first) == (1, 2)
    serving.hold_out(19, 600)
    serving.gate.monitor(serving.holdout.held)
    assert not monitor._evidence, "19 positives are too few"
    serving.hold_out(560, 2400)
    serving.gate.monitor(serving.holdout.held)
    assert (monitor.last_good.number, monitor.first) == (2, None), "500 positives are enough"


def test_without_measures_no_version_is_kept_for_evidence(tmp_path):
    serving = Serving(tmp_path)
    serving.gate.choice.now = ()
    for _ in range(3):
        serving.judge(0.0)
    assert serving.gate.by_measures.last_good.number == 3


def test_a_constant_version_fails_whatever_its_accuracy():
    payments = Payments(80, 0)
    constant = Outcomes("two-classes", np.full((ROWS, 1), -4.0), payments.label)
    good = payments.version(0.1)
    verdict = payments.verdict(constant, good, {"average_precision": 0.01})
    assert verdict.verdict == "fail"
    assert verdict.reasons[-1] == "it answers the same for all 2000 held-out events"
    assert verdict.reasons[0].startswith("worse than the served version by average_precision: 0.")
    assert verdict.numbers["average_precision"] == pytest.approx(0.04)
    neither = payments.verdict(constant, constant, {"average_precision": 0.01})
    assert (neither.verdict, neither.reasons) == ("inconclusive", ["it answers the same for all 2000 held-out events"])
    assert payments.verdict(good, constant, {"average_precision": 0.01}).verdict == "pass"


def test_a_version_that_ranks_worse_at_the_same_accuracy_fails():
    payments = Payments(200, 1)
    assert payments.verdict(payments.version(1.5), payments.version(0.1), {}).verdict == "pass"
    for measure in ("average_precision", "roc_auc", "log_loss", "recall_at_budget_10"):
        verdict = payments.verdict(payments.version(1.5), payments.version(0.1), {measure: 0.01})
        assert verdict.verdict == "fail", measure
        assert verdict.numbers[f"{measure}_drop"] > 0
        assert f"by {measure}: " in verdict.reasons[0]


def cost(probability, label):
    alarm = probability > 0.1
    return (20 * (~alarm & (label == 1)) + (alarm & (label == 0))).mean()


class Costs(Classification):
    measures = (TaskMeasure("cost", cost, higher=False, relative=True),)


def test_a_measure_of_ones_own_judges_in_pairs():
    payments, known = Payments(200, 1), TaskMeasures.of(Costs(), schema_of(2))
    good, worse = payments.version(0.1), payments.version(1.5)
    measures = [(known.each["cost"], 0.01)]
    assert payments.verdict(good, good, measures).verdict == "pass"
    verdict = payments.verdict(worse, good, measures)
    assert verdict.verdict == "fail"
    assert verdict.reasons[0].startswith("worse than the served version by cost: 0.")
    costs = [cost(probability_of(each.predicted[:, 0]), each.label) for each in (worse, good)]
    assert verdict.numbers["cost_drop"] == pytest.approx((costs[0] - costs[1]) / costs[1])


def test_a_measure_of_ones_own_that_raises_leaves_the_verdict_open():
    payments, task = Payments(200, 1), Costs()
    task.measures = (TaskMeasure("cost", lambda _probability, _label: 1 / 0),)
    version = payments.version(0.1)
    verdict = payments.verdict(version, version, [(TaskMeasures.of(task, schema_of(2)).each["cost"], 0.01)])
    assert (verdict.verdict, verdict.reasons) == (
        "inconclusive",
        ["cost is not defined on these held-out events"],
    )


def test_small_drops_do_not_add_up():
    """The served version is as bad; the best one of late is not."""
    payments = Payments(200, 2)
    worse, good = payments.version(1.5), payments.version(0.1)
    verdict = payments.verdict(worse, worse, {"average_precision": 0.02}, best=good)
    assert verdict.verdict == "fail"
    assert verdict.reasons[0].startswith("worse than the best version served lately by average_precision")
    assert verdict.numbers["best_average_precision_rival"] > verdict.numbers["average_precision_rival"]


def test_events_without_a_finite_prediction_do_not_count():
    payments = Payments(200, 3)
    served = payments.version(0.1)
    served.predicted[:3] = np.nan
    verdict = payments.verdict(payments.version(0.1), served, {"average_precision": 0.02})
    assert verdict.verdict in {"pass", "inconclusive"}
    assert np.isfinite(verdict.numbers["average_precision_drop"])


@pytest.mark.parametrize("odds", [np.inf, -np.inf])
def test_a_candidate_whose_log_odds_are_infinite_where_those_of_the_served_version_are_not_fails(odds):
    payments = Payments(20, 3)
    candidate = payments.version(0.1)
    candidate.predicted[payments.label == 1] = odds
    verdict = payments.verdict(candidate, payments.version(0.1), {"average_precision": 0.02})
    assert (verdict.verdict, verdict.reasons) == ("fail", ["its score is not finite on 20 of 2000 held-out events"])


def test_without_positives_the_verdict_is_inconclusive():
    payments = Payments(0, 4)
    odds = Outcomes("two-classes", payments.risk[:, None], payments.label)
    verdict = payments.verdict(odds, odds, {"average_precision": 0.02})
    assert (verdict.verdict, verdict.reasons) == (
        "inconclusive",
        ["average_precision is not defined on these held-out events"],
    )


def schema_of(classes):
    given = {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": classes}}
    return Schema(SchemaSettings.model_validate(given))


def choice_of(measures, task=None, classes=2):
    settings = GateSettings.model_validate({"measures": measures})
    names = () if measures == "auto" else measures
    return MeasureChoice(settings, TaskMeasures.of(task or Classification(), schema_of(classes), names), "accuracy")


def rows_with(share, rows=2000):
    label = np.zeros(rows, np.int64)
    label[rows - rows // YOUNG :][: round(share * (rows // YOUNG))] = 1
    return HoldoutRows([{"label": label, "hash": np.arange(rows)}], rows, classes=True)


def test_average_precision_decides_where_positives_are_rare():
    choice = choice_of("auto")
    assert (choice.name, choice.why) == ("accuracy", "too few events are held out")
    choice.follow(rows_with(0.5, rows=40))
    assert choice.name == "accuracy"
    for share, name in ((0.3, "accuracy"), (0.1, "average_precision"), (0.22, "average_precision"), (0.3, "accuracy")):
        choice.follow(rows_with(share))
        assert choice.name == name
        assert choice.why == f"{share:.1%} of the newest held-out labels are class 1"
    assert [limit for _, limit in choice.now] == []


def test_what_the_settings_name_decides():
    choice = choice_of({"log_loss": 0.03, "recall_at_budget_5": 0.1})
    choice.follow(rows_with(0.5))
    assert [(measure.name, limit) for measure, limit in choice.now] == [("log_loss", 0.03), ("recall_at_budget_5", 0.1)]
    assert (choice.name, choice.why) == ("log_loss", "gate.measures names it")
    assert (choice_of({}).name, choice_of({}).why) == ("accuracy", "gate.measures is empty")
    assert choice_of("auto", classes=10).why == "it is not one of two classes"


@pytest.mark.parametrize(
    ("task", "name", "words"),
    [
        (Classification(), "auc", 'gate.measures: "auc" is no measure of this task, which has average_precision, roc_'),
        (Regression(), "roc_auc", 'gate.measures: "roc_auc" is no measure of this task, which has mae, rmse, pinball'),
        (Classification(), "ndcg_10", 'gate.measures: "ndcg_10" is no measure of this task'),
        (TokenClassification(), "ece", 'gate.measures: "ece" is no measure of this task, which has none; remove it'),
        (Classification(), "recall_at_budget_0", 'gate.measures: the number of the measure "recall_at_budget_0"'),
    ],
)
def test_a_measure_that_the_task_has_not_is_refused_in_one_sentence(task, name, words):
    with pytest.raises(SettingsError, match=words) as caught:
        TaskMeasures.of(task, schema_of(2), [name])
    assert "\n" not in str(caught.value)


def test_measures_of_a_version_are_those_of_its_outputs():
    """Through the scorer, whose outcomes come out of the same pass as the scores."""
    schema, random = schema_of(2), np.random.default_rng(5)
    x = random.normal(size=500).astype(np.float32)
    label = (random.random(500) < 1 / (1 + np.exp(-3 * x))).astype(np.int64)
    scorer = Scorer(_OnX(), Classification(), schema, torch.device("cpu"))
    columns = {"feature.x": x, "label": label, "hash": np.arange(500)}
    found = scorer.score_and_find(_OnX().state_dict(), columns)
    assert found.predicted[:, 0] == pytest.approx(3 * x, abs=1e-5)
    expected = Outcomes("two-classes", 3 * x[:, None], label)
    outcomes = scorer.measures.outcomes(found.predicted, columns)
    for name, measure in scorer.measures.each.items():
        assert measure.value(outcomes) == pytest.approx(measure.value(expected), abs=1e-5), name


class _OnX(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return torch.stack([torch.zeros_like(x), self.slope * x], dim=1)
