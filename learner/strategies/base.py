"""The contract of a strategy: how old events take part in a step, and what else reduces forgetting.

A step is one or more micro-batches on each of one or more ranks. The loss of a micro-batch is a sum over its events
divided by the weight of the whole step (`StepWeights`), so that the gradients add up to those of one large batch.

Legend: B new events, R replayed ones, N ranks, C classes, D dimensions of an embedding. A step's old events come as
samples, each with its own number of events: most strategies ask for one, DER++ for two.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anabranch.core.errors import SettingsError
from anabranch.core.failures import out_of_memory
from anabranch.core.users_code import in_one_line, name_of
from anabranch.learner.model.converter import ModelConverter
from anabranch.learner.model.examples import Examples, Tensors
from anabranch.learner.model.task import Task
from anabranch.learner.settings.strategies import StrategyKind

log = logging.getLogger(__name__)

Forward = Callable[[Mapping[str, Tensor]], Tensor]
"""Runs the model on features by name, `[B, ...]`; returns its output."""


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
        divisors: what the sums of weighted losses are divided by in `total`, of new events and of each sample; None: by
            the weights of the step.
    """

    total: Tensor
    output_B: Tensor
    old: Sequence[Tensor] = ()
    new_B: Tensor | None = None
    divisors: Sequence[Tensor] | None = None


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


class Strategy(ModelConverter):
    """Base class of strategies: a step without replay state, whose `loss` a subclass has to implement.

    One whose model grows converts it, in the learner, and in serving before weights are loaded.

    The first forward pass of `loss` has to be over the new events, followed by the replayed ones if there are any:
    embeddings are taken from it, and the weights of events whose label has not come apply to it.
    """

    kind: ClassVar[StrategyKind] = StrategyKind()
    """Its entry of the catalog `learner.settings.strategies.KINDS`."""
    teaches_old: ClassVar[bool] = False
    """Whether old events are trained on by their labels, so that the teacher's outputs for them are stored and used."""
    tasks: ClassVar[frozenset[str]] = frozenset()
    """The tasks that it supports; empty: any."""
    sees_classes: ClassVar[bool] = True
    """Whether it uses which classes are among the new events of a step."""
    warning: str | None = None
    """One sentence for `/healthz` when it cannot go on as its arguments ask for."""

    def setup(self, learner: StrategyContext) -> None:
        """Keep the parts of the learner that it uses; called once, before the first step."""
        self.learner = learner

    def samples(self, replayed: int) -> tuple[int, ...]:
        """Return the size of each sample of a step that replays `replayed` events."""
        return (replayed,) if self.kind.replays else ()

    def select(self, _forward: Forward, _new: Examples, _old: Sequence[Examples], /) -> Sequence[Tensor] | None:
        """Choose which of the old events to train on: int64 indices for each sample; None: all. Called once per step.

        It may leave gradients in the model, but must change nothing else, even when it runs out of memory: then it is
        called again, and `StrategyContext.parts` returns smaller parts.
        """
        return None

    def loss(self, forward: Forward, new: Examples, old: Sequence[Examples], step: StepWeights, /) -> MicroBatchLoss:
        """Return the loss of a micro-batch; `old` is empty when nothing was sampled."""
        raise NotImplementedError

    def backward(self, loss: MicroBatchLoss, scaled: Callable[[Tensor], Tensor], /) -> None:
        """Add a micro-batch's gradient to that of the step; `scaled` multiplies by fp16's loss scale."""
        differentiate(scaled(loss.total))

    def reset(self) -> None:
        """Undo what the passes since the last `after_step` have changed in the strategy or the model, besides gradients
        and buffers. Called before each attempt of a step, and where none is taken."""

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


def saved_state(strategy: Strategy) -> dict[str, Any]:
    """Return the state of a strategy for a checkpoint, besides tensors, with the name of its class, as JSON values."""
    return {"class": name_of(type(strategy)), **strategy.state()}


def restore_strategy(strategy: Strategy, tensors: Tensors, state: Mapping[str, Any]) -> None:
    """Restore a strategy from its tensors and `saved_state`, unless these are of another class.

    Raises:
        ValueError: the class, which may be the user's, refuses the state.
    """
    now, before = name_of(type(strategy)), state.get("class")
    if before == now:
        try:
            strategy.restore(tensors, state)
        except Exception as exc:
            if isinstance(exc, RuntimeError) and out_of_memory(exc):
                raise
            raise ValueError(f"the strategy {now} refuses its state: {in_one_line(exc)}") from exc
    elif before is not None:
        log.info("the checkpoint was made under the strategy %s: %s starts without state", before, now)


ComputeLoss = Callable[[Forward, Examples, Sequence[Examples], StepWeights], MicroBatchLoss]
"""Computes the loss of a micro-batch, as `Strategy.loss` does."""


