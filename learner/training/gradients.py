"""The gradients of a step: away with them, their norm, and how far it may go."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from learner.training.weights import Weights, WholeWeights


class Gradients:
    """Those of the weights that are trained. Does what torch's own functions do, at a fraction of their cost.

    With a small model on a CPU the calls around the arithmetic are what a step takes its time for.
    """

    def __init__(self, weights: Sequence[nn.Parameter], max_norm: float, where: Weights | None = None) -> None:
        self._weights = weights
        self._max_norm = max_norm
        self._where = where or WholeWeights()

    def clear(self) -> None:
        """Forget them."""
        for weight in self._weights:
            weight.grad = None

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Scale them down to the largest norm that is allowed, bit for bit as `clip_grad_norm_` does.

        Returns:
            Their norm before, a scalar on the device; where any is allowed, up to rounding.
        """
        gradients = self._where.parts([weight.grad for weight in self._weights if weight.grad is not None])
        if not gradients:
            return self._weights[0].new_zeros(())
        if math.isinf(self._max_norm) and gradients[0].is_cpu:
            # Only whether it is finite matters then: half the time of the norms.
            squares = [torch.dot(each, each) for each in (gradient.reshape(-1) for gradient in gradients)]
            return self._where.norm(torch.stack(squares).sum().sqrt())
        norm = self._where.norm(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        if math.isinf(self._max_norm) or (norm.is_cpu and not norm.item() + 1e-6 > self._max_norm):
            return norm  # times 1 changes nothing; off the CPU, to look would be to wait
        torch._foreach_mul_(gradients, (self._max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
