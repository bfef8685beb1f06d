"""Experience replay, and training without replay."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from learner.strategies.base import Forward, MicroBatchLoss, StepWeights, Strategy, weighted
from learner.strategies.examples import Examples, concat


class NoReplay(Strategy):
    """Trains on new events alone."""

    replays = False
    sees_classes = False

    def loss(self, forward: Forward, new: Examples, _old: Sequence[Examples], whole: StepWeights) -> MicroBatchLoss:
        """Return the weighted mean loss of the new events."""
        output = forward(new.features)
        losses = self.learner.task.loss(output, new.label_B)
        return MicroBatchLoss(weighted(losses, new.weight_B, whole.new), output.detach(), (), losses.detach())


class ExperienceReplay(Strategy):
    """Learns from new and replayed events in one batch (ER: Chaudhry et al. 2019, "On tiny episodic memories").

    The loss is the mean over all events of a step, in which new events have less weight the more old ones there are.
    Where the learner chooses the ratio, it is their sum divided by the weight of the new ones: replay then adds to
    what a step learns from new events, and takes nothing from it.
    """

    sees_classes = False
    teaches_old = True

    @override
    def teacher_weights(self, whole: StepWeights) -> Sequence[Tensor]:
        return [self._divisor(whole)] * (1 + len(whole.old))

    def loss(self, forward: Forward, new: Examples, old: Sequence[Examples], whole: StepWeights) -> MicroBatchLoss:
        """Return the weighted loss of new and old events together."""
        rows, everything = len(new), concat([new, *old])
        output = forward(everything.features)
        losses = self.learner.task.loss(output, everything.label_B)
        total, values = weighted(losses, everything.weight_B, self._divisor(whole)), losses.detach()
        return MicroBatchLoss(total, output[:rows].detach(), [values[rows:]] if old else (), values[:rows])

    def _divisor(self, whole: StepWeights) -> Tensor:
        """Return what the sum of losses is divided by; no step is more than twice the mean, as with a ratio of 1."""
        total = sum(whole.old, whole.new)
        return torch.maximum(whole.new, total / 2) if self.learner.adds_old else total
