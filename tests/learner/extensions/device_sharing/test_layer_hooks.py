"""A callback between layers leaves every result of training unchanged."""

import copy

import pytest
import torch
from torch import nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.extensions.device_sharing.launches import call_between_layers
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

CPU = torch.device("cpu")


def make_model():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2))
    return nn.Sequential(nn.Flatten(), nn.LeakyReLU(inplace=True), body, nn.Linear(16, 3))


def trained(schema, settings, *, hooked):
    """Take ten steps; return what a checkpoint would have, and how often the callback was called."""
    options = LearnerSettings.model_validate({**settings, "optimizer": {"name": "adam", "lr": 0.02}})
    strategy, model, calls = STRATEGIES[options.strategy.name](), make_model(), 0
    trainer = Trainer(
        TrainingSetup(model, Classification(), strategy, schema, options, CPU, choose_precision("bf16", CPU))
    )

    def count_call():
        nonlocal calls
        calls += 1

    if hooked:
        call_between_layers(trainer.model, count_call)
    for step in range(10):
        torch.manual_seed(step)
        new = trainer.examples(fake_columns(schema, range(step * 8, step * 8 + 8), label=[0, 1, 2]))
        assert trainer.step(new, [new] * len(strategy.samples(8))).finite
    return trainer.tensors(), calls


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
def test_results_are_unchanged_with_a_callback_between_layers(schema, settings):
    plain, never = trained(schema, settings, hooked=False)
    with_hooks, often = trained(schema, settings, hooked=True)
    torch.testing.assert_close(with_hooks, plain, rtol=0, atol=0)
    assert never == 0
    assert often >= 10 * (7 + 5)


def test_the_callback_is_called_before_each_layer_in_both_directions():
    model, calls = make_model(), []
    call_between_layers(model, lambda: calls.append(len(calls)))
    model(torch.randn(4, 3)).sum().backward()
    assert len(calls) == 7 + 5  # backward where there are gradients


def test_copies_and_passes_without_gradients_call_nothing():
    model, calls = make_model(), []
    call_between_layers(model, lambda: calls.append(True))
    with torch.no_grad():
        model(torch.randn(4, 3))
    copy.deepcopy(model)(torch.randn(4, 3)).sum().backward()
    assert calls == []
