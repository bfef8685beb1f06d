"""LwF: keeps the model's outputs for new events close to those of an earlier snapshot of itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional
from typing_extensions import override

from anabranch.learner.model.examples import Examples, Tensors
from anabranch.learner.model.factory import eval_mode
from anabranch.learner.model.features.learned import is_of_features
from anabranch.learner.model.task import Classification
from anabranch.learner.model.trained_set import base_names, without
from anabranch.learner.settings.strategies import KINDS
from anabranch.learner.strategies.base import Forward, MicroBatchLoss, StepWeights, weighted
from anabranch.learner.strategies.der import moved
from anabranch.learner.strategies.er import NoReplay


class Distillation(NoReplay):
    """Learns from new events, and to give them the outputs of a snapshot of the model, which is renewed periodically.

    LwF: Li & Hoiem 2017, "Learning without forgetting". Classes are compared as the paper does, by probabilities at a
    temperature; other outputs by their mean squared difference.
    """

    kind = KINDS["lwf"]

    def __init__(self, *, strength: float = 1.0, temperature: float = 2.0, every: int = 1000) -> None:
        """Take the weight of the snapshot's outputs, the temperature, and the steps between two snapshots."""
        if temperature <= 0:
            raise ValueError("temperature has to be more than 0")
        self._strength, self._temperature, self._every = strength, temperature, every
        self._steps = 0
        self._teacher: dict[str, Tensor] = {}

    @override
    def loss(self, forward: Forward, new: Examples, _old: Sequence[Examples], step: StepWeights) -> MicroBatchLoss:
        output = forward(new.features)
        losses = self.learner.task.loss(output, new.label_B)
        if self._teacher:
            targets = [self._teacher_output(part) for part in self.learner.parts(new)]
            losses = losses + self._strength * self._distance(output, torch.cat(targets))
        return MicroBatchLoss(weighted(losses, new.weight_B, step.new), output.detach())

    @override
    def after_step(self, _new: Examples, _output_B: Tensor) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            self.on_drift()

    @override
    def on_drift(self) -> None:
        self._teacher = {name: value.detach().clone() for name, value in self._now().items()}
        weights = [value for name, value in self._teacher.items() if not is_of_features(name)]
        self.learner.reduce([value for value in weights if value.is_floating_point()])

    def _teacher_output(self, new: Examples) -> Tensor:
        """Return the snapshot's output in evaluation mode."""
        model = self.learner.model
        features = {name: value.clone() for name, value in new.features.items()}  # the model may write into them
        arguments, named = (tuple(features.values()), {}) if len(features) == 1 else ((), features)
        with eval_mode(model), torch.no_grad():
            target: Tensor = functional_call(model, self._teacher, arguments, named)
        return target

    def _distance(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the distance of each event's output from the snapshot's, float32 `[B]`."""
        if not isinstance(self.learner.task, Classification):
            return moved(output, target.float())
        softened, softened_target = output.float() / self._temperature, target.float() / self._temperature
        return functional.kl_div(
            softened.log_softmax(dim=1), softened_target.log_softmax(dim=1), reduction="none", log_target=True
        ).sum(dim=1)

    def _now(self) -> dict[str, Tensor]:
        """Return the trained parameters and all buffers: the snapshot has the same base as the model."""
        model = self.learner.model
        return without({**dict(model.named_parameters()), **dict(model.named_buffers())}, base_names(model))

    @override
    def tensors(self) -> dict[str, Tensor]:
        return dict(self._teacher)

    @override
    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    @override
    def restore(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        now = self._now()
        self._teacher = {name: value.to(now[name].device) for name, value in tensors.items()}
