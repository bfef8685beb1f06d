"""A-GEM: a step must not raise the loss of old events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from anabranch.learner.model.examples import Examples, concat, split_like
from anabranch.learner.settings.strategies import KINDS
from anabranch.learner.strategies.base import Forward, MicroBatchLoss, StepWeights, Strategy, weighted


@dataclass(frozen=True)
class _TwoLosses(MicroBatchLoss):
    reference: Tensor | None = None
    """The mean loss of old events; None when there are none."""


class ProjectedGradient(Strategy):
    """Follows the gradient of the new events, projected so that it does not oppose that of the old ones.

    A-GEM: Chaudhry et al. 2019, "Efficient lifelong learning with A-GEM".
    """

    kind = KINDS["agem"]
    sees_classes = False

    @override
    def reset(self) -> None:
        self._reference: tuple[Tensor, ...] = ()

    @override
    def loss(self, forward: Forward, new: Examples, old: Sequence[Examples], step: StepWeights) -> MicroBatchLoss:
        everything, loss = [new, *old], self.learner.task.loss
        output, *outputs = split_like(forward(concat(everything).features), everything)
        total = weighted(loss(output, new.label_B), new.weight_B, step.new)
        if not old:
            return _TwoLosses(total, output.detach())
        losses = [loss(output_R, each.label_B) for output_R, each in zip(outputs, old, strict=True)]
        parts = [weighted(*each) for each in zip(losses, (each.weight_B for each in old), step.old, strict=True)]
        known = [each.detach() for each in losses]
        return _TwoLosses(total, output.detach(), known, reference=torch.stack(parts).sum())

    @override
    def backward(self, loss: MicroBatchLoss, scaled: Callable[[Tensor], Tensor]) -> None:
        total = loss.total
        if isinstance(loss, _TwoLosses) and loss.reference is not None:
            gradients = torch.autograd.grad(
                scaled(loss.reference),
                self.learner.weights,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            self._reference = torch._foreach_add(self._reference, gradients) if self._reference else gradients
            # An overflow here has to be seen by the scaler, on all ranks: it spoils the gradient that they share.
            total = total * (1 + 0 * _sum(gradients))
        scaled(total).backward()  # type: ignore[no-untyped-call]

    @override
    @torch.no_grad()
    def transform_gradients(self, scale: Tensor | float) -> None:
        if not self._reference:
            return
        reference = self._reference
        if self.learner.ranks > 1 or isinstance(scale, Tensor) or scale != 1:
            reference = torch._foreach_div(reference, scale)
            self.learner.reduce(reference)
        weights = self.learner.weights
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        products = torch._foreach_mul(gradients, reference)
        # The sum of all products, for which there is no call: of the positive ones, less that of the negative ones.
        along = _sum(products) - 2 * _sum(torch._foreach_clamp_max(products, 0))
        length = torch.stack(torch._foreach_norm(reference)).square().sum()
        # Written so that a length that is not finite spoils the step, which is then left out or done again.
        factor = torch.where((along >= 0) & length.isfinite(), 0.0, along / length)
        torch._foreach_sub_(gradients, torch._foreach_mul(reference, factor))


def _sum(tensors: tuple[Tensor, ...]) -> Tensor:
    """Return the sum of all magnitudes."""
    return torch.stack(torch._foreach_norm(tensors, 1)).sum()
