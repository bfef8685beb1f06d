"""What a trainer needs of the ranks that train one model together: averaging, and the layout of weights.

Both classes are those of a single rank, which has nothing to average and all weights; other layouts override them.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Tensors = Mapping[str, Tensor]


class Weights:
    """Converts between the tensors of this rank and the full tensors of a checkpoint. All ranks make the same calls."""

    sharded = False
    """Whether each rank has only a shard of them."""

    def split(self, _model: nn.Module, _output: Callable[[], Tensor], /) -> None:
        """Keep only this rank's shards of the model's parameters, which are replaced.

        The output runs the model on a few events, in evaluation mode; its result can be differentiated.
        """

    def begin_pass(self) -> None:
        """Begin a pass, which may raise on this rank alone."""

    def begin_again(self, error: Exception, /) -> None:
        """Begin the pass again after it raised: without the exchanges with other ranks that it has had already.

        Raises:
            Exception: the other ranks cannot go on, and end too.
        """

    def local_shards(self, tensors: Sequence[Tensor], /) -> list[Tensor]:
        """Return this rank's shards of parameters or gradients, as tensors that share their memory."""
        return list(tensors)

    def gradient(self, weight: nn.Parameter, /) -> Tensor | None:
        """Return this rank's shard of a weight's gradient; all ranks ask for the same weights in the same order."""
        return weight.grad

    def counts(self, _weight: nn.Parameter, /) -> bool:
        """Return whether this rank is the first of those that have the same shard of a weight."""
        return True

    def norm(self, norm: Tensor, /) -> Tensor:
        """Return the norm of the full tensors, given that of the shards that this rank counts; both are scalars."""
        return norm

    def full_tensors(
        self, tensors: Mapping[str, Tensor], _like: Mapping[str, Tensor] | None = None, /
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each tensor and the full tensor, on the device: copy it before the next step or item.

        The second mapping has the weight of which a tensor has the shape, where it is the local shard of such a tensor.
        """
        for name, value in tensors.items():
            yield name, value.detach()

    def shard_like(self, tensors: Mapping[str, Tensor], _like: Mapping[str, Tensor], /) -> dict[str, Tensor]:
        """Shard full tensors like the tensors of the same name in the second mapping; return the others unchanged."""
        return dict(tensors)


@dataclass(frozen=True)
class PassCallbacks:
    """What a pipeline calls in its passes.

    Attributes:
        before_pass: called before each pass over a micro-batch; may wait.
        autocast: returns the context in which the modules run.
        raised: returns whether the model has raised in this step on this rank.
        recorded: records an error, given the events of the pass; returns whether this rank can continue.
    """

    before_pass: Callable[[], object]
    autocast: Callable[[], contextlib.AbstractContextManager[object]]
    raised: Callable[[], bool]
    recorded: Callable[[Exception, int], bool]


class PipelineStages:
    """Runs the stages of a model on its ranks. All ranks of a pipeline make the same calls with the same events."""

    ranks: int
    """The ranks of a pipeline."""
    output_shape: tuple[int, ...]
    """Shape of the model's output for one event."""
    output_dtype: torch.dtype
    """Its dtype."""

    def run(self, features: Sequence[Tensors], loss: Callable[[int, Tensor], Tensor], callbacks: PassCallbacks) -> None:
        """Add the gradient of a step to the weights of this rank.

        Args:
            features: of each micro-batch.
            loss: takes the index of a micro-batch and the model's output for it, and returns the loss to differentiate;
                called on the last rank alone.
            callbacks: called in the passes.
        """
        raise NotImplementedError

    def share(self, values: Tensor) -> Tensor:
        """Return the sum of the values of all ranks of the pipeline, in place."""
        raise NotImplementedError


class Exchange:
    """Counts what this rank sends to average gradients, and has the state that compression keeps between passes."""

    sent_bytes: int | None = None
    """Bytes that this rank has sent to average gradients and other tensors; None: it does not count them."""

    def count_gradients(self) -> None:
        """Count the gradients of one backward pass into `sent_bytes`."""

    def reset(self) -> None:
        """Clear state that averaging keeps between passes, after a pass that was not finite on any rank."""


COLLECTIVE = "collective"
"""The name, among those of ranks, under which the time of a collective of all is measured."""


class Ranks:
    """Averages the gradients of N ranks. All ranks make the same calls in the same order."""

    size = 1
    """N: how many ranks, or groups of ranks with the same events, train on different events."""
    world = 1
    """The number of all ranks that take a step together."""
    splits_model = False
    """Whether ranks with the same events have different parts of the model."""
    forwards = 0
    """The passes that each rank has to run in the next step; 0: as many as it has micro-batches."""
    pipeline: PipelineStages | None = None
    """The stages of this rank; None where ranks have all modules. Set when the weights are split."""

    def __init__(self) -> None:
        self.weights = Weights()
        """How the weights are split over the ranks."""
        self.exchange = Exchange()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to run in training: the backward pass through it averages gradients over the ranks."""
        return model

    def shard(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer that keeps this rank's part of the state, or `optimizer` itself."""
        return optimizer

    def no_sync(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which gradients accumulate on this rank alone, for all micro-batches but the last."""
        return contextlib.nullcontext()

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the N ranks, in place; return when they can be used on the device."""

    def average_gradients(self, leaves: Sequence[nn.Parameter]) -> None:
        """Average the gradients of a step, after its last backward pass, unless that pass has averaged them."""

    def average_all(self, tensor: Tensor) -> None:
        """Average a tensor over all ranks, in place, so that all have the same bits."""

    def any(self, tensor: Tensor) -> Tensor:
        """Return where a bool tensor is true on any of all ranks."""
        return tensor

    def most(self, number: int) -> int:
        """Return the largest number of all ranks."""
        return number
