"""What every optimizer promises. The subject of a check is settings: `[learner.optimizer]` with its arguments."""

import json
from collections.abc import Sequence

import torch
from torch import nn

from anabranch.learner.settings.learner import OptimizerSettings
from anabranch.learner.strategies.er import NoReplay
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.checks import Check, expect
from anabranch.testing.strategies import CLASSES, Stream, events, make_trainer, small


def _trainer(settings: OptimizerSettings, model: nn.Module | None = None) -> Trainer:
    return make_trainer(CLASSES, small() if model is None else model, NoReplay(), optimizer=settings.model_dump())


def lowers_the_loss(settings: OptimizerSettings) -> None:
    """150 steps of three classes that a line separates, by the learning rate that is given."""
    trainer, probe = _trainer(settings), events(64, 5)
    stream = Stream(trainer)

    def loss() -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(trainer.model(torch.eye(3)), torch.arange(3)))

    before = loss()
    stream.score(150)
    expect(loss() < before, f"the loss is {loss():.4g} after 150 steps, and was {before:.4g}; is lr right?")
    expect(trainer.step(probe).finite, "a step of other events is not finite")


def keeps_frozen_weights_as_they_are(settings: OptimizerSettings) -> None:
    """Weights without a gradient are not in the optimizer."""
    model = small()
    model[0].requires_grad_(False)
    before = {name: value.clone() for name, value in model[0].state_dict().items()}
    Stream(_trainer(settings, model)).score(5)
    for name, value in model[0].state_dict().items():
        expect(torch.equal(value, before[name]), f"the frozen weight {name} has changed")


def takes_no_step_that_is_not_finite(settings: OptimizerSettings) -> None:
    """Its state is the same after a step that is not finite as before."""
    trainer = _trainer(settings)
    Stream(trainer).score(3)
    before = trainer.tensors()
    bad = events(6, 2)
    bad.features["x"][1] = torch.inf
    expect(not trainer.step(bad).finite, "a step with an infinite feature counts as finite")
    for part, tensors in trainer.tensors().items():
        for key, value in tensors.items():
            expect(torch.equal(value, before[part][key]), f"a step that is not finite has changed {part} {key}")


def goes_on_from_a_checkpoint_bit_for_bit(settings: OptimizerSettings) -> None:
    """Its `state_dict` has all that a restart needs: tensors by weight, and JSON values."""
    trainer, other = _trainer(settings), _trainer(settings)
    Stream(trainer).score(30)
    tensors = {part: {key: value.clone() for key, value in each.items()} for part, each in trainer.tensors().items()}
    generators = trainer.generators()
    other.restore(tensors, json.loads(json.dumps(trainer.state())))
    for each in (trainer, other):
        each.restore_generators(*generators)
        for seed in (1, 2):
            each.step(events(12, seed))
    for name, value in trainer.snapshot().items():
        expect(torch.equal(value, other.snapshot()[name]), f"{name} differs after a restart and two steps")


CHECKS: Sequence[Check] = (
    lowers_the_loss,
    keeps_frozen_weights_as_they_are,
    takes_no_step_that_is_not_finite,
    goes_on_from_a_checkpoint_bit_for_bit,
)
