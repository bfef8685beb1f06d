"""The watch by what was served: worse answers are withdrawn, a stream that becomes harder is not."""

import shutil

import numpy as np
import pytest
import torch

from anabranch.learner.evaluate.outcomes import predicted_by
from anabranch.learner.extensions.served_answers.join import AnswerJoin
from anabranch.learner.extensions.served_answers.watch import ServedWatch
from tests.learner.versions.test_quality_gate import GOOD, Bench


class Watching(Bench):
    """A gate that judges by log loss, two versions that passed it, and what they have answered."""

    def __init__(self, path, schema):
        super().__init__(path, schema, measures={"log_loss": 0.02})
        self.hold_out(200)
        for _ in range(2):
            self.publish(GOOD)
        self.rows = np.empty(0, AnswerJoin(schema.label, 3)._dtype)
        self.watched = ServedWatch(self.gate, self.outcomes, lambda: self.rows)

    def outcomes(self, rows, field):
        output, label = (torch.from_numpy(rows[name].copy()) for name in (field, "label"))
        measures = self.gate.scorer.measures
        return measures.outcomes(predicted_by("classes", output, label).numpy(), {"label": rows["label"]})

    def serve(self, version, count, *, noise=0.3, hard=1.0, seed=0):
        """Answer events as the learner predicts them, but for noise; `hard`: by how much both know less."""
        random = np.random.default_rng([seed, version])
        rows = np.zeros(count, self.rows.dtype)
        rows["version"], rows["label"] = version, random.integers(3, size=count)
        rows["own"] = np.eye(3)[rows["label"]] * 2 + hard * random.normal(size=(count, 3))
        rows["output"] = rows["own"] + noise * random.normal(size=(count, 3))
        self.rows = np.concatenate([self.rows, rows])
        self.watched.monitor(self.holdout.held)


@pytest.fixture
def watching(tmp_path, schema):
    return Watching(tmp_path / "versions", schema)


def test_a_version_that_answers_worse_is_withdrawn_and_the_one_before_serves_again(watching):
    watching.serve(1, 1000)
    assert watching.watched.good == 1
    watching.serve(2, 1000, noise=1.0)
    assert (watching.verdict(1), watching.verdict(2)) == ("inconclusive", "fail")
    assert "what versions after 1 have answered is worse than what those before have, by log_loss" in watching.reasons(
        2
    )
    assert watching.gate.withdrawn == 1
    assert watching.gate._served.number == 1
    watching.serve(2, 1000, noise=1.0)  # labels of its answers continue to come
    assert watching.gate.withdrawn == 1


def test_many_versions_with_few_labels_each_are_compared_together(watching):
    for _ in range(10):
        watching.publish(GOOD)
    for version in range(1, 7):
        watching.serve(version, 50)
    assert watching.watched.good == 4
    for version in range(7, 13):
        watching.serve(version, 50, noise=3.0)
    assert [watching.verdict(number) for number in (2, 3, 4, 5, 12)] == ["pass", "pass", "pass", "fail", "fail"]
    assert watching.gate._served.number == 4


def test_a_stream_that_becomes_harder_withdraws_nothing(watching):
    watching.serve(1, 1000)
    watching.serve(2, 1000, hard=3.0)
    assert watching.verdict(2) == "pass"


def test_few_labels_decide_nothing_and_versions_as_good_are_never_withdrawn(watching):
    watching.serve(1, 199)
    assert watching.watched.good is None
    watching.serve(1, 1)
    watching.serve(2, 199, noise=5.0)
    assert (watching.watched.good, watching.gate.withdrawn) == (1, 0)
    watching.rows, watching.watched.good = watching.rows[:0], None
    for seed in range(100):
        watching.serve(1, 1000, seed=seed)
        watching.serve(2, 1000, seed=seed)
        watching.rows, watching.watched.good = watching.rows[:0], None
    assert watching.gate.withdrawn == 0


def test_after_enough_labels_a_version_is_what_later_ones_are_compared_with(watching):
    watching.serve(1, 1000)
    watching.serve(2, 5000)
    assert watching.watched.good == 2


def test_without_a_measure_or_with_a_good_version_that_is_gone_nothing_is_withdrawn(watching):
    measures, watching.gate.choice.now = watching.gate.choice.now, ()
    watching.serve(1, 1000)
    watching.serve(2, 1000, noise=1.0)
    watching.gate.choice.now = measures
    shutil.rmtree(watching.versions.directory(1))
    watching.watched.monitor(watching.holdout.held)
    assert (watching.gate.withdrawn, watching.verdict(2)) == (0, "pass")
