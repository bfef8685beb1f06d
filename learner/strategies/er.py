"""Experience replay, with new events over all classes or those present (ER-ACE), and training without replay."""

import math
from collections.abc import Sequence

import torch
from torch.nn import functional
from typing_extensions import override

from anabranch.learner.model.examples import Examples, concat, split_like
from anabranch.learner.settings.strategies import KINDS
from anabranch.learner.strategies.base import Forward, MicroBatchLoss, StepWeights, Strategy, weighted


class NoReplay(Strategy):
    """Trains on new events alone."""

    kind = KINDS["none"]
    sees_classes = False

    @override
    def loss(self, forward: Forward, new: Examples, _old: Sequence[Examples], step: StepWeights) -> MicroBatchLoss:
        output = forward(new.features)
        losses = self.learner.task.loss(output, new.label_B)
        return MicroBatchLoss(weighted(losses, new.weight_B, step.new), output.detach(), (), losses.detach())


class ExperienceReplay(Strategy):
    """Learns from new and replayed events in one batch (ER: Chaudhry et al. 2019, "On tiny episodic memories").

    The loss is the mean over all events of a step, in which new events have less weight the more old ones there are.
    Where the learner chooses the ratio, it is their sum divided by the weight of the new ones: replay then adds to
    what a step learns from new events, and takes nothing from it.
    """

    kind = KINDS["er"]
    sees_classes = False
    teaches_old = True

    @override
    def loss(self, forward: Forward, new: Examples, old: Sequence[Examples], step: StepWeights) -> MicroBatchLoss:
        rows, everything = len(new), concat([new, *old])
        output = forward(everything.features)
        losses = self.learner.task.loss(output, everything.label_B)
        divisor = sum(step.old, step.new)
        if self.learner.adds_old:  # no step is more than twice the mean, as with a ratio of 1
            divisor = torch.maximum(step.new, divisor / 2)
        total, values = weighted(losses, everything.weight_B, divisor), losses.detach()
        return MicroBatchLoss(
            total,
            output[:rows].detach(),
            [values[rows:]] if old else (),
            values[:rows],
            divisors=[divisor] * (1 + len(step.old)),
        )


class AsymmetricReplay(Strategy):
    """Takes the new events' loss over the classes that the step has new events of, and the old ones' over all.

    So new events do not push down the logits of classes that are only rehearsed (ER-ACE: Caccia et al. 2022, "New
    insights on reducing abrupt representation change in online continual learning").
    """

    kind = KINDS["er-ace"]
    tasks = frozenset({"classification"})
    teaches_old = True

    @override
    def loss(self, forward: Forward, new: Examples, old: Sequence[Examples], step: StepWeights) -> MicroBatchLoss:
        everything, loss = [new, *old], self.learner.task.loss
        output, *outputs = split_like(forward(concat(everything).features), everything)
        assert step.present_C is not None
        # An event without weight may be of a class that is not present: its own logit stays, so that it is finite.
        own_BC = functional.one_hot(new.label_B, output.shape[1]).bool()
        among_BC = output.float().masked_fill(~(step.present_C | own_BC), -math.inf)
        total = weighted(loss(among_BC, new.label_B), new.weight_B, step.new)
        losses = []
        for each, weight, output_R in zip(old, step.old, outputs, strict=True):
            losses.append(loss(output_R, each.label_B))
            total = total + weighted(losses[-1], each.weight_B, weight)
        return MicroBatchLoss(total, output.detach(), [each.detach() for each in losses])
