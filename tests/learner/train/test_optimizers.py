"""Optimizers by name: each learns, and goes on from a checkpoint as if nothing had happened."""

import pytest
import torch
from torch import nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import OPTIMIZER, LearnerSettings, OptimizerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.optimizers import OPTIMIZERS, FusedAdam, build_optimizer
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

CPU = torch.device("cpu")


def make_trainer(schema, **optimizer):
    torch.manual_seed(0)
    settings = LearnerSettings.model_validate({"optimizer": optimizer})
    precision = choose_precision("fp32", CPU)
    return Trainer(
        TrainingSetup(nn.Linear(3, 3), Classification(), STRATEGIES["none"](), schema, settings, CPU, precision)
    )


def test_the_config_has_the_same_names():
    assert set(OPTIMIZER.names) == set(OPTIMIZERS)


@pytest.mark.parametrize("arguments", [*({"name": name} for name in OPTIMIZERS), {"name": "sgd", "momentum": 0.9}])
def test_it_learns_and_goes_on_from_a_checkpoint_bit_for_bit(schema, arguments):
    first = make_trainer(schema, **arguments, lr=0.01)
    examples = first.examples(fake_columns(schema, range(12), label=[0, 1, 2]))
    losses = [first.step(examples).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    second = make_trainer(schema, **arguments, lr=0.01)
    second.restore(first.tensors(), first.state())
    for trainer in (first, second):
        for _ in range(3):
            trainer.step(examples)
    expected = first.snapshot()
    assert all(torch.equal(value, expected[name]) for name, value in second.snapshot().items())


@pytest.mark.parametrize(
    ("arguments", "fused"),
    [
        ({"name": "adamw"}, True),
        ({"name": "adamw", "foreach": True}, None),
        ({"name": "sgd"}, None),
        ({"name": "sgd", "momentum": 0.9}, True),
        ({"name": "adafactor"}, None),
    ],
)
def test_the_fused_form_is_taken_where_it_is_faster_and_the_user_says_nothing(arguments, fused):
    settings = OptimizerSettings.model_validate(arguments)
    optimizer = build_optimizer(settings, [nn.Parameter(torch.ones(3))])
    assert optimizer.param_groups[0].get("fused") is fused


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "adamw"},
        {"name": "adam", "weight_decay": 0.1, "betas": (0.8, 0.9)},
        {"name": "adamw", "maximize": True},
    ],
    ids=str,
)
def test_steps_of_fused_adam_are_torchs_bit_for_bit_also_with_other_rates_gradients_and_state(arguments):
    torch.manual_seed(0)
    first, second = ([nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(3))] for _ in range(2))
    settings = OptimizerSettings.model_validate({**arguments, "lr": 0.01})
    ours, torchs = (build_optimizer(settings, weights) for weights in (first, second))
    fused, taken = FusedAdam.of(ours), list[bool]()
    assert fused is not None
    for step in range(12):
        for mine, other in zip(first, second, strict=True):
            gradient = torch.randn_like(mine)
            mine.grad, other.grad = gradient.clone(), gradient.clone()
        if step == 3:
            first[1].grad = second[1].grad = None
        for optimizer in (ours, torchs):
            if step == 5:
                optimizer.param_groups[0]["lr"] = 0.1
            if step == 7:
                optimizer.load_state_dict(optimizer.state_dict())
            if step == 9:
                optimizer.state.clear()
        taken.append(fused.step())
        if not taken[-1]:
            ours.step()
        torchs.step()
        assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))
        assert ours.state_dict()["state"].keys() == torchs.state_dict()["state"].keys()
    assert [step for step, was in enumerate(taken) if not was] == [0, 3, 9]
    fused.step(skip=torch.ones(()))
    assert all(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))
    assert ours.state[first[0]]["step"] == torchs.state[second[0]]["step"]


@pytest.mark.parametrize(
    "arguments", [{"name": "sgd"}, {"name": "adam", "amsgrad": True}, {"name": "adam", "foreach": True}], ids=str
)
def test_torch_takes_the_steps_of_other_optimizers(arguments):
    optimizer = build_optimizer(OptimizerSettings.model_validate(arguments), [nn.Parameter(torch.ones(3))])
    assert FusedAdam.of(optimizer) is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_with_their_channels_last_go_on_from_a_checkpoint_bit_for_bit(name):
    """A file has contiguous moments, which fused optimizers would pair with other elements of the weights."""
    features = {"x": {"dtype": "float32", "shape": [3, 6, 6]}}
    images = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}}))

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        settings = LearnerSettings.model_validate({"optimizer": {"name": name, "lr": 0.01}})
        precision = choose_precision("fp32", CPU)
        return Trainer(TrainingSetup(model, Classification(), STRATEGIES["none"](), images, settings, CPU, precision))

    first = make()
    columns = fake_columns(images, range(12), label=[0, 1, 2])
    columns["feature.x"][:] = torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(0)).numpy()
    examples = first.examples(columns)
    for _ in range(3):
        first.step(examples)
    second, tensors = make(), first.tensors()
    contiguous = {part: {key: value.contiguous() for key, value in each.items()} for part, each in tensors.items()}
    second.restore(contiguous, first.state())
    for trainer in (first, second):
        for _ in range(3):
            trainer.step(examples)
    expected = first.snapshot()
    assert all(torch.equal(value, expected[key]) for key, value in second.snapshot().items())
    weight = next(second.model.parameters())
    assert weight.is_contiguous(memory_format=torch.channels_last)
    moments = [value for value in second.tensors()["optimizer"].values() if value.shape == weight.shape]
    assert all(value.is_contiguous(memory_format=torch.channels_last) for value in moments)
