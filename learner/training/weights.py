"""Where the weights of a model lie: whole on every rank, or each rank with a part of all."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn


class Weights(Protocol):
    """How what is held of a model becomes what a cut has of it, and back. All ranks call everything alike."""

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
