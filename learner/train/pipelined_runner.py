"""The passes of a step whose model is divided into the stages of a pipeline.

All ranks of a pipeline have the same events. The last one computes the loss; then all get its results, so that the rest
of a step is as on one rank.

Legend: B new events, R replayed ones.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from anabranch.core.failures import out_of_memory
from anabranch.learner.device.out_of_memory import halve_micro_batch
from anabranch.learner.model.examples import Examples, Tensors, concat
from anabranch.learner.strategies.base import MicroBatchLoss, StepWeights
from anabranch.learner.train.micro_batches import Part, micro_batches
from anabranch.learner.train.parallelism import PassCallbacks, PipelineStages
from anabranch.learner.train.step_runner import Attempt, StepRunner

_MICRO_BATCHES = 4
"""Micro-batches per rank of a pipeline where no size is set: the fraction of time that ranks wait is then at most a
fifth (Huang et al. 2019, "GPipe")."""


class PipelinedRunner(StepRunner):
    """Runs all micro-batches of a step by the schedule of a pipeline."""

    @property
    def _pipeline(self) -> PipelineStages:
        assert self._ranks.pipeline is not None
        return self._ranks.pipeline

    @override
    def _run_parts(self, new: Examples, old: Sequence[Examples], attempt: Attempt) -> Tensor:
        parts = micro_batches(new, old, self._rows_of_micro_batch(sum(map(len, (new, *old)))))
        losses: dict[int, MicroBatchLoss] = {}

        def loss(index: int, output: Tensor) -> Tensor:
            try:
                losses[index] = self._loss_of(parts[index], output, attempt.weights)
                return self.update.scaler.scale(losses[index].total)
            except Exception as exc:  # the user's own code may raise anything
                losses.pop(index, None)
                if not self.fallback.recorded(exc, len(output)):
                    raise
            return output.sum() * 0

        features = [concat([some_new, *some_old]).features for some_new, some_old in parts]
        try:
            self._pipeline.run(features, loss, self._callbacks())
        except RuntimeError as exc:
            error = exc.__cause__ or exc  # torch raises one that has the arguments in its message
            if not isinstance(error, RuntimeError) or not out_of_memory(error):
                raise
            message = " ".join(str(error).split())
            # Raises: the other ranks wait for this one, and all have to start again.
            halve_micro_batch(max(map(_rows, features)), None, self.device, self._ranks.world, message)
        return self._share(parts, losses, attempt)

    @override
    def _measure(self, attempt: Attempt, total: Tensor, new: Examples) -> None:
        super()._measure(attempt, total, new)
        # Some stages may have no buffers.
        score, loss_new, loss, norm, *magnitude = attempt.numbers
        of_all = self._pipeline.share(sum(magnitude, norm.new_zeros(())).float())
        attempt.numbers = score, loss_new, loss, norm, of_all

    def _rows_of_micro_batch(self, rows: int) -> int:
        most = max(2, math.ceil(rows / (_MICRO_BATCHES * self._pipeline.ranks)))
        return most if self.micro_batch_size is None else self.micro_batch_size

    def _callbacks(self) -> PassCallbacks:
        fallback = self.fallback
        return PassCallbacks(self.before_pass, self.autocast, lambda: fallback.error is not None, fallback.recorded)

    def _loss_of(self, part: Part, output: Tensor, weights: StepWeights) -> MicroBatchLoss:
        """Return the strategy's loss of a micro-batch, whose output is already there."""
        new, old = part
        left = [output]

        def forward(features: Tensors) -> Tensor:
            # Strategies that run the model more than once are refused by `learner.settings.compatibility`.
            assert left
            assert _rows(features) == len(output)
            return left.pop()

        with self.autocast():
            loss = self._loss(forward, new, old, weights)
            if loss.new_B is None:
                with torch.no_grad():
                    new_B = self.task.loss(loss.output_B, new.label_B)
                return MicroBatchLoss(loss.total, loss.output_B, loss.old, new_B)
        return loss

    def _share(self, parts: Sequence[Part], losses: dict[int, MicroBatchLoss], attempt: Attempt) -> Tensor:
        """Put the results of the last rank into `attempt` on every rank; return the loss of the step."""
        shape, dtype = self._pipeline.output_shape, self._pipeline.output_dtype
        counts = [[len(new) * math.prod(shape), len(new), sum(map(len, old)), 1] for new, old in parts]
        wide = torch.promote_types(dtype, torch.float32)
        numbers = torch.zeros(sum(map(sum, counts)), dtype=wide, device=self.device)
        for index, of_part in enumerate(torch.split(numbers, [*map(sum, counts)])):
            if index in losses:
                of_part.copy_(torch.cat([piece.reshape(-1).to(wide) for piece in _pieces(losses[index])]))
        totals = []
        numbers = self._pipeline.share(numbers)
        for (new, old), of_part, n in zip(parts, torch.split(numbers, [*map(sum, counts)]), counts, strict=True):
            output, new_B, old_R, total = torch.split(of_part, n)
            attempt.output.append(output.view(len(new), *shape).to(dtype))
            attempt.new.append(new_B)
            attempt.old.append(torch.split(old_R, [*map(len, old)]) if old else ())
            totals.append(total)
        return torch.cat(totals).sum()


def _rows(features: Tensors) -> int:
    return len(next(iter(features.values())))


def _pieces(loss: MicroBatchLoss) -> list[Tensor]:
    """Return the results of a micro-batch in the order in which they are shared."""
    assert loss.new_B is not None
    return [loss.output_B, loss.new_B, *loss.old, loss.total.detach()]
