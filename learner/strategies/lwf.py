"""LwF: the model is held to what an earlier version of itself says of new events."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from learner.model.task import Classification
from learner.strategies.base import Forward, MicroBatchLoss, StepWeights, eval_mode, weighted
from learner.strategies.der import moved
from learner.strategies.er import NoReplay
from learner.strategies.examples import Examples, Tensors


class Distillation(NoReplay):
    """Learns from new events, and to say of them what a snapshot of the model says, which is taken anew now and then.

    LwF: Li & Hoiem 2017, "Learning without forgetting". Classes are compared as the paper does, by probabilities at a
    temperature; other outputs by their mean squared difference.
    """

    def __init__(self, *, strength: float = 1.0, temperature: float = 2.0, every: int = 1000) -> None:
        """Take what the snapshot counts for, the temperature, and the steps between two snapshots."""
        if temperature <= 0:
            raise ValueError("temperature has to be more than 0")
        self._strength, self._temperature, self._every = strength, temperature, every
        self._steps = 0
        self._teacher: dict[str, Tensor] = {}

    def loss(self, forward: Forward, new: Examples, _old: Sequence[Examples], whole: StepWeights) -> MicroBatchLoss:
        """Mean loss of the new events, plus how far the outputs are from the snapshot's."""
        output = forward(new.features)
        losses = self.learner.task.loss(output, new.label_B)
        if self._teacher:
            losses = losses + self._strength * self._apart(output, self._told(new))
        return MicroBatchLoss(weighted(losses, new.weight_B, whole.new), output.detach())

    def after_step(self, _new: Examples, _output_B: Tensor) -> None:
        """Take a snapshot when it is time."""
        self._steps += 1
        if self._steps % self._every == 0:
            self.on_drift()

    def on_drift(self) -> None:
        """Take a snapshot of the model now, the mean of the ranks'."""
        self._teacher = {name: value.detach().clone() for name, value in self._now().items()}
        self.learner.reduce([value for value in self._teacher.values() if value.is_floating_point()])

    def _told(self, new: Examples) -> Tensor:
        """Return what the snapshot says, as in evaluation."""
        features, model = new.features, self.learner.model
        arguments, named = (tuple(features.values()), {}) if len(features) == 1 else ((), dict(features))
        with eval_mode(model), torch.no_grad():
            told: Tensor = functional_call(model, self._teacher, arguments, named)
        return told

    def _apart(self, output: Tensor, told: Tensor) -> Tensor:
        """Return how far each event's output is from what was told, float32 `[B]`."""
        if not isinstance(self.learner.task, Classification):
            return moved(output, told.float())
        softer, target = output.float() / self._temperature, told.float() / self._temperature
        return functional.kl_div(
            softer.log_softmax(dim=1), target.log_softmax(dim=1), reduction="none", log_target=True
        ).sum(dim=1)

    def _now(self) -> dict[str, Tensor]:
        return {**dict(self.learner.model.named_parameters()), **dict(self.learner.model.named_buffers())}

    def tensors(self) -> dict[str, Tensor]:
        """The snapshot."""
        return dict(self._teacher)

    def state(self) -> dict[str, Any]:
        """The steps so far."""
        return {"steps": self._steps}

    def restore(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._steps = state["steps"]
        now = self._now()
        self._teacher = {name: value.to(now[name].device) for name, value in tensors.items()}
