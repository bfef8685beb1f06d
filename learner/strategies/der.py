"""DER and DER++: keeps the model's outputs for old events close to those from when they were new."""

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.strategies.base import Forward, MicroBatchLoss, StepWeights, Strategy, weighted
from learner.strategies.examples import Examples, concat, split_like


class DarkReplay(Strategy):
    """Learns from new events, and to give old ones the output that they had when they were learned.

    DER: Buzzega et al. 2020, "Dark experience for general continual learning: a strong, simple baseline".
    """

    keeps_output = True
    sees_classes = False

    def __init__(self, *, alpha: float = 0.3) -> None:
        """Take the weight of the old events' outputs; the default is the paper's for Split-CIFAR-10."""
        self._alpha = alpha

    def loss(self, forward: Forward, new: Examples, old: Sequence[Examples], whole: StepWeights) -> MicroBatchLoss:
        """Return the mean loss of the new events, plus `alpha` times the drift of the old ones' outputs."""
        everything, loss = [new, *old], self.learner.task.loss
        output, *outputs = split_like(forward(concat(everything).features), everything)
        total = weighted(loss(output, new.label_B), new.weight_B, whole.new)
        losses = []
        for index, (each, output_R) in enumerate(zip(old, outputs, strict=True)):
            total = total + self._rehearsed(index, output_R, each, whole.old[index])
            losses.append(loss(output_R.detach(), each.label_B))
        return MicroBatchLoss(total, output.detach(), losses)

    def _rehearsed(self, _index: int, output_R: Tensor, old: Examples, whole: Tensor) -> Tensor:
        """Return a sample's part of the loss."""
        return self._alpha * weighted(moved(output_R, old.output_B), old.weight_B, whole)


class DarkReplayPlus(DarkReplay):
    """Learns from the labels of other old events as well (DER++, of the same paper)."""

    def __init__(self, *, alpha: float = 0.1, beta: float = 0.5) -> None:
        """Take the weights of the old events' outputs and labels; the defaults are the paper's for Split-CIFAR-10."""
        super().__init__(alpha=alpha)
        self._beta = beta

    def samples(self, replayed: int) -> tuple[int, ...]:
        """Return two sizes: a sample for the outputs, and one for the labels."""
        return replayed, replayed

    def _rehearsed(self, index: int, output_R: Tensor, old: Examples, whole: Tensor) -> Tensor:
        if index == 0:
            return super()._rehearsed(index, output_R, old, whole)
        return self._beta * weighted(self.learner.task.loss(output_R, old.label_B), old.weight_B, whole)


def moved(output_R: Tensor, before_R: Tensor | None) -> Tensor:
    """Return the mean squared difference of each event's outputs, float32 `[R]`; 0 where the one before is NaN."""
    now = output_R.float().reshape(len(output_R), -1)
    if before_R is None:
        return torch.zeros_like(now[:, 0])
    before = before_R.reshape(now.shape)
    known = before.isfinite().all(dim=1, keepdim=True)
    return (now - torch.where(known, before, now.detach())).square().mean(dim=1)
