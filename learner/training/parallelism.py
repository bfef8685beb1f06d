"""What a trainer needs of the ranks that train one model together: averaging, and the layout of weights."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


class Weights(Protocol):
    """Converts between the tensors of this rank and the full tensors of a checkpoint. All ranks make the same calls."""

    sharded: bool
    """Whether each rank has only a shard of them."""

    def split(self, model: nn.Module) -> None:
        """Keep only this rank's shards of the model's parameters, which are replaced."""
        ...

    def num_forwards(self, n: int) -> int:
        """Return how many forward passes this rank has to run in a step of which it has `n` micro-batches."""
        ...

    def largest(self, n: int) -> int:
        """Return the largest `n` of the ranks that have to run the same passes: of all, or of this one."""
        ...

    def begin_pass(self) -> None:
        """Begin a pass, which may be repeated."""
        ...

    def repeat_pass(self) -> None:
        """Begin the pass again after it raised: without the exchanges with other ranks that it has had already."""
        ...

    def local_shards(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's shards of parameters or gradients, as tensors that share their memory."""
        ...

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of the full tensors, given that of this rank's shards; both are scalars."""
        ...

    def full_tensors(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each tensor and the full tensor, on the device: copy it before the next step or item."""
        ...

    def shard_like(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Shard full tensors like the tensors of the same name in `like`; return the others unchanged."""
        ...


class WholeWeights:
    """Weights that every rank has in full."""

    sharded = False

    def split(self, model: nn.Module) -> None:
        """Leave the model as it is."""

    def num_forwards(self, n: int) -> int:
        """Return `n`."""
        return n

    def largest(self, n: int) -> int:
        """Return `n`."""
        return n

    def begin_pass(self) -> None:
        """Do nothing."""

    def repeat_pass(self) -> None:
        """Do nothing: ranks exchange nothing before the backward pass."""

    def local_shards(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors."""
        return list(tensors)

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm unchanged."""
        return norm

    def full_tensors(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors themselves, in their order."""
        for name, value in tensors.items():
            yield name, value.detach()

    def shard_like(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the tensors."""
        return dict(tensors)


class Ranks(Protocol):
    """Averages the gradients of N ranks. All ranks make the same calls in the same order."""

    size: int
    """N."""
    weights: Weights
    """How the weights are split over the ranks."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to run in training: the backward pass through it averages gradients over the ranks."""
        ...

    def shard(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer that keeps this rank's part of the state, or `optimizer` itself."""
        ...

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which gradients accumulate on this rank alone, for all micro-batches but the last."""
        ...

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the ranks, in place; return when they can be used on the device."""
        ...

    def any(self, tensor: Tensor) -> Tensor:
        """Return where a bool tensor is true on any rank."""
        ...

    def reset_comm_state(self) -> None:
        """Clear state that averaging keeps between passes, after a pass that was not finite on any rank."""
        ...


class SingleRank:
    """A single rank, which has nothing to average."""

    size = 1

    def __init__(self) -> None:
        self.weights: Weights = WholeWeights()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module itself."""
        return model

    def shard(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer itself."""
        return optimizer

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Leave them as they are."""

    def any(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def reset_comm_state(self) -> None:
        """Do nothing: there is no such state."""
