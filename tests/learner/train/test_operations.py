"""How many operations a step dispatches, and that each strategy learns the same with fewer of them."""

import pytest
import torch
from torch import nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.support.operations import Operations

CPU = torch.device("cpu")
LAYERS = 22


def perceptron(*, batch_norm):
    """22 linear layers: 44 parameters, and with batch norm 42 more and 63 buffers."""
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Linear(3, 8)]
    for _ in range(LAYERS - 1):
        parts += [*([nn.BatchNorm1d(8)] if batch_norm else []), nn.ReLU(), nn.Linear(8, 8)]
    return nn.Sequential(*parts)


def counted(schema, model, strategy, **settings):
    """Return the operations of the fourth step."""
    options = LearnerSettings.model_validate({"strategy": strategy, **settings})
    kind = STRATEGIES[options.strategy.name](**(options.strategy.model_extra or {}))
    trainer = Trainer(TrainingSetup(model, Classification(), kind, schema, options, CPU, choose_precision("fp32", CPU)))
    for step in range(4):
        new, *old = (
            trainer.examples(fake_columns(schema, range(begin, begin + n), label=[0, 1, 2]))
            for begin, n in ((16 * step, 16), *((1000, n) for n in kind.samples(16)))
        )
        with Operations() as operations:
            assert trainer.step(new, old).finite
    return operations


def test_a_deep_model_with_batch_norm_takes_at_most_250_operations_a_step(schema):
    """Of 161 without batch norm, whose own are 63 and an addition to each of two sums."""
    operations = counted(schema, perceptron(batch_norm=True), {"name": "er"})
    assert operations.total <= 250, operations


@pytest.mark.parametrize(
    ("strategy", "most"),
    [
        ({"name": "er"}, 165),
        ({"name": "der++"}, 200),
        ({"name": "mir"}, 420),
        ({"name": "agem"}, 310),
        ({"name": "ewc", "every": 2}, 395),
        ({"name": "lwf", "every": 2}, 265),
    ],
    ids=lambda each: each["name"] if isinstance(each, dict) else None,
)
def test_strategies_take_no_operation_for_each_parameter(schema, strategy, most):
    """A pass through the model takes about 50 forward and 100 back; a copy of every second step's weights takes 44.

    The bound on an event's importances, of ewc, takes 40 for a model of any depth.
    """
    operations = counted(schema, perceptron(batch_norm=False), strategy)
    assert operations.total <= most, operations
