"""Passes in evaluation mode, without training."""

from functools import partial, reduce

import torch
from torch import Tensor, nn

from learner.model.factory import forward
from learner.model.faulty_events import error_of, may_be_of_events, raising
from learner.model.rng import restore_rng, rng_tensors, rng_values
from learner.strategies.base import eval_mode
from learner.strategies.examples import Examples, Tensors
from learner.training.micro_batches import LaunchContext
from learner.training.passes import Passes
from learner.training.step_snapshot import StepSnapshot


class OldEventScores:
    """Scores old events, by the passes of a trainer. Used by its thread."""

    def __init__(self, model: nn.Module, passes: Passes, launch_context: LaunchContext) -> None:
        self._model = model
        self._passes = passes
        self._launch_context = launch_context

    def __call__(self, old: Examples) -> tuple[int, float]:
        """Score old events in evaluation mode, without training on them.

        Waits for the device: the score decides how much the next step replays.

        Returns:
            How many events have a label, and that many times their mean score, weighted by importance.

        Raises:
            RaisingEventsError: model or task raises on some of them.
        """
        with self._launch_context():
            labelled, score, weight = self._scores(old, self._passes.begin())
        mean = score / weight.clamp_min(torch.finfo(torch.float32).tiny)
        rows, mean_score = torch.stack([labelled, mean]).tolist()
        return int(rows), mean_score * rows

    def _scores(self, old: Examples, before: StepSnapshot) -> Tensor:
        """Return the sums of `_scored`, or raise RaisingEventsError with the events on which model or task raises."""

        def scored(part: Examples) -> Tensor:
            self._model.eval()
            try:
                with torch.no_grad(), self._passes.autocast():
                    return self._passes.fitting(partial(self._scored, part), [[part]], before)
            finally:
                self._model.train()

        try:
            return scored(old)
        except Exception as exc:  # the user's own code may raise anything
            if not may_be_of_events(exc):
                raise
            before.restore()
            if errors := raising(len(old), lambda begin, end: scored(old[begin:end])):
                raise error_of(errors) from exc
            raise

    def _scored(self, old: Examples) -> Tensor:
        """Return how many events have a label, the sum of their weighted scores, and the sum of their weights."""
        totals = []
        for part in self._passes.parts(old):
            output_B, weight_B = self._passes.forward(part.features), part.weight_B
            score_B = self._passes.task.score(output_B, part.label_B)
            sums = (weight_B > 0).sum(), (score_B * weight_B).sum(), weight_B.sum()
            totals.append(torch.stack([value.float() for value in sums]))
        return reduce(torch.add, totals)


def evaluated(model: nn.Module, features: Tensors, device: torch.device) -> Tensor:
    """Return the output for features in evaluation mode; random generators are unchanged afterwards."""
    states = rng_tensors(device), rng_values()
    try:
        with eval_mode(model):
            return forward(model, features)
    finally:
        restore_rng(*states, device)