class LossWrapper:
    """Wraps the loss of any strategy that learns by gradients, such as to add a part to it. Keeps no state."""

    def weigh(self, events: Examples) -> Examples:
        """Return new or old events of a step with their final weights, before the weights of the step are summed."""
        return events

    def loss(
        self, compute: ComputeLoss, forward: Forward, new: Examples, old: Sequence[Examples], step: StepWeights
    ) -> MicroBatchLoss:
        """Return the loss of a micro-batch, of which `compute` returns what is within this wrapper."""
        raise NotImplementedError


_ONE = torch.ones(())


def differentiate(total: Tensor) -> None:
    """Add the gradient of a scalar to those of the weights, as `Tensor.backward` does.

    Of a small model's step on a CPU, what that does around the engine is a twentieth.
    """
    if type(total) is Tensor and total.is_cpu and total.dtype is torch.float32 and not total.ndim:
        engine = torch.autograd.Variable._execution_engine
        # A copy: the gradient of a weight that is a term of the loss may have its memory, and is changed there.
        engine.run_backward((total,), (_ONE.clone(),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        total.backward()  # type: ignore[no-untyped-call]


def overrides(strategy: Strategy, method: str) -> bool:
    """Return whether a strategy has its own method of this name: those that do nothing need not be called."""
    return getattr(type(strategy), method) is not getattr(Strategy, method)


def weighted(loss_B: Tensor, weight_B: Tensor, total: Tensor) -> Tensor:
    """Return a micro-batch's part of a weighted mean; `total` is the sum of all weights of the step."""
    return (loss_B * weight_B).sum() / total.clamp_min(torch.finfo(weight_B.dtype).tiny)


_FAR = 16.0
_SPREAD = 0.1
"""How far the logarithm of the usual length moves in one step at most."""


def shortened(
    vector_BD: Tensor,
    weight_B: Tensor,
    usual: Tensor,
    reduce: Callable[[Sequence[Tensor]], None] = lambda _tensors: None,
) -> Tensor:
    """Return vectors, none of which is far longer than usual; those that are not finite become 0.

    An event whose embedding, or gradient, is a million times as long as the others would decide a class mean, a
    covariance or an importance alone. Its vector is shortened to 16 times the usual length, which is a median that
    follows the stream by a step for each batch (Robbins & Monro 1951).

    Args:
        vector_BD: of the events of a step.
        weight_B: of the events; those of weight 0 have no part in what is usual.
        usual: their usual length, a scalar on their device, 0 before the first step; it is updated in place.
        reduce: averages tensors over the ranks, where each has other events, and all have to agree.
    """
    vector_BD = torch.where(vector_BD.isfinite().all(dim=1, keepdim=True), vector_BD, 0.0)
    length_B, counts_B = torch.linalg.vector_norm(vector_BD, dim=1).to(usual.dtype), (weight_B > 0).to(usual.dtype)
    middle = length_B.median() if len(length_B) else torch.zeros_like(usual)
    sums = torch.stack([middle * counts_B.sum(), ((length_B > usual) * counts_B).sum(), counts_B.sum()])
    reduce([sums])
    first, above = sums[:2] / sums[2].clamp_min(1e-300)
    moved = torch.where(usual > 0, usual * (_SPREAD * (2 * above - 1)).exp(), first)
    usual.copy_(torch.where(sums[2] > 0, moved, usual))
    factor_B = torch.where(length_B > _FAR * usual, _FAR * usual / length_B.clamp_min(1e-300), 1.0)
    return vector_BD * factor_B[:, None].to(vector_BD.dtype)


def check_float64(device: torch.device) -> None:
    """Raise SettingsError where a device has no float64, in which sums over classes are kept."""
    if device.type == "mps":
        raise SettingsError('learner.strategy needs float64, which MPS does not support; set learner.device = "cpu"')


def add_to_class_sums(
    totals: Sequence[Tensor], embeddings: Sequence[Tensor], new: Examples, usual: Tensor, learner: StrategyContext
) -> None:
    """Add the new events of a step, on all ranks, to sums over the events of each class, in place.

    Args:
        totals: the sums of weights `[C]`, of weighted embeddings `[C, D]`, and of the weighted products of embeddings
            `[D, D]` if there is a third; all float64.
        embeddings: of the events, one part for each micro-batch.
        new: the events.
        usual: the usual length of an embedding, as for `shortened`.
        learner: averages over the ranks.
    """
    embedding_BD = shortened(torch.cat(list(embeddings)).double(), new.weight_B, usual, learner.reduce)
    weight_B1 = new.weight_B.double()[:, None]
    count_C, sum_CD, *product_DD = map(torch.zeros_like, totals)
    count_C.index_add_(0, new.label_B, weight_B1[:, 0])
    sum_CD.index_add_(0, new.label_B, weight_B1 * embedding_BD)
    parts = [count_C, sum_CD, *((weight_B1 * embedding_BD).T @ embedding_BD for _ in product_DD)]
    learner.reduce(parts)
    for total, part in zip(totals, parts, strict=True):
        # The sum, not the mean: a checkpoint may be restored on another number of ranks.
        total += part * learner.ranks
