"""Online EWC: penalizes changes of weights that past events depend on."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from learner.model.factory import forward as run
from learner.model.faulty_events import may_be_of_events
from learner.strategies.base import eval_mode
from learner.strategies.er import NoReplay
from learner.strategies.examples import Examples, Tensors


class ElasticWeights(NoReplay):
    """Pulls each weight back to where it was consolidated last, by how much past events depend on it.

    Online EWC: Schwarz et al. 2018, "Progress & compress"; Kirkpatrick et al. 2017. A stream has no borders between
    tasks, so it consolidates every `every` steps. How much events depend on a weight is its squared gradient (the
    empirical Fisher information), taken from one new event per step, in evaluation mode.
    """

    def __init__(self, *, strength: float = 10.0, decay: float = 0.9, every: int = 1000) -> None:
        """Take the penalty's weight, what a consolidation leaves of earlier ones, and the steps between two of them."""
        if decay > 1:
            raise ValueError("decay has to be at most 1")
        self._strength, self._decay, self._every = strength, decay, every
        self._steps = 0
        self._sum: list[Tensor] = []
        self._sum_of_all: list[Tensor] | None = None
        self._fisher: list[Tensor] = []
        self._anchor: list[Tensor] = []

    def transform_gradients(self, _scale: float) -> None:
        """Add the gradient of the penalty, strength / 2 * sum of Fisher information * (weight - anchor)^2."""
        weights = self.learner.weights if self._anchor else []
        for weight, fisher, anchor in zip(weights, self._fisher, self._anchor, strict=True):
            pull = self._strength * fisher * (weight.detach() - anchor)
            weight.grad = pull if weight.grad is None else weight.grad.add_(pull)

    def after_step(self, new: Examples, _output_B: Tensor) -> None:
        """Add the squared gradient of one event, and consolidate every `every` steps."""
        self._add(new[:1])
        self._sum_of_all = None
        self._steps += 1
        if self._steps % self._every == 0:
            self.on_drift()

    def on_drift(self) -> None:
        """Consolidate: protect from now on what was learned since the last time. Called by every rank."""
        if not self._sum:
            return
        self.learner.reduce(self._sum)
        *sums, count = self._sum
        latest = [each / count.clamp_min(1e-9) for each in sums]
        before = self._fisher or [torch.zeros_like(each) for each in latest]
        self._fisher = [self._decay * old + new for old, new in zip(before, latest, strict=True)]
        self._anchor = [weight.detach().clone() for weight in self.learner.weights]
        self._sum, self._sum_of_all = [], None

    def _add(self, event: Examples) -> None:
        """Add the squared gradient of a single event, if there is one, and count it unless its weight is 0."""
        weights = self.learner.weights
        if not self._sum:
            self._sum = [torch.zeros_like(weight) for weight in weights] + [weights[0].new_zeros(())]
        if not len(event):
            return
        try:
            with eval_mode(self.learner.model):
                loss = self.learner.task.loss(run(self.learner.model, event.features), event.label_B).sum()
                gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        except Exception as exc:  # the user's own code may raise anything, in evaluation alone too
            if not may_be_of_events(exc):
                raise
            return  # it was trained on already; another event serves as well
        counts = (event.weight_B[0] > 0).to(weights[0])
        for sum_, gradient in zip(self._sum, [*gradients, counts], strict=True):
            # An overflow of one event would make the penalty infinite permanently.
            sum_ += counts * gradient.square().nan_to_num(nan=0.0, posinf=0.0)

    def gather(self) -> None:
        """Average the sums of the ranks into a copy, so that a checkpoint does not change later results by rounding."""
        self._sum_of_all = [each.clone() for each in self._sum]
        self.learner.reduce(self._sum_of_all)

    def tensors(self) -> dict[str, Tensor]:
        """Return Fisher information, anchors, and the sums since then over all ranks."""
        kinds = {"sum": self._sum_of_all or self._sum, "fisher": self._fisher, "anchor": self._anchor}
        return {f"{name}.{index}": each for name, tensors in kinds.items() for index, each in enumerate(tensors)}

    def state(self) -> dict[str, Any]:
        """Return the steps so far."""
        return {"steps": self._steps}

    def restore(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._steps, self._sum_of_all = state["steps"], None
        device = self.learner.weights[0].device
        self._sum, self._fisher, self._anchor = (
            _numbered(tensors, name, device) for name in ("sum", "fisher", "anchor")
        )


def _numbered(tensors: Tensors, name: str, device: torch.device) -> list[Tensor]:
    keys: Sequence[str] = [key for key in tensors if key.startswith(f"{name}.")]
    return [tensors[f"{name}.{index}"].to(device) for index in range(len(keys))]
