"""DER and DER++: keeps the model's outputs for old events close to those from when they were new."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from anabranch.learner.model.examples import Examples, concat, split_like
from anabranch.learner.settings.strategies import KINDS
from anabranch.learner.strategies.base import Forward, MicroBatchLoss, StepWeights, Strategy, weighted


class DarkReplay(Strategy):
    """Learns from new events, and to give old ones the output that they had when they were learned.

    DER: Buzzega et al. 2020, "Dark experience for general continual learning: a strong, simple baseline".
    """

    kind = KINDS["der"]
    sees_classes = False

    def __init__(self, *, alpha: float = 0.3) -> None:
        """Take the weight of the old events' outputs; the default is the paper's for Split-CIFAR-10."""
        self._alpha = alpha

    @override
    def loss(self, forward: Forward, new: Examples, old: Sequence[Examples], step: StepWeights) -> MicroBatchLoss:
        everything, loss = [new, *old], self.learner.task.loss
        output, *outputs = split_like(forward(concat(everything).features), everything)
        total = weighted(loss(output, new.label_B), new.weight_B, step.new)
        losses = []
        for index, (each, output_R) in enumerate(zip(old, outputs, strict=True)):
            total = total + self._rehearsed(index, output_R, each, step.old[index])
            losses.append(loss(output_R.detach(), each.label_B))
        return MicroBatchLoss(total, output.detach(), losses)

    def _rehearsed(self, _index: int, output_R: Tensor, old: Examples, total: Tensor) -> Tensor:
        """Return a sample's part of the loss."""
        return self._alpha * weighted(moved(output_R, old.output_B), old.weight_B, total)


class DarkReplayPlus(DarkReplay):
    """Learns from the labels of other old events as well (DER++, of the same paper)."""

    kind = KINDS["der++"]

    def __init__(self, *, alpha: float = 0.1, beta: float = 0.5) -> None:
        """Take the weights of the old events' outputs and labels; the defaults are the paper's for Split-CIFAR-10."""
        super().__init__(alpha=alpha)
        self._beta = beta

    @override
    def samples(self, replayed: int) -> tuple[int, ...]:
        return replayed, replayed

    @override
    def _rehearsed(self, index: int, output_R: Tensor, old: Examples, total: Tensor) -> Tensor:
        if index == 0:
            return super()._rehearsed(index, output_R, old, total)
        return self._beta * weighted(self.learner.task.loss(output_R, old.label_B), old.weight_B, total)


def moved(output_R: Tensor, before_R: Tensor | None) -> Tensor:
    """Return the mean squared difference of each event's outputs, float32 `[R]`; 0 where the one before is NaN."""
    now = output_R.float().reshape(len(output_R), -1)
    if before_R is None:
        return torch.zeros_like(now[:, 0])
    before = before_R.reshape(now.shape)
    known = before.isfinite().all(dim=1, keepdim=True)
    return (now - torch.where(known, before, now.detach())).square().mean(dim=1)
