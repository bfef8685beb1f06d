"""Scores of a model on the holdout set, and their history over the versions."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.forgetting import ForgettingState, Peak, retention_of
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.scoring import Evaluation, evaluation_of, newcomers, score_each
from anabranch.learner.model.task import Classification, MultiLabel, Regression, TokenClassification

NAMES = [TopicPartition("events", 0)]
CPU = torch.device("cpu")


class Always(nn.Module):
    """Predicts one class for all events."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return torch.eye(3)[self.answer].expand(len(x), 3)


def guarded(schema, *batches):
    holdout = HoldoutSet(schema, 400, 0)
    for batch in batches:
        holdout.add(batch, NAMES)
    return holdout


def evaluate(model, task, schema, rows, device):
    scores_G = score_each(model, task, schema, rows.columns, device) if len(rows) else np.empty(0)
    return evaluation_of(scores_G, schema, rows)


class TestEvaluation:
    def test_scores_separate_new_from_old_and_name_the_worst_class(self, schema):
        holdout = guarded(
            schema, fake_columns(schema, range(300), label=[0]), fake_columns(schema, range(300, 400), label=[1])
        )
        alone = {"new": 1.0, "old": 1.0}
        found = evaluate(Always(0), Classification(), schema, holdout.held, CPU)
        assert found == Evaluation({"new": 0.0, "old": 1.0, "worst": 0.0}, {"0": 1.0, "1": 0.0}, constant=alone)
        found = evaluate(Always(1), Classification(), schema, holdout.held, CPU)
        assert found == Evaluation({"new": 1.0, "old": 0.0, "worst": 0.0}, {"0": 0.0, "1": 1.0}, constant=alone)

    def test_a_few_events_have_no_evaluation(self, schema):
        for holdout in (guarded(schema), guarded(schema, fake_columns(schema, range(3)))):
            assert evaluate(Always(0), Classification(), schema, holdout.held, CPU) == Evaluation()

    def test_classes_are_listed_by_name_without_rare_ones(self):
        schema = _schema(label={"name": "y", "classes": ["cat", "dog", "emu"]})
        holdout = guarded(
            schema, fake_columns(schema, range(40), label=[0, 1]), fake_columns(schema, range(40, 49), label=[2])
        )
        found = evaluate(Always(0), Classification(), schema, holdout.held, CPU)
        assert found.classes == {"cat": 1.0, "dog": 0.0}

    def test_declared_groups_are_listed_by_their_hash(self):
        schema = _schema(group={"name": "shop"})
        columns = fake_columns(schema, range(60), label=[0, 0, 1])
        columns["group_hash"] = np.repeat(np.array([7, 2**64 - 1, 0], np.uint64), 20)
        columns["label"][20:40] = 1
        found = evaluate(Always(0), Classification(), schema, guarded(schema, columns).held, CPU)
        assert found.groups.keys() == {f"{7:016x}", "f" * 16}
        assert found.groups["f" * 16] == found.windows["worst_group"] == 0
        assert found.groups[f"{7:016x}"] == pytest.approx(14 / 20)

    def test_the_number_of_listed_groups_is_bounded(self):
        schema = _schema(group={"name": "shop"})
        columns = fake_columns(schema, range(1000), label=[0])
        columns["group_hash"] = (np.arange(1000) % 100 + 1).astype(np.uint64)
        holdout = HoldoutSet(schema, 2000, 0)
        holdout.add(columns, NAMES)
        assert len(evaluate(Always(0), Classification(), schema, holdout.held, CPU).groups) == 64

    def test_a_regression_has_windows_and_no_classes(self):
        schema = _schema(label={"name": "y", "dtype": "float32"})
        holdout = guarded(schema, fake_columns(schema, range(100)))
        found = evaluate(nn.Sequential(_Vector(), nn.Linear(3, 1)), Regression(), schema, holdout.held, CPU)
        assert found.windows.keys() == {"new", "old"}
        assert found.classes == {}

    def test_an_event_of_several_classes_is_counted_for_each(self):
        schema = _schema(label={"name": "y", "classes": ["a", "b", "c"], "multi": True})
        labels = [[True, False, False], [True, True, False]]
        holdout = guarded(schema, fake_columns(schema, range(100), label=labels))  # type: ignore[arg-type]
        first = nn.Linear(3, 3)
        nn.init.zeros_(first.weight)
        first.bias.data = torch.tensor([1.0, -1.0, -1.0])
        found = evaluate(nn.Sequential(_Vector(), first), MultiLabel(), schema, holdout.held, CPU)
        assert found.classes == {"a": 0.75, "b": 0.5}
        assert found.windows["worst"] == 0.5

    def test_an_event_of_several_positions_is_counted_once_for_each_class_that_it_has(self):
        schema = _schema(label={"name": "y", "classes": ["a", "b", "c"], "length": 3})
        columns = fake_columns(schema, range(100), label=[0])
        columns["label"][:] = [0, 0, -100]
        columns["label"][::2] = [0, 1, 1]
        model = nn.Linear(3, 9)
        nn.init.zeros_(model.weight)
        model.bias.data = torch.tensor([1.0, 0.0, 0.0] * 3)
        classifier = nn.Sequential(_Vector(), model, nn.Unflatten(1, (3, 3)))
        found = evaluate(classifier, TokenClassification(), schema, guarded(schema, columns).held, CPU)
        assert found.classes == pytest.approx({"a": 2 / 3, "b": 1 / 3})
        assert found.windows["worst"] == pytest.approx(1 / 3)

    def test_newcomers_are_events_added_since_an_earlier_state(self, schema):
        holdout = guarded(schema, fake_columns(schema, range(300)))
        before = holdout.held
        holdout.add(fake_columns(schema, range(300, 330)), NAMES)
        fresh = newcomers(holdout.held, before)
        assert (fresh["time_ms"] // 10).tolist() == list(range(300, 330))
        assert len(newcomers(holdout.held, holdout.held)["label"]) == 0
        assert newcomers(guarded(schema).held, before) == {}


class _Vector(nn.Module):
    def forward(self, x):
        return x.float()


def _schema(**changes):
    fields = {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
    return Schema(SchemaSettings.model_validate(fields | changes))


def seen(old, **classes):
    return Evaluation({"old": old}, classes)


class TestRetention:
    def test_the_lowest_score_is_the_lowest_since_the_best(self):
        found, lowest = ForgettingState(), []
        for old in (0.1, 0.5, 0.9, 0.6, 0.91, 0.7, 0.99):
            found = found.followed_by(seen(old))
            lowest.append(found.windows["old_lowest"])
        assert lowest == [0.1, 0.5, 0.9, 0.6, 0.6, 0.6, 0.99], "0.91 is within the noise of 0.9"
        assert found.old == Peak(0.99, 0.99)

    @pytest.mark.parametrize(("begin", "gain"), [(0.10, 0.015), (-0.05, 0.0008)])
    def test_a_slow_rise_in_small_steps_is_a_new_best(self, begin, gain):
        found = ForgettingState()
        for number in range(50):
            found = found.followed_by(seen(begin + number * gain))
        assert found.windows["old_lowest"] >= begin + 45 * gain, "no score was ever lower"

    def test_forgetting_is_the_mean_over_the_classes_of_best_less_now(self):
        found = ForgettingState().followed_by(seen(0.8, a=1.0)).followed_by(seen(0.7, a=0.5, b=0.9))
        assert found.forgetting == 0.25
        assert found.followed_by(seen(0.7, a=0.9, b=0.9)).forgetting == pytest.approx(0.05)

    def test_noise_of_many_scores_is_no_forgetting(self):
        random, found, forgetting = np.random.default_rng(0), ForgettingState(), []
        for _ in range(3000):
            scores = {f"c{number}": score / 40 for number, score in enumerate(random.binomial(40, 0.8, 10).tolist())}
            found = found.followed_by(seen(0.8, **scores))
            forgetting.append(found.forgetting)
        assert np.mean(forgetting[-1000:]) < 0.07

    def test_forgetting_without_classes_is_that_of_old_events(self):
        found = ForgettingState().followed_by(seen(-1.0)).followed_by(seen(-3.0))
        assert found.forgetting == 2.0

    def test_a_version_without_an_evaluation_changes_nothing(self):
        found = ForgettingState().followed_by(seen(0.8))
        assert found.followed_by(Evaluation()) == found

    def test_the_near_future_is_the_newest_events(self):
        found = ForgettingState()
        assert found.windows == {}
        for _ in range(100):
            found = found.with_near(10, 0.0)
        for _ in range(50):
            found = found.with_near(10, 9.0)
        assert found.windows == {"near_future": 0.9}
        assert len(found.near) == 50

    @given(st.lists(st.floats(0, 1), max_size=20))
    def test_a_restored_state_continues_as_the_original(self, scores):
        found = ForgettingState()
        for score in scores:
            found = found.followed_by(seen(score, a=score)).with_near(3, score)
        assert retention_of(json.loads(json.dumps(found.state()))) == replace(found, classes=dict(found.classes))
