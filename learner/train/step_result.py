"""The events of steps, and their results.

Legend: B new events, R replayed ones, N both, D numbers of an embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.learner.model.examples import Examples


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


@dataclass(frozen=True)
class RoundEvents:
    """The events of consecutive steps, on the device.

    Attributes:
        new: of all steps, in order.
        old: of all steps, and of each its samples, in order; None: nothing is replayed.
        sizes: of each step, how many new events it has, and then how many of each sample.
    """

    new: Examples
    old: Examples | None
    sizes: Sequence[tuple[int, ...]]

    @classmethod
    def of_step(cls, new: Examples, old: Sequence[Examples]) -> "RoundEvents":
        """Return those of one step."""
        joined = None if not old else old[0] if len(old) == 1 else _join(old)
        return cls(new, joined, [(len(new), *map(len, old))])


def _join(parts: Sequence[Examples]) -> Examples:
    """Join the samples of a step, with all that they have."""
    rest = [iter(tensors_of(part)) for part in parts[1:]]
    return parts[0].map(lambda value: torch.cat([value, *(next(each) for each in rest)]))


def tensors_of(events: Examples) -> list[Tensor]:
    """Return all tensors of examples, in the order of `map`."""
    return [*events.features.values(), events.label_B, events.weight_B, *events.optional.values()]
