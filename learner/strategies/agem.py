"""A-GEM: a step must not raise the loss of old events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.strategies.base import Forward, MicroBatchLoss, StepWeights, Strategy, weighted
from learner.strategies.examples import Examples, concat, split_like


@dataclass(frozen=True)
class _TwoLosses(MicroBatchLoss):
    reference: Tensor | None = None
    """The mean loss of old events; None when there are none."""


class ProjectedGradient(Strategy):
    """Follows the gradient of the new events, projected so that it does not oppose that of the old ones.

    A-GEM: Chaudhry et al. 2019, "Efficient lifelong learning with A-GEM".
    """

    sees_classes = False

    def on_step_start(self) -> None:
        """Discard the old events' gradient."""
        self._reference: list[Tensor] = []

    def loss(self, forward: Forward, new: Examples, old: Sequence[Examples], whole: StepWeights) -> MicroBatchLoss:
        """Return the mean loss of the new events, and that of the old ones separately for `backward`."""
        everything, loss = [new, *old], self.learner.task.loss
        output, *outputs = split_like(forward(concat(everything).features), everything)
        total = weighted(loss(output, new.label_B), new.weight_B, whole.new)
        if not old:
            return _TwoLosses(total, output.detach())
        losses = [loss(output_R, each.label_B) for output_R, each in zip(outputs, old, strict=True)]
        parts = [weighted(*each) for each in zip(losses, (each.weight_B for each in old), whole.old, strict=True)]
        known = [each.detach() for each in losses]
        return _TwoLosses(total, output.detach(), known, reference=torch.stack(parts).sum())

    def backward(self, loss: MicroBatchLoss, scaled: Callable[[Tensor], Tensor]) -> None:
        """Add the gradients of both losses, with the same scale."""
        total = loss.total
        if isinstance(loss, _TwoLosses) and loss.reference is not None:
            gradients = torch.autograd.grad(
                scaled(loss.reference),
                self.learner.weights,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            before = self._reference or [torch.zeros_like(each) for each in gradients]
            self._reference = [sum_ + each for sum_, each in zip(before, gradients, strict=True)]
            # An overflow here has to be seen by the scaler, on all ranks: it spoils the gradient that they share.
            total = total * (1 + torch.stack([(each * 0).sum() for each in gradients]).sum())
        scaled(total).backward()  # type: ignore[no-untyped-call]

    def transform_gradients(self, scale: float) -> None:
        """Remove the component that opposes the old events' gradient; both gradients are averaged over the ranks."""
        if not self._reference:
            return
        self.learner.reduce(self._reference)
        weights = self.learner.weights
        reference = [each / scale for each in self._reference]
        gradients = [each.grad if each.grad is not None else torch.zeros_like(each) for each in weights]
        along, length = _dot(gradients, reference), _dot(reference, reference)
        # Written so that a length that is not finite spoils the step, which is then left out or done again.
        factor = torch.where((along >= 0) & length.isfinite(), 0.0, along / length)
        for weight, gradient, each in zip(weights, gradients, reference, strict=True):
            weight.grad = gradient.sub_(each * factor)


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(first, second, strict=True)]).sum()
