"""MIR: rehearses the old events whose loss the step would raise most."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from anabranch.learner.model.examples import Examples, pad_single
from anabranch.learner.settings.strategies import KINDS
from anabranch.learner.strategies.base import Forward, weighted
from anabranch.learner.strategies.er import ExperienceReplay


class InterferedReplay(ExperienceReplay):
    """Samples more old events than it takes, and takes those whose loss would rise most by learning the new ones.

    MIR: Aljundi et al. 2019, "Online continual learning with maximal interfered retrieval". The virtual step is that of
    plain SGD with the optimizer's learning rate.
    """

    kind = KINDS["mir"]

    def __init__(self, *, candidates: int = 5) -> None:
        """Take how many candidates are sampled per rehearsed event; the paper samples 50 for 10."""
        self._candidates = candidates

    @override
    def samples(self, replayed: int) -> tuple[int, ...]:
        return (replayed * self._candidates,)

    @override
    def select(self, forward: Forward, new: Examples, old: Sequence[Examples]) -> Sequence[Tensor]:
        (candidates,) = old
        n = -(-len(candidates) // self._candidates)
        before_R = self._losses(forward, candidates)
        change = torch._foreach_mul(self._gradients(forward, new), self.learner.rate())
        self.learner.reduce(change)
        weights = self.learner.weights
        with torch.no_grad():
            kept = [torch.empty_like(weight) for weight in weights]
            torch._foreach_copy_(kept, weights)
            try:
                torch._foreach_sub_(weights, change)
                del change
                torch.clear_autocast_cache()  # it caches the old weights in low precision
                rise_R = self._losses(forward, candidates) - before_R
            finally:
                torch._foreach_copy_(weights, kept)
        # A loss that is not finite after the step counts as the largest rise.
        rise_R = rise_R.nan_to_num(nan=torch.inf).masked_fill(candidates.weight_B == 0, -torch.inf)
        return [rise_R.topk(n).indices]

    def _losses(self, forward: Forward, examples: Examples) -> Tensor:
        """Return the loss of each event, `[R]`."""
        n = len(examples)
        with torch.no_grad():
            losses = [
                self.learner.task.loss(forward(each.features), each.label_B)
                for each in self.learner.parts(pad_single(examples) if n == 1 else examples)
            ]
        torch.clear_autocast_cache()  # it caches weights without a graph
        return torch.cat(losses)[:n].float()

    def _gradients(self, forward: Forward, new: Examples) -> tuple[Tensor, ...]:
        """Return this rank's part of the gradient for the virtual step: of the mean loss of all ranks' new events."""
        weights, total = self.learner.weights, tuple[Tensor, ...]()
        sum_of_weights = new.weight_B.sum()
        self.learner.reduce([sum_of_weights])
        for each in self.learner.parts(pad_single(new) if len(new) == 1 else new):
            loss = weighted(self.learner.task.loss(forward(each.features), each.label_B), each.weight_B, sum_of_weights)
            gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            total = torch._foreach_add(total, gradients) if total else gradients
        return total
