"""Progressive networks: frozen columns, each connected to all columns before it."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.errors import ModelError
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.growing.column_pool import ColumnPool
from anabranch.learner.model.growing.pool import pool_of
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.growing import Progressive
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended

CPU = torch.device("cpu")
EVENTS = {"features": {"x": {"dtype": "float32", "shape": [4]}}, "label": {"name": "y", "classes": 6}}
CENTRES = torch.randn(6, 4, generator=torch.Generator().manual_seed(5)) * 4


@pytest.fixture
def schema():
    return Schema(SchemaSettings.model_validate(EVENTS))


def make_trainer(schema, most=5):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 6))
    model = nn.Sequential(nn.Flatten(), inner)
    strategy = extended(Progressive(least=20, most=most), model, schema, embedding="1.0")
    settings = LearnerSettings.model_validate({"optimizer": {"name": "adamw", "lr": 0.02}, "max_grad_norm": math.inf})
    trainer = Trainer(
        TrainingSetup(model, Classification(), strategy, schema, settings, CPU, choose_precision("fp32", CPU))
    )
    pool = pool_of(model)
    assert isinstance(pool, ColumnPool)
    return trainer, pool


def events(classes, seed, n=16):
    generator = torch.Generator().manual_seed(seed)
    label_B = torch.tensor(classes)[torch.arange(n) % len(classes)]
    return Examples({"x": CENTRES[label_B] + torch.randn(n, 4, generator=generator)}, label_B, torch.ones(n))


def learn(trainer, steps=20):
    for index, classes in enumerate(((0, 1), (2, 3), (4, 5))):
        for step in range(steps):
            assert trainer.step(events(classes, 100 * index + step)).finite


def test_classes_that_come_one_after_the_other_are_kept(schema):
    trainer, pool = make_trainer(schema)
    learn(trainer)
    test = events(tuple(range(6)), 999, 600)
    with torch.inference_mode():
        right = trainer.model.eval()(test.features["x"]).argmax(dim=1) == test.label_B
    assert pool.size == 3
    assert right.float().mean() > 0.9


def test_a_column_is_that_of_the_paper(schema):
    """h of column k = f(W h + sum over earlier columns j of U_j h of column j)."""
    trainer, pool = make_trainer(schema)
    learn(trainer, steps=4)
    x = events(tuple(range(6)), 1).features["x"]
    linear = [layer for layer in trainer.model.modules() if isinstance(layer, nn.Linear)]
    functions: list[Callable[[Tensor], Tensor]] = [torch.relu, torch.tanh, nn.Identity()]
    layers = list(pool.layers)
    columns: list[Tensor] = [x] * 4
    for index, function in enumerate(functions):
        state = layers[index].state_dict()
        outputs = [linear[index](columns[0])]
        for column in range(3):
            last = column == 2
            weight = state["open_weight"] if last else state["weight"][column]
            bias = state["open_bias"] if last else state["bias"][column]
            output = functional.linear(columns[column + 1], weight, bias)
            laterals = state["open_lateral"] if last else state["lateral"][column * (column + 1) // 2 :]
            for before in range(column + 1 if index else 0):
                output = output + columns[before] @ laterals[before].T
            outputs.append(output)
        columns = [function(each) for each in outputs]
    trainer.model.eval()
    with torch.no_grad():
        run = partial(nn.Sequential.forward, trainer.model, x)  # type: ignore[arg-type]
        logits, _ = pool._train_pass(run, len(x))
    assert torch.allclose(logits, columns[3], atol=1e-5)


def test_frozen_columns_keep_every_bit(schema):
    trainer, pool = make_trainer(schema)
    kept = []
    for index, classes in enumerate(((0, 1), (2, 3), (4, 5))):
        for step in range(4):
            trainer.step(events(classes, 10 * index + step))
        kept.append({name: value.clone() for name, value in pool.state_dict().items() if "open" not in name})
    for earlier, later in pairwise(kept):
        for name, value in earlier.items():
            if not name.startswith("router"):
                assert torch.equal(later[name][: len(value)], value), name


def test_other_models_are_refused_by_a_sentence(schema):
    for model, found in (
        (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)), "has a BatchNorm1d"),
        (nn.Linear(4, 6), "is a Linear"),
        (nn.Sequential(nn.Flatten(), nn.ReLU()), "has no linear layer"),
    ):
        with pytest.raises(ModelError, match=f'and the model {found}; take "experts", which adds to any model'):
            extended(Progressive(), model, schema)
