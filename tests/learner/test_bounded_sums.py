"""One event far from all others decides no class mean, covariance or importance permanently."""

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.factory import forward
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.base import shortened
from anabranch.learner.strategies.ewc import ElasticWeights
from anabranch.learner.strategies.experts import Experts
from anabranch.learner.strategies.ncm import NearestClassMean, StreamingDiscriminant
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended

CPU = torch.device("cpu")
STEPS = 60


def trainer_of(strategy):
    torch.manual_seed(0)
    features = {"x": {"dtype": "float32", "shape": [4]}}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}}))
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))
    settings = LearnerSettings.model_validate({"optimizer": {"name": "adamw", "lr": 0.01}})
    if isinstance(strategy, Experts):
        strategy = extended(strategy, model, schema, embedding="0")
    embedding = Embedding(model, "1") if isinstance(strategy, NearestClassMean) else None
    precision = choose_precision("fp32", CPU)
    return Trainer(TrainingSetup(model, Classification(), strategy, schema, settings, CPU, precision, embedding))


def events(random, n=64, far=0.0):
    label = random.integers(0, 3, n)
    x = random.normal(size=(n, 4)) * 0.5 + 2 * np.eye(4)[label]
    if far:
        x[0] = far
    return {"feature.x": x.astype(np.float32), "label": label, "weight": np.ones(n, np.float32)}


def accuracy(make, far):
    trainer, random = trainer_of(make()), np.random.default_rng(1)
    for step in range(STEPS):
        columns = events(random, far=far if step in (0, 20) else 0.0)
        trainer.step(trainer.examples(columns), columns=columns)
    test = events(np.random.default_rng(2), 2000)
    trainer.model.eval()
    with torch.no_grad():
        output = forward(trainer.model, {"x": torch.from_numpy(test["feature.x"])})
    return float((output.argmax(1).numpy() == test["label"]).mean())


@pytest.mark.slow
@pytest.mark.parametrize("far", [1e6, -1e12, 1e18])
@pytest.mark.parametrize(
    "make",
    [NearestClassMean, StreamingDiscriminant, lambda: Experts(size=5.0), lambda: ElasticWeights(every=10)],
    ids=["ncm", "slda", "experts", "ewc"],
)
def test_two_events_far_away_leave_the_accuracy(make, far):
    assert accuracy(make, 0.0) > 0.9
    assert accuracy(make, far) > accuracy(make, 0.0) - 0.03


def test_the_usual_length_follows_the_stream_and_not_one_event():
    usual, random = torch.zeros((), dtype=torch.float64), np.random.default_rng(0)
    for step in range(100):
        vectors = torch.from_numpy(random.normal(size=(20, 8)))
        if step % 10 == 0:
            vectors[3] = 1e30
            vectors[4] = torch.inf
        found = shortened(vectors, torch.ones(20), usual)
        assert torch.equal(found[5:], vectors[5:])
        assert torch.linalg.vector_norm(found, dim=1).max() < 100
    assert 2 < usual < 4
    for _ in range(100):
        found = shortened(torch.from_numpy(random.normal(size=(20, 8))) * 1000, torch.ones(20), usual)
    assert 2000 < usual < 4000
