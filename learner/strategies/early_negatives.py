"""Training on events before their label comes: each is a negative at first, and a positive once its label says so.

A step then sees more negatives than there are, and each positive twice. Importance weights correct for that (FNW: Ktena
et al. 2019, "Addressing delayed feedback for continuous training with neural networks in CTR prediction"). f is the
probability of a positive that the model computes in the same pass: a negative that came early weighs (1 - f)(1 + f),
and an event that is corrected to a positive 1 + f. For f = p, the true probability given the features, the expected
gradient is that of the true labels. The weights are numbers: no gradient flows through them.

An event that was trained on as a negative with weight 1, since it timed out, weighs 1 / (1 - f) when its label comes
after all: with respect to the logits this is the gradient of the positive minus that of the negative, which is taken
back.

The alternative, FNC, trains without weights, and computes p = b / (1 - b) from the model's output b when it is served.
Then the versions would predict b: every tool that reads a version would have to compute p.

Legend: B new events, N all events of a pass.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Label
from anabranch.learner.model.examples import EARLY, Early, Examples
from anabranch.learner.model.task import Classification, Task
from anabranch.learner.strategies.base import ComputeLoss, Forward, LossWrapper, MicroBatchLoss, StepWeights, Strategy
from anabranch.learner.strategies.er import AsymmetricReplay


def trained_first(columns: Mapping[str, Array], output_B: Tensor | None) -> tuple[Mapping[str, Array], Tensor | None]:
    """Return the columns, and the model's output, of those of B events that no step has trained on before."""
    if EARLY not in columns:
        return columns, output_B
    first = np.less_equal(columns[EARLY], Early.NEGATIVE)
    output = None if output_B is None else output_B[torch.from_numpy(first).to(output_B.device)]
    return {name: column[first] for name, column in columns.items()}, output


def check_early(task: Task, label: Label, strategy: Strategy, name: str) -> None:
    """Check that events can be trained on before their label comes.

    Args:
        task: the meaning of the model's output.
        label: of the schema.
        strategy: trains on them.
        name: of the strategy, in the settings.

    Raises:
        SettingsError: labels are not of two classes, or the weights have no effect under the strategy.
    """
    setting = 'stream.labels.early = "negative-then-correct"'
    if not isinstance(task, Classification) or label.one_of != 2:
        found = "labels are numbers" if label.classes is None else f"there are {label.classes} classes"
        found = "an event has several classes" if label.multi else found
        raise SettingsError(
            f"{setting} trains on events as negatives until their label comes, which needs model.task = "
            f'"classification" and schema.label.classes = 2; here {found}: set early = "none"'
        )
    if not strategy.kind.learns_gradient or isinstance(strategy, AsymmetricReplay):
        # ER-ACE: a step without positives leaves out its negatives, and so the weights are those of other events.
        raise SettingsError(
            f'{setting} weighs the gradient of each event\'s loss, which learner.strategy = "{name}" does not compute: '
            'set early = "none", or take the strategy "er"'
        )


def importance(output_B: Tensor, early_B: Tensor) -> Tensor:
    """Return the weight of each event in the gradient, float32 `[B]`, from logits `[B, 2]` and `Early` values `[B]`."""
    positive_B = output_B.detach().float().softmax(dim=1)[:, 1]
    more_B = 1 + positive_B
    least = torch.finfo(torch.float32).eps
    weight_B = torch.where(early_B == Early.NEGATIVE, (1 - positive_B) * more_B, 1.0)
    weight_B = torch.where(early_B == Early.TAKEN_BACK, 1 / (1 - positive_B).clamp_min(least), weight_B)
    return torch.where(early_B == Early.CORRECTED, more_B, weight_B)


class ImportanceWeights(LossWrapper):
    """Multiplies the gradient of the output for each new event by its importance.

    The first pass of a strategy is over the B new events, followed by replayed ones, whose gradient stays. A factor of
    an event's output multiplies its part of the gradient of all weights, whatever the strategy's loss is; losses and
    scores that are reported stay those of the labels.
    """

    @override
    def loss(
        self, compute: ComputeLoss, forward: Forward, new: Examples, old: Sequence[Examples], step: StepWeights
    ) -> MicroBatchLoss:
        if (early_B := new.early_B) is None:
            return compute(forward, new, old, step)
        calls = 0

        def run(features: Mapping[str, Tensor]) -> Tensor:
            nonlocal calls
            output_N = forward(features)
            calls += 1
            if calls == 1 and output_N.requires_grad:
                rows = len(early_B)
                weight_B1 = importance(output_N[:rows], early_B).unsqueeze(1)
                weight_N1 = torch.cat([weight_B1, weight_B1.new_ones(len(output_N) - rows, 1)])
                output_N.register_hook(lambda gradient_N: gradient_N * weight_N1.to(gradient_N.dtype))  # type: ignore[no-untyped-call]
            return output_N

        return compute(run, new, old, step)
