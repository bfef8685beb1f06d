"""Collects the outputs of a step's micro-batches, and joins them.

Legend: B new events, R replayed ones, N both, D numbers of an embedding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.strategies.base import MicroBatchLoss


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
    """

    finite: bool
    loss: float
    score: float
    loss_new: float
    old_R: Tensor | None = None
    embedding_N: Tensor | None = None
    output_B: Tensor | None = None
    replayed: int = 0


@dataclass
class StepAccumulator:
    """Collects the outputs of micro-batches, one after the other."""

    total: list[Tensor] = field(default_factory=list)
    output: list[Tensor] = field(default_factory=list)
    new: list[Tensor] = field(default_factory=list)
    old: list[Sequence[Tensor]] = field(default_factory=list)
    embedding: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, loss: MicroBatchLoss, embedding_N: Tensor | None) -> None:
        """Add the outputs of a micro-batch, new events before replayed ones."""
        self.total.append(loss.total.detach())
        self.output.append(loss.output_B)
        if loss.new_B is not None:
            self.new.append(loss.new_B)
        self.old.append(loss.old)
        if embedding_N is not None:
            rows = len(loss.output_B)
            self.embedding.append((embedding_N[:rows], embedding_N[rows:]))


def collect_outputs(
    accumulated: StepAccumulator, sampled: Sequence[int], picked: Sequence[Tensor] | None, rows: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the loss of each sampled event and the embeddings of all events, in their order in the step."""
    old_R: Tensor | None = None
    samples = [cat(parts) for parts in zip(*(each for each in accumulated.old if each), strict=False)]
    if samples:
        if picked is not None:
            samples = [
                torch.full((n,), math.nan, device=losses.device).index_copy(0, places, losses.float())
                for n, places, losses in zip(sampled, picked, samples, strict=True)
            ]
        old_R = cat(samples)
    embedding_N: Tensor | None = None
    if accumulated.embedding:
        new = torch.cat([each for each, _ in accumulated.embedding])[:rows]
        old = torch.cat([each for _, each in accumulated.embedding])
        if picked is not None or len(sampled) > 1 or len(old) != sum(sampled):
            old = new.new_full((sum(sampled), new.shape[1]), math.nan)
        embedding_N = torch.cat([new, old])
    return old_R, embedding_N


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
