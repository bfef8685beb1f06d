"""What a strategy is: how old events take part in a step, and what else keeps a model from forgetting.

A step is one or more micro-batches on each of one or more ranks. The loss of a micro-batch is a sum over its events
divided by what the whole step weighs (`StepWeights`), so that the gradients add up to those of one large batch.

Legend: B new events, R replayed ones, N ranks, C classes, D dimensions of an embedding. A step's old events come as
samples, each of a number of events of its own: most strategies ask for one, DER++ for two.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from learner.model.task import Task
from learner.strategies.examples import Examples, Tensors

Forward = Callable[[Mapping[str, Tensor]], Tensor]
"""Runs the model on features by name, `[B, ...]`; returns its output."""


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a model as in evaluation; its mode is as before afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@dataclass(frozen=True)
class StepWeights:
    """What a step weighs over all its micro-batches and ranks, divided by N: gradients are averaged over the ranks.

    Attributes:
        new: the sum of the weights of the new events, float32 scalar.
        old: of each sample, likewise.
        present_C: which classes are among the new events, bool `[C]`; None where labels are no classes, or the
            strategy does not look.
    """

    new: Tensor
    old: Sequence[Tensor]
    present_C: Tensor | None = None


@dataclass(frozen=True)
class MicroBatchLoss:
    """What one micro-batch says.

    Attributes:
        total: the loss to differentiate, a scalar.
        output_B: the model's output for the new events, without a gradient.
        old: of each sample the loss of its events, float `[R]` without a gradient; empty when nothing was sampled.
        new_B: the task's loss of each new event, likewise, where it was computed; None: the trainer does so.
    """

    total: Tensor
    output_B: Tensor
    old: Sequence[Tensor] = ()
    new_B: Tensor | None = None


@dataclass(frozen=True)
class StrategyContext:
    """What a strategy may use of the learner.

    Attributes:
        model: the module itself; its gradients are those of this rank until `transform_gradients`.
        task: what its output means.
        reduce: averages tensors over the ranks, in place; all ranks have to call it alike.
        rate: returns the optimizer's learning rate as it is now.
        parts: checkpoints events into parts that are small enough to go through the model at once.
        probe: features of a few made-up events, which differ.
        embed: runs the model on features; returns embeddings, float32 `[B, D]`, and its output. None when no module is
            named.
        ranks: how many there are.
    """

    model: nn.Module
    task: Task
    reduce: Callable[[Sequence[Tensor]], None]
    rate: Callable[[], float]
    parts: Callable[[Examples], Sequence[Examples]]
    probe: Tensors
    embed: Callable[[Tensors], tuple[Tensor, Tensor]] | None = None
    ranks: int = 1

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [each for each in self.model.parameters() if each.requires_grad]


class Strategy:
    """Learns from new events alone; the base of those that do more, which say where they come from.

    The first forward pass of `loss` is over the new events, with the replayed ones after them when there are any: that
    is where embeddings are taken from.
    """

    replays: ClassVar[bool] = True
    """Whether old events are sampled."""
    keeps_output: ClassVar[bool] = False
    """Whether the store keeps the model's output with each event."""
    tasks: ClassVar[frozenset[str]] = frozenset()
    """The tasks that it is made for; empty: any."""
    sees_classes: ClassVar[bool] = True
    """Whether it looks at which classes are among the new events of a step."""
    embeds: ClassVar[bool] = False
    """Whether it needs embeddings."""
    picks: ClassVar[bool] = False
    """Whether `select` chooses among the old events."""
    learns_gradient: ClassVar[bool] = True
    """Whether the optimizer takes a step; else `after_step` does what is to be done."""

    def setup(self, learner: StrategyContext) -> None:
        """Take what it needs of the learner; called once, before the first step."""
        self.learner = learner

    def samples(self, replayed: int) -> tuple[int, ...]:
        """Return how many events each sample of a step has that replays so many."""
        return (replayed,) if self.replays else ()

    def select(self, _forward: Forward, _new: Examples, _old: Sequence[Examples], /) -> Sequence[Tensor] | None:
        """Choose which of the old events to train on: int64 places for each sample; None: all. Called once a step.

        It may leave gradients behind, but no other trace in the model, also where it runs out of memory: then it is
        called again, and `StrategyContext.parts` are smaller.
        """
        return None

    def loss(self, forward: Forward, new: Examples, old: Sequence[Examples], whole: StepWeights, /) -> MicroBatchLoss:
        """Return the loss of a micro-batch; `old` is empty when nothing was sampled."""
        raise NotImplementedError

    def backward(self, loss: MicroBatchLoss, scaled: Callable[[Tensor], Tensor], /) -> None:
        """Add a micro-batch's gradient to that of the step; `scaled` multiplies by fp16's loss scale."""
        scaled(loss.total).backward()  # type: ignore[no-untyped-call]

    def on_step_start(self) -> None:
        """A step begins, or begins again: forget what `backward` has added."""

    def transform_gradients(self, scale: float, /) -> None:
        """Change the gradients of the whole step, which are averaged over the ranks and no longer scaled."""

    def after_step(self, new: Examples, output_B: Tensor, /) -> None:
        """Hear of a step that is done: its new events on this rank, and the model's output for them before it."""

    def on_drift(self) -> None:
        """Look back now, where that is otherwise done every so many steps: for who knows that the stream has changed.

        Called between steps, by every rank.
        """

    def gather(self) -> None:
        """Bring together what ranks have each of their own, for `tensors`: called by every rank before a checkpoint."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint has to keep, as tensors that later steps do not change."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep beside tensors, as JSON values."""
        return {}

    def restore(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint kept; of another strategy's nothing fits, and it begins anew."""


def weighted(loss_B: Tensor, weight_B: Tensor, whole: Tensor) -> Tensor:
    """Return a micro-batch's part of a weighted mean, of which `whole` is the sum of all weights."""
    return (loss_B * weight_B).sum() / whole.clamp_min(torch.finfo(weight_B.dtype).tiny)
