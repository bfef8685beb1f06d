"""ER-ACE: the loss of new events is over the classes present in the step, that of old ones over all classes."""

import math
from collections.abc import Sequence

from torch.nn import functional

from learner.strategies.base import Forward, MicroBatchLoss, StepWeights, Strategy, weighted
from learner.strategies.examples import Examples, concat, split_like


class AsymmetricReplay(Strategy):
    """Takes the new events' loss over the classes that the step has new events of, and the old ones' over all.

    So new events do not push down the logits of classes that are only rehearsed (ER-ACE: Caccia et al. 2022, "New
    insights on reducing abrupt representation change in online continual learning").
    """

    tasks = frozenset({"classification"})
    teaches_old = True

    def loss(self, forward: Forward, new: Examples, old: Sequence[Examples], whole: StepWeights) -> MicroBatchLoss:
        """Return the mean loss of the new events over present classes, plus that of the old ones over all."""
        everything, loss = [new, *old], self.learner.task.loss
        output, *outputs = split_like(forward(concat(everything).features), everything)
        assert whole.present_C is not None
        # An event without weight may be of a class that is not present: its own logit stays, so that it is finite.
        own_BC = functional.one_hot(new.label_B, output.shape[1]).bool()
        among_BC = output.float().masked_fill(~(whole.present_C | own_BC), -math.inf)
        total = weighted(loss(among_BC, new.label_B), new.weight_B, whole.new)
        losses = []
        for each, weight, output_R in zip(old, whole.old, outputs, strict=True):
            losses.append(loss(output_R, each.label_B))
            total = total + weighted(losses[-1], each.weight_B, weight)
        return MicroBatchLoss(total, output.detach(), [each.detach() for each in losses])
