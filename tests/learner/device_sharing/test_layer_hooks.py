"""Training looks between layers, and every number stays what it is."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from learner.config import LearnerSettings
from learner.device_sharing.layer_hooks import look_between_layers
from learner.model.device import choose_precision
from learner.model.task import Classification
from learner.strategies.registry import STRATEGIES
from learner.training.trainer import Trainer

CPU = torch.device("cpu")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2))
    return nn.Sequential(nn.Flatten(), nn.LeakyReLU(inplace=True), body, nn.Linear(16, 3))


def trained(schema: Schema, settings: dict[str, Any], *, looks: bool) -> tuple[dict[str, Any], int]:
    """Take ten steps; return what a checkpoint would have, and how often it was looked."""
    options = LearnerSettings.model_validate({**settings, "optimizer": {"name": "adam", "lr": 0.02}})
    strategy, model, looked = STRATEGIES[options.strategy.name](), make_model(), 0
    trainer = Trainer(model, Classification(), strategy, schema, options, CPU, choose_precision("bf16", CPU))

    def look() -> None:
        nonlocal looked
        looked += 1

    if looks:
        look_between_layers(trainer.model, look)
    for step in range(10):
        torch.manual_seed(step)
        new = trainer.examples(fake_columns(schema, range(step * 8, step * 8 + 8), label=[0, 1, 2]))
        assert trainer.step(new, [new] * len(strategy.samples(8))).finite
    return trainer.tensors(), looked


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch_size": 4},
        {"activation_checkpointing": ["2"]},
        {"strategy": "mir"},
        {"strategy": "agem"},
        {"strategy": {"name": "lwf", "every": 2}},
    ],
)
def test_no_number_is_another_where_training_looks_between_layers(schema: Schema, settings: dict[str, Any]) -> None:
    plain, never = trained(schema, settings, looks=False)
    looking, often = trained(schema, settings, looks=True)
    torch.testing.assert_close(looking, plain, rtol=0, atol=0)
    assert never == 0
    assert often >= 10 * (7 + 5)


def test_a_pass_looks_ahead_of_each_layer_in_both_directions() -> None:
    model, looked = make_model(), []
    look_between_layers(model, lambda: looked.append(len(looked)))
    model(torch.randn(4, 3)).sum().backward()
    assert len(looked) == 7 + 5  # backward where there are gradients


def test_copies_and_passes_without_gradients_look_at_nothing() -> None:
    model, looked = make_model(), []
    look_between_layers(model, lambda: looked.append(True))
    with torch.no_grad():
        model(torch.randn(4, 3))
    copy.deepcopy(model)(torch.randn(4, 3)).sum().backward()
    assert looked == []
