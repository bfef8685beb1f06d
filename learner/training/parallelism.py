"""The ranks that train one model together, as a trainer sees them."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


class Weights(Protocol):
    """How what is held of a model becomes what a checkpoint has of it, and back. All ranks call everything alike."""

    sharded: bool
    """Whether no rank has all of them."""

    def split(self, model: nn.Module) -> None:
        """Let each rank keep its part of the model's parameters, which are others from then on."""
        ...

    def rounds(self, n: int) -> int:
        """Return how often this rank has to run the model in a step of which it has n parts."""
        ...

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what this rank has of parameters or gradients, as tensors that share their memory."""
        ...

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of whole tensors by that of this rank's parts, both scalars."""
        ...

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of tensors, whole, on the device."""
        ...

    def mine(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors as they lie on this rank: each as the one of its name does, if that has its shape."""
        ...


class WholeWeights:
    """Every rank has all of them."""

    sharded = False

    def split(self, model: nn.Module) -> None:
        """Leave the model as it is."""

    def rounds(self, n: int) -> int:
        """As often as it has parts."""
        return n

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors."""
        return list(tensors)

    def norm(self, norm: Tensor) -> Tensor:
        """Return it."""
        return norm

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies."""
        return {name: value.detach().clone() for name, value in tensors.items()}

    def mine(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the tensors."""
        return dict(tensors)


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
