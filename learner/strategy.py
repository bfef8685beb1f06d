"""How old events take part in a step.

Legend: B new events, R replayed ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from learner.task import Task

Forward = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Examples:
    """Events as tensors on the learner's device: features by name `[B, ...]`, labels `[B]`, loss weights `[B]`.

    An event without a label has weight 0 and some valid label.
    """

    features: Mapping[str, Tensor]
    label_B: Tensor
    weight_B: Tensor


@dataclass(frozen=True)
class Loss:
    """The loss to differentiate, a scalar, the model's output for the B new events, and the loss of each replayed one.

    `old_R` is float `[R]` without a gradient; None when nothing was drawn.
    """

    total: Tensor
    output_B: Tensor
    old_R: Tensor | None = None


class Strategy(Protocol):
    """What a step's loss is made of. Rehearses nothing itself: the loop draws when `replays` says so.

    Its first forward pass is over the new events, with the replayed ones after them when there are any: that is where
    embeddings are taken from.
    """

    replays: bool

    def loss(self, forward: Forward, task: Task, new: Examples, old: Examples | None) -> Loss:
        """Return the loss of a step; `old` is None when nothing was drawn."""
        ...


class NoReplay:
    """Learns from new events alone; what a model without this project does."""

    replays = False

    def loss(self, forward: Forward, task: Task, new: Examples, old: Examples | None) -> Loss:
        """Weighted mean loss of the new events."""
        assert old is None
        output = forward(new.features)
        return Loss(_weighted_mean(task.loss(output, new.label_B), new.weight_B), output)


class ExperienceReplay:
    """Learns from new and replayed events in one batch (ER: Chaudhry et al. 2019, "On tiny episodic memories")."""

    replays = True

    def loss(self, forward: Forward, task: Task, new: Examples, old: Examples | None) -> Loss:
        """Weighted mean loss of new and old events together."""
        if old is None:
            return NoReplay().loss(forward, task, new, None)
        features = {name: torch.cat([value, old.features[name]]) for name, value in new.features.items()}
        output = forward(features)
        losses = task.loss(output, torch.cat([new.label_B, old.label_B]))
        rows = len(new.label_B)
        total = _weighted_mean(losses, torch.cat([new.weight_B, old.weight_B]))
        return Loss(total, output[:rows], losses[rows:].detach())


STRATEGIES: dict[str, type[Strategy]] = {"none": NoReplay, "er": ExperienceReplay}


def _weighted_mean(loss_B: Tensor, weight_B: Tensor) -> Tensor:
    return (loss_B * weight_B).sum() / weight_B.sum().clamp_min(torch.finfo(weight_B.dtype).tiny)
