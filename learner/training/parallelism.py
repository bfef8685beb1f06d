"""The ranks that train one model together, as a trainer sees them."""

import contextlib
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from learner.training.weights import Weights, WholeWeights


class Ranks(Protocol):
    """How the gradients of N ranks become one. All ranks call everything alike, in the same order."""

    size: int
    """N."""
    weights: Weights
    """Where the weights lie."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to run in training: the backward pass through it averages gradients over the ranks."""
        ...

    def shard(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer to use: one that keeps its state on this rank alone, or the given."""
        ...

    def apart(self) -> contextlib.AbstractContextManager[object]:
        """Within, gradients add up on this rank alone, as those of all micro-batches but a step's last one do."""
        ...

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the ranks, in place; returns when they can be used on the device."""
        ...

    def any(self, tensor: Tensor) -> Tensor:
        """Return where a bool tensor is true on any rank."""
        ...

    def start_afresh(self) -> None:
        """Forget what averaging gradients carries from pass to pass: the last one was not finite, on all ranks."""
        ...


class Alone:
    """One rank, which has nobody to wait for."""

    size = 1

    def __init__(self) -> None:
        self.weights: Weights = WholeWeights()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module itself."""
        return model

    def shard(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer itself."""
        return optimizer

    def apart(self) -> contextlib.AbstractContextManager[object]:
        """Change nothing."""
        return contextlib.nullcontext()

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Leave them as they are."""

    def any(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def start_afresh(self) -> None:
        """Nothing is carried."""
