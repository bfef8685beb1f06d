"""What a strategy freezes or adds up goes on with the inputs that it had: scales are fixed with it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.factory import forward
from anabranch.learner.model.features.learned import FeatureLearning, features_of
from anabranch.learner.model.features.numbers import LearnedNumber
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.ewc import ElasticWeights
from anabranch.learner.strategies.experts import Experts
from anabranch.learner.strategies.ncm import NearestClassMean, StreamingDiscriminant
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended

CPU = torch.device("cpu")
CENTRES = np.array([-1.0, 1.0, 300.0, 400.0])
WIDTHS = np.array([0.4, 0.4, 20.0, 20.0])


def trainer_of(strategy, scale):
    torch.manual_seed(0)
    x = {"dtype": "float32", "shape": [4], "scale": scale}
    schema = Schema(SchemaSettings.model_validate({"features": {"x": x}, "label": {"name": "y", "classes": 4}}))
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    FeatureLearning().convert(model, ModelContext(CPU, schema))
    settings = LearnerSettings.model_validate({"optimizer": {"name": "adamw", "lr": 0.01}})
    embedding = None
    if isinstance(strategy, Experts):
        strategy = extended(strategy, model, schema, embedding="0")
    elif isinstance(strategy, NearestClassMean):
        embedding = Embedding(model, "3")
    return Trainer(
        TrainingSetup(
            model, Classification(), strategy, schema, settings, CPU, choose_precision("fp32", CPU), embedding
        )
    )


def events(random, classes, n=64):
    label = np.array(classes)[np.arange(n) % len(classes)].astype(np.int64)
    x = (CENTRES[label][:, None] + WIDTHS[label][:, None] * random.standard_normal((n, 4))).astype(np.float32)
    return {"feature.x": x, "label": label, "weight": np.ones(n, np.float32), "time_ms": np.ones(n, np.int64)}


def train(trainer, random, classes, steps):
    for _ in range(steps):
        columns = events(random, classes)
        trainer.step(trainer.examples(columns), columns=columns)


def accuracy(trainer, columns):
    trainer.model.eval()
    with torch.no_grad():
        output = forward(trainer.model, {"x": torch.from_numpy(columns["feature.x"])})
    trainer.model.train()
    return float((output.argmax(1).numpy() == columns["label"]).mean())


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["standard", "robust", "quantile"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Experts(size=5.0, least=500, most=4),
        StreamingDiscriminant,
        NearestClassMean,
    ],
    ids=["experts", "slda", "ncm"],
)
def test_classes_are_kept_although_later_ones_have_another_range(make, scale):
    trainer, random = trainer_of(make(), scale), np.random.default_rng(1)
    test = events(random, (0, 1), 1000)
    train(trainer, random, (0, 1), 60)
    assert accuracy(trainer, test) > 0.97
    train(trainer, random, (2, 3), 100)
    assert accuracy(trainer, test) > 0.95


def test_class_means_are_those_of_one_space_alone():
    trainer, random = trainer_of(NearestClassMean(), "standard"), np.random.default_rng(1)
    strategy: Any = trainer.strategy
    train(trainer, random, (0, 1), 15)
    assert not strategy.means.any()
    train(trainer, random, (0, 1), 2)
    learned = features_of(trainer.model)
    assert learned is not None
    assert learned.numbers_are_fixed
    assert strategy.means[:2].any()
    before = {name: value.clone() for name, value in learned.state_dict().items()}
    train(trainer, random, (2, 3), 3)
    assert all(torch.equal(value, before[name]) for name, value in learned.state_dict().items())


def test_ewc_fixes_scales_when_it_first_pulls_weights_to_an_anchor():
    trainer, random = trainer_of(ElasticWeights(every=3), "standard"), np.random.default_rng(1)
    learned = features_of(trainer.model)
    assert learned is not None
    train(trainer, random, (0, 1), 2)
    assert not learned.numbers_are_fixed
    train(trainer, random, (0, 1), 1)
    assert learned.numbers_are_fixed


def test_values_beyond_a_fixed_scale_are_measured():
    trainer, random = trainer_of(ElasticWeights(every=20), "standard"), np.random.default_rng(1)
    learned = features_of(trainer.model)
    assert learned is not None
    train(trainer, random, (0, 1), 30)
    assert learned.of(LearnedNumber)["x"].beyond == 0
    train(trainer, random, (2, 3), 30)
    assert 0.2 < learned.of(LearnedNumber)["x"].beyond < 1


def test_fixed_scales_stay_so_when_weights_are_loaded():
    one, other = (trainer_of(NearestClassMean(), "standard") for _ in range(2))
    train(one, np.random.default_rng(0), (0, 1), 20)
    other.model.load_state_dict(one.model.state_dict())
    learned = features_of(other.model)
    assert learned is not None
    assert learned.numbers_are_fixed
