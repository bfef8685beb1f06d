"""A rank on which the model raises goes on with events of zeros, so that no other rank waits for its part for ever."""

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
    """On some rank the model raised in a step; every rank raises this at the same place, once the step is through."""


class StandIn:
    """Lets a step of several ranks come to its end where the model raises on one. Nothing is learned of such a step.

    With weights in parts this cannot be: in the midst of a pass the others want this rank's part of the very next
    module. Then, and with one rank, errors are raised as they are. So they are where a backward pass raises once it has
    begun to average gradients.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._able = ranks.size > 1 and not ranks.weights.sharded
        self._averaged = 0
        self._skipped = 0
        self.error: Exception | None = None
        """What was raised first in this step, on this rank."""

    def begin(self) -> None:
        """A step begins: nothing was raised in it."""
        self.error = None

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the ranks, but for those that a pass which raised has averaged already."""
        if self._skipped:
            self._skipped -= 1
            return
        self._averaged += 1
        self._ranks.average(tensors)

    def instead(self, run: Callable[[Examples, Sequence[Examples]], _T], new: Examples, old: Sequence[Examples]) -> _T:
        """Run a pass; where it raises, note that, and run it on as many events of zeros.

        Raises:
            Exception: what may not be of the events, or what was raised on them where zeros raise too.
        """
        self._averaged = self._skipped = 0
        try:
            return run(new, old)
        except Exception as exc:  # the user's own code may raise anything
            if not self.noted(exc):
                raise
            error = exc
        traceback.clear_frames(error.__traceback__)  # which hold on to what the pass had made
        for label in (0, 1):
            self._skipped = self._averaged
            try:
                return run(_zeros(new, label), [_zeros(each, label) for each in old])
            except Exception as exc:
                if not self.noted(exc):
                    raise
        raise error

    def noted(self, error: Exception) -> bool:
        """Note what was raised, if it may be of the events and this rank can go on; else it is to be raised again."""
        noted = self._able and may_be_of_events(error)
        if noted:
            self.error = self.error or error
        return noted


def _zeros(events: Examples, label: int) -> Examples:
    """Return as many events of zeros and of no weight."""
    return replace(
        events,
        features={name: torch.zeros_like(value) for name, value in events.features.items()},
        label_B=torch.full_like(events.label_B, label),
        weight_B=torch.zeros_like(events.weight_B),
        output_B=None if events.output_B is None else torch.zeros_like(events.output_B),
    )
