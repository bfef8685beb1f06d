"""Completes a step with all-zero events on a rank where the model raises, so that no other rank waits for it."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from learner.model.faulty_events import may_be_of_events
from learner.strategies.examples import Examples
from learner.training.parallelism import Ranks

_T = TypeVar("_T")


class RankRaisedError(Exception):
    """The model raised on some rank in a step; every rank raises this at the same point, at the end of the step."""


class RankFallback:
    """Completes a step of several ranks when the model raises on one of them. Such a step is undone.

    With sharded weights that is impossible: in the middle of a pass the other ranks need this rank's shard of the next
    module. Then, and with one rank, errors are raised as they are; so are errors of a backward pass that has begun to
    average gradients.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.able = ranks.size > 1 and not ranks.weights.sharded
        """Whether `run` can complete a pass that raises."""
        self._averaged = 0
        self._skipped = 0
        self.error: Exception | None = None
        """The first error of this step on this rank."""

    def take_error(self) -> Exception | None:
        """Return the error of this step, and clear it for the next one."""
        error, self.error = self.error, None
        return error

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the ranks, except those that a pass which raised has averaged already."""
        if self._skipped:
            self._skipped -= 1
            return
        self._averaged += 1
        self._ranks.average(tensors)

    def run(self, run_pass: Callable[[Examples, Sequence[Examples]], _T], new: Examples, old: Sequence[Examples]) -> _T:
        """Run a pass; if it raises, record the error and run it on as many all-zero events.

        Raises:
            Exception: the events are not the cause, or all-zero events raise too.
        """
        self._averaged = self._skipped = 0
        try:
            return run_pass(new, old)
        except Exception as exc:  # the user's own code may raise anything
            if not self.recorded(exc):
                raise
            error = exc
        traceback.clear_frames(error.__traceback__)  # they reference tensors of the pass
        for label in (0, 1):
            self._skipped = self._averaged
            try:
                return run_pass(_zeros(new, label), [_zeros(events, label) for events in old])
            except Exception as exc:
                if not self.recorded(exc):
                    raise
        raise error

    def recorded(self, error: Exception) -> bool:
        """Record an error and return whether this rank can continue; if not, the caller has to raise it again."""
        recorded = self.able and may_be_of_events(error)
        if recorded:
            self.error = self.error or error
        return recorded


def _zeros(events: Examples, label: int) -> Examples:
    """Return as many all-zero events of weight 0."""
    return replace(
        events,
        features={name: torch.zeros_like(value) for name, value in events.features.items()},
        label_B=torch.full_like(events.label_B, label),
        weight_B=torch.zeros_like(events.weight_B),
        output_B=None if events.output_B is None else torch.zeros_like(events.output_B),
    )
