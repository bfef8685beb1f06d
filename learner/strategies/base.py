"""The contract of a strategy: how old events take part in a step, and what else reduces forgetting.

A step is one or more micro-batches on each of one or more ranks. The loss of a micro-batch is a sum over its events
divided by the weight of the whole step (`StepWeights`), so that the gradients add up to those of one large batch.

Legend: B new events, R replayed ones, N ranks, C classes, D dimensions of an embedding. A step's old events come as
samples, each with its own number of events: most strategies ask for one, DER++ for two.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ingest.events.schema import Schema
from learner.config import ModelSettings
from learner.model.task import Task
from learner.strategies.examples import Examples, Tensors

Forward = Callable[[Mapping[str, Tensor]], Tensor]
"""Runs the model on features by name, `[B, ...]`; returns its output."""


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode, and restore its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@dataclass(frozen=True)
class StepWeights:
    """The weights of a step, summed over its micro-batches and ranks and divided by N, since gradients are averaged.

    Attributes:
        new: the sum of the weights of the new events, float32 scalar.
        old: the sum of the weights of each sample, float32 scalars.
        present_C: which classes are among the new events, bool `[C]`; None where labels are no classes, or the
            strategy has `sees_classes = False`.
    """

    new: Tensor
    old: Sequence[Tensor]
    present_C: Tensor | None = None


@dataclass(frozen=True)
class MicroBatchLoss:
    """The loss and outputs of one micro-batch.

    Attributes:
        total: the loss to differentiate, a scalar.
        output_B: the model's output for the new events, without a gradient.
        old: the loss of each event, by sample, float `[R]` without a gradient; empty when nothing was sampled.
        new_B: the task's loss of each new event, `[B]` without a gradient; None: the trainer computes it.
    """

    total: Tensor
    output_B: Tensor
    old: Sequence[Tensor] = ()
    new_B: Tensor | None = None


@dataclass(frozen=True)
class StrategyContext:
    """The parts of the learner that a strategy may use.

    Attributes:
        model: the module itself; its gradients are those of this rank until `transform_gradients`.
        task: the meaning of its output.
        reduce: averages tensors over the ranks, in place; all ranks have to make the same calls.
        rate: returns the optimizer's current learning rate.
        parts: yields parts of events that are small enough for one pass of the model. Take them for every pass besides
            those of `forward` in `loss`, and run each before taking the next: device sharing may wait before each.
        probe: features of a few made-up events, which differ.
        embed: runs the model on features; returns embeddings, float32 `[B, D]`, and its output. None when no module is
            named.
        ranks: the number of ranks.
        reset_optimizer: discards what the optimizer keeps of each weight; returns what restores it.
        adds_old: whether old events add to the loss of new ones, instead of sharing one mean with them.
    """

    model: nn.Module
    task: Task
    reduce: Callable[[Sequence[Tensor]], None]
    rate: Callable[[], float]
    parts: Callable[[Examples], Iterable[Examples]]
    probe: Tensors
    embed: Callable[[Tensors], tuple[Tensor, Tensor]] | None = None
    ranks: int = 1
    reset_optimizer: Callable[[], Callable[[], object]] = lambda: bool
    adds_old: bool = False

    @cached_property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """The parameters that are trained."""
        return tuple(each for each in self.model.parameters() if each.requires_grad)


class Strategy:
    """Base class of strategies: a step without replay state, whose `loss` a subclass has to implement.

    The first forward pass of `loss` has to be over the new events, followed by the replayed ones if there are any:
    embeddings are taken from it, and the weights of events whose label has not come apply to it.
    """

    replays: ClassVar[bool] = True
    """Whether old events are sampled."""
    keeps_output: ClassVar[bool] = False
    """Whether the store keeps the model's output with each event."""
    teaches_old: ClassVar[bool] = False
    """Whether old events are trained on by their labels, so that the teacher's outputs for them are stored and used."""
    tasks: ClassVar[frozenset[str]] = frozenset()
    """The tasks that it supports; empty: any."""
    sees_classes: ClassVar[bool] = True
    """Whether it uses which classes are among the new events of a step."""
    embeds: ClassVar[bool] = False
    """Whether it needs embeddings."""
    picks: ClassVar[bool] = False
    """Whether `select` chooses among the old events."""
    learns_gradient: ClassVar[bool] = True
    """Whether the optimizer takes a step; if not, `after_step` updates the model."""
    warning: str | None = None
    """One sentence for `/healthz` when it cannot go on as its arguments ask for."""

    def extend(self, _model: nn.Module, _settings: ModelSettings, _schema: Schema, _device: torch.device, /) -> None:
        """Add to a freshly built model what the strategy trains; called in the learner, and in serving before weights
        are loaded."""

    def setup(self, learner: StrategyContext) -> None:
        """Keep the parts of the learner that it uses; called once, before the first step."""
        self.learner = learner

    def samples(self, replayed: int) -> tuple[int, ...]:
        """Return the size of each sample of a step that replays `replayed` events."""
        return (replayed,) if self.replays else ()

    def select(self, _forward: Forward, _new: Examples, _old: Sequence[Examples], /) -> Sequence[Tensor] | None:
        """Choose which of the old events to train on: int64 indices for each sample; None: all. Called once per step.

        It may leave gradients in the model, but must change nothing else, even when it runs out of memory: then it is
        called again, and `StrategyContext.parts` returns smaller parts.
        """
        return None

    def loss(self, forward: Forward, new: Examples, old: Sequence[Examples], whole: StepWeights, /) -> MicroBatchLoss:
        """Return the loss of a micro-batch; `old` is empty when nothing was sampled."""
        raise NotImplementedError

    def teacher_weights(self, whole: StepWeights, /) -> Sequence[Tensor]:
        """Return what the teacher's part of the loss of new events, and that of each sample, is divided by."""
        return [whole.new, *whole.old]

    def backward(self, loss: MicroBatchLoss, scaled: Callable[[Tensor], Tensor], /) -> None:
        """Add a micro-batch's gradient to that of the step; `scaled` multiplies by fp16's loss scale."""
        scaled(loss.total).backward()  # type: ignore[no-untyped-call]

    def on_step_start(self) -> None:
        """Prepare for a step, or for its retry: discard everything that `backward` has added."""

    def give_up(self) -> None:
        """Undo what the passes since the last `after_step` have changed in the strategy or the model, besides gradients
        and buffers: the step is not taken. May be called several times."""

    def transform_gradients(self, scale: Tensor | float, /) -> None:
        """Change the gradients of the whole step, which are averaged over the ranks and no longer scaled.

        `scale`: the factor of `scaled` in `backward`; with fp16 a scalar on the device.
        """

    def after_step(self, new: Examples, output_B: Tensor, /) -> None:
        """Update the strategy after a step, from this rank's new events and the model's output for them before it."""

    def on_drift(self) -> None:
        """Do now what is otherwise done periodically, since the stream has changed.

        Called between steps, by every rank.
        """

    def gather(self) -> None:
        """Combine the state of all ranks for `tensors`; called by every rank before a checkpoint."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint; the caller copies them before the next step may change them."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint besides tensors, as JSON values."""
        return {}

    def restore(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint of the same strategy."""


def overrides(strategy: Strategy, method: str) -> bool:
    """Return whether a strategy has its own method of this name: those that do nothing need not be called."""
    return getattr(type(strategy), method) is not getattr(Strategy, method)


def weighted(loss_B: Tensor, weight_B: Tensor, whole: Tensor) -> Tensor:
    """Return a micro-batch's part of a weighted mean; `whole` is the sum of all weights of the step."""
    return (loss_B * weight_B).sum() / whole.clamp_min(torch.finfo(weight_B.dtype).tiny)
