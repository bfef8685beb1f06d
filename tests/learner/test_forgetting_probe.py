"""The probe scores held-out events if there are enough of them, else events of the store."""

import numpy as np
import pytest
import torch

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.replay_ratio import AdaptiveReplayRatio, ScoreSum
from anabranch.learner.loop.replay_feed import ENOUGH, Probe
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.replay.reservoir.event_table import RECORD
from anabranch.replay.sample_plan import Sample

NAMES = [TopicPartition("events", 0)]
ROWS = 8


@pytest.fixture
def trainer(schema, make_model):
    options, cpu = LearnerSettings(), torch.device("cpu")
    return Trainer(
        TrainingSetup(
            make_model(), Classification(), STRATEGIES["er"](), schema, options, cpu, choose_precision("fp32", cpu)
        )
    )


def predicted(trainer, schema, offsets, *, shift):
    """Return events whose labels are the predicted classes, plus `shift`."""
    columns = fake_columns(schema, offsets, label=[0, 1, 2])
    trainer.model.eval()
    class_B = trainer.model(torch.from_numpy(columns["feature.x"])).argmax(1).numpy()
    columns["label"] = ((class_B + shift) % 3).astype(columns["label"].dtype)
    return columns


def as_sample(columns):
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    n = len(columns["label"])
    return Sample(tensors, tensors["weight"], np.arange(n, dtype=np.int32), np.zeros(n, RECORD))


def test_held_out_events_show_forgetting_that_memorised_events_hide(schema, trainer):
    holdout = HoldoutSet(schema, 1000, 0)
    probe = Probe(AdaptiveReplayRatio(0.5, bounded=True), holdout, trainer, ROWS)
    memorised = as_sample(predicted(trainer, schema, range(20), shift=0))
    assert probe.score(0, None) is None
    for offset in range(1000, 1000 + 2 * ENOUGH, 10):
        enough = holdout.older >= ENOUGH
        assert [probe.sampled(step) for step in range(5)] == [0 if enough else ROWS, 0, 0, 0, 0 if enough else ROWS]
        assert probe.score(4, memorised) == ScoreSum(ROWS, 0.0 if enough else ROWS)
        assert probe.score(5, memorised) is None
        holdout.add(predicted(trainer, schema, range(offset, offset + 10), shift=1), NAMES)
    assert enough


def test_a_step_scores_the_same_events_after_a_restart(schema, trainer):
    holdout, again = HoldoutSet(schema, 1000, 0), HoldoutSet(schema, 1000, 0)
    for offset in range(0, 400, 4):
        shift = offset // 4 % 2
        holdout.add(predicted(trainer, schema, range(offset, offset + 4), shift=shift), NAMES)
    again.restore(holdout.tensors())
    ratio = AdaptiveReplayRatio(0.5, bounded=True)
    scores = [Probe(ratio, each, trainer, 50).score(step, None) for step in (0, 4, 8) for each in (holdout, again)]
    assert scores[::2] == scores[1::2]
    assert len({score.score for score in scores if score is not None}) > 1
