"""The outputs of a step's micro-batches, and the result that they make up.

Legend: B new events, R replayed ones, N both, D numbers of an embedding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.training.optimizer_step import OptimizerStep
from learner.training.parallelism import Ranks
from learner.training.raising.rank_fallback import RankFallback
from learner.training.step_snapshot import StepSnapshot


@dataclass(frozen=True)
class StepResult:
    """The results of a step.

    Attributes:
        finite: False when loss, gradient or running statistics were not finite; weights and statistics are unchanged.
        loss: of the step on all ranks, a number.
        score: sum of the task's scores over the new events of all ranks, from predictions before training on them.
        loss_new: sum of their losses, by the same predictions.
        old_R: the loss of each event sampled, float32 `[R]` on the device, NaN where it was not trained on; None when
            nothing was sampled.
        embedding_N: embeddings of new events, then of replayed ones, float32 `[B + R, D]` on the device, NaN where it
            is not known; None unless a strategy or policy uses embeddings.
        output_B: the model's output for the new events, `[B, ...]` on the device.
        replayed: how many old events were trained on.
        rows: how many new events were trained on.
    """

    finite: bool
    loss: float
    score: float
    loss_new: float
    old_R: Tensor | None = None
    embedding_N: Tensor | None = None
    output_B: Tensor | None = None
    replayed: int = 0
    rows: int = 0


@dataclass
class StepOutputs:
    """The outputs of the passes of a step: one entry a micro-batch, new events before replayed ones."""

    output: list[Tensor] = field(default_factory=list)
    """The model's output for new events."""
    output_B: Tensor = field(init=False)
    """The same of all micro-batches, joined."""
    new: list[Tensor] = field(default_factory=list)
    """The loss of each new event, where the strategy returns it."""
    old: list[Sequence[Tensor]] = field(default_factory=list)
    """The loss of each old event, by sample."""
    embedding: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Embeddings of new and of old events."""
    numbers: Sequence[Tensor] = ()
    """Scalars on the device, until they are read back: the sums of scores and of losses of new events, then those that
    are all finite in a step that is taken: its loss, the norm of its gradient, the magnitude of the buffers."""
    loss: float = math.nan
    """Of the step, over all ranks."""
    score: float = math.nan
    """The sum of the scores of new events, over all ranks."""
    loss_new: float = math.nan
    """The sum of the losses of new events, over all ranks."""
    finite: bool = False
    """Whether the step has changed the weights."""
    picked: Sequence[Tensor] | None = None
    """Indices of the old events that were trained on, by sample; None: all."""

    def result(self, rows: int, sampled: Sequence[int]) -> StepResult:
        """Return the result of a step with `rows` new events, and samples of these sizes: joined, in their order."""
        replayed = sum(sampled) if self.picked is None else sum(map(len, self.picked))
        old_R, embedding_N = self._old_losses(sampled), self._embeddings(rows, sampled)
        return StepResult(
            *(self.finite, self.loss, self.score, self.loss_new, old_R, embedding_N, self.output_B[:rows]),
            replayed=replayed,
            rows=rows,
        )

    def _old_losses(self, sampled: Sequence[int]) -> Tensor | None:
        samples = [cat(parts) for parts in zip(*filter(None, self.old), strict=False)]
        if not samples:
            return None
        if self.picked is None:
            return cat(samples)
        return torch.cat(
            [
                torch.full((n,), math.nan, device=losses.device).index_copy(0, indices, losses.float())
                for n, indices, losses in zip(sampled, self.picked, samples, strict=True)
            ]
        )

    def _embeddings(self, rows: int, sampled: Sequence[int]) -> Tensor | None:
        if not self.embedding:
            return None
        new = torch.cat([part for part, _ in self.embedding])[:rows]
        old = torch.cat([part for _, part in self.embedding])
        if self.picked is not None or len(sampled) > 1 or len(old) != sum(sampled):
            old = new.new_full((sum(sampled), new.shape[1]), math.nan)
        return torch.cat([new, old])


def decide(
    outputs: StepOutputs,
    before: StepSnapshot,
    ranks: Ranks,
    update: OptimizerStep | None,
    fallback: RankFallback,
    before_wait: Callable[[], object],
) -> bool:
    """Read back the numbers of a step, over all ranks, and with them whether it is taken. Called by every rank.

    Args:
        outputs: gets the numbers.
        before: the state before the step.
        ranks: those that train together.
        update: updates the weights if the device decides so, before this waits for it; None: nothing does.
        fallback: has whether the model raised on this rank, or memory ran out.
        before_wait: called when all work of the step is queued, before this waits for it.

    Returns:
        Whether `update` has updated the weights.

    Raises:
        RankRaisedError: the model raised on one of the ranks.
    """
    updated, mark = False, 0.0
    if ranks.world == 1 and outputs.numbers[0].is_cpu and update is None:
        before_wait()
        outputs.score, outputs.loss_new, *deciding = map(Tensor.item, outputs.numbers)
    else:
        # Of the kind of the norm: the scores of some tasks are integers, which are neither infinite nor NaN.
        numbers = *outputs.numbers, outputs.numbers[3].new_full((), fallback.mark)
        together = torch.stack([number.float() for number in numbers])
        ranks.average_all(together)
        if update is not None:
            all_finite = torch.linalg.vector_norm(together[2:], math.inf) < math.inf
            update.apply(skip=all_finite.logical_not().float())
        before_wait()
        # The one wait for the device in a step: whether it is taken has to be known before the next.
        score, loss_new, *deciding, mark = together.tolist()
        outputs.score, outputs.loss_new = score * ranks.size, loss_new * ranks.size
        updated = update is not None
    if mark:
        fallback.check(mark)
    outputs.loss, norm, *magnitudes = deciding
    outputs.finite = math.isfinite(outputs.loss) and math.isfinite(norm)
    if outputs.finite and not all(map(math.isfinite, magnitudes)):
        # Rare: buffers have lost finite values, or have had others all along.
        outputs.finite, updated = not ranks.any(before.lost_finite()).item(), False
        if outputs.finite:
            before.expect_non_finite()
    return updated and outputs.finite


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
