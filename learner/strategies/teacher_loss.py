"""The teacher's part of a step's loss: the student's outputs are kept close to those of another model.

For classes it is the Kullback-Leibler divergence of the softened outputs, times the squared temperature (Hinton et al.
2015, "Distilling the knowledge in a neural network"); the task computes it (`learner.model.task.Distils`).

Each event counts once: an event with a label and an output of the teacher divides its weight between both, an event
with one of them has all its weight there.

Legend: B events of a group, N events of a pass: new ones, then replayed ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from anabranch.learner.model.examples import OUTPUT, TEACHER, Examples, split_like
from anabranch.learner.model.task import Distils
from anabranch.learner.strategies.base import (
    ComputeLoss,
    Forward,
    LossWrapper,
    MicroBatchLoss,
    StepWeights,
    Strategy,
    weighted,
)


class TeacherLoss(LossWrapper):
    """Adds the teacher's part to the loss of a strategy."""

    def __init__(self, task: Distils, weight: float, temperature: float) -> None:
        """Take `weight`, the part of an event's weight that the teacher's output has where there is a label too."""
        self._task = task
        self._weight = weight
        self._temperature = temperature

    @override
    def weigh(self, events: Examples) -> Examples:
        """Divide the weight of each event between its label and the teacher's output; outputs that are not known are 0,
        with weight 0."""
        if events.teacher_B is None:
            return events
        assert events.taught_B is not None
        assert events.labelled_B is not None
        known_B = events.teacher_B.unsqueeze(-1).flatten(1).isfinite().all(dim=1)
        known_like = known_B.reshape(-1, *[1] * (events.teacher_B.dim() - 1))
        part_B = torch.where(events.labelled_B, self._weight, 1.0)
        return replace(
            events,
            weight_B=torch.where(known_B, (1 - self._weight) * events.weight_B, events.weight_B),
            teacher_B=torch.where(known_like, events.teacher_B, 0.0),
            taught_B=torch.where(known_B, part_B * events.taught_B, 0.0),
        )

    @override
    def loss(
        self, compute: ComputeLoss, forward: Forward, new: Examples, old: Sequence[Examples], step: StepWeights
    ) -> MicroBatchLoss:
        outputs: list[Tensor] = []

        def run(features: Mapping[str, Tensor]) -> Tensor:
            output_N = forward(features)
            if not outputs:  # the first pass is over the new events, followed by replayed ones
                outputs.append(output_N)
            return output_N

        loss = compute(run, new, old, step)
        divisors = [step.new, *step.old] if loss.divisors is None else loss.divisors
        return replace(loss, total=loss.total + self._part(outputs[0], [new, *old], divisors))

    def _part(self, output_N: Tensor, groups: Sequence[Examples], divisors: Sequence[Tensor]) -> Tensor:
        """Return the teacher's part, from the outputs of all groups of events, and what each is divided by."""
        total = output_N.new_zeros((), dtype=torch.float32)
        for output_B, events, divisor in zip(split_like(output_N, groups), groups, divisors, strict=True):
            if events.teacher_B is not None and events.taught_B is not None:
                loss_B = self._task.distil(output_B, events.teacher_B, self._temperature)
                total = total + weighted(loss_B, events.taught_B, divisor)
        return total


def kept_outputs(strategy: Strategy, shape: Sequence[int], *, taught: bool) -> dict[str, list[int] | None]:
    """Return the shapes of the outputs that a store keeps with each event, by column; None: it is not kept.

    `shape`: of the model's output for one event; `taught`: whether there is a teacher. To ask the teacher again for
    replayed events would cost a pass of it for each; a stored output costs the bytes of one output.
    """
    kept = {OUTPUT: strategy.kind.keeps_output, TEACHER: taught and strategy.teaches_old}
    return {name: list(shape) if strategy.kind.replays and is_kept else None for name, is_kept in kept.items()}
