"""Completes a step of several ranks on which the model raises on one of them, so that no other rank waits for it."""

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from anabranch.core.failures import out_of_memory
from anabranch.learner.device.out_of_memory import free_cached_memory
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.faulty_events import may_be_of_events
from anabranch.learner.train.micro_batches import idle
from anabranch.learner.train.parallelism import Ranks

_T = TypeVar("_T")

Pass = Callable[[Examples, Sequence[Examples]], _T]
"""Runs a forward and a backward pass over new and old events."""


class RankRaisedError(Exception):
    """The model raised on some rank in a step; every rank raises this at the same point, at the end of the step.

    Attributes:
        out_of_memory: a rank ran out of memory; all have to repeat the step.
    """

    def __init__(self, *, out_of_memory: bool = False) -> None:
        super().__init__()
        self.out_of_memory = out_of_memory


class RankFallback:
    """Completes a step with all-zero events when the model raises, or memory runs out, on this rank. It is undone then.

    With one rank that has all weights, errors are raised as they are; so are errors of a backward pass that has begun
    to average gradients of whole weights.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.able = ranks.world > 1 or ranks.weights.sharded
        """Whether `run` can complete a pass that raises; and whether ranks exchange anything in a step."""
        self._averaged = 0
        self._skipped = 0
        self.error: Exception | None = None
        """The first error of this step on this rank."""
        self._too_large = 0

    def take_error(self) -> tuple[Exception | None, int]:
        """Return the error of this step, and how many events ran out of memory on this rank in it; clear both."""
        error, rows = self.error, self._too_large
        self.error, self._too_large = None, 0
        return error, rows

    @property
    def mark(self) -> float:
        """A number that is averaged over the ranks at the end of a step: NaN out of memory, infinite if it raised."""
        return math.nan if self._too_large else math.inf if self.error is not None else 0.0

    def check(self, mark: float) -> None:
        """Raise RankRaisedError if a rank has raised, by the mean of the marks of all ranks."""
        if not math.isfinite(mark):
            raise RankRaisedError(out_of_memory=math.isnan(mark))

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the ranks, except those that a pass which raised has averaged already."""
        if self._skipped:
            self._skipped -= 1
            return
        self._averaged += 1
        self._ranks.average(tensors)

    def run(self, run_pass: Pass[_T], new: Examples, old: Sequence[Examples]) -> _T:
        """Run a pass; if it raises, record the error and run it on all-zero events: as many, or a few without memory.

        Raises:
            Exception: the events are not the cause, or all-zero events raise too, or other ranks cannot go on.
        """
        self._averaged = self._skipped = 0
        self._ranks.weights.begin_pass()
        try:
            return run_pass(new, old)
        except Exception as exc:  # the user's own code may raise anything
            if not self.recorded(exc, len(new) + sum(map(len, old))):
                raise
            error = exc
        traceback.clear_frames(error.__traceback__)  # they reference tensors of the pass
        if out_of_memory(error):
            free_cached_memory(new.label_B.device)
            new, old = idle(new, old)
        last = error
        for label in (0, 1):
            self._skipped = self._averaged
            self._ranks.weights.begin_again(last)
            try:
                return run_pass(_zeros(new, label), [_zeros(events, label) for events in old])
            except Exception as exc:
                if not self.recorded(exc, len(new) + sum(map(len, old))):
                    raise
                last = exc
        raise error

    def recorded(self, error: Exception, rows: int) -> bool:
        """Record an error and return whether this rank can continue; if not, the caller has to raise it again.

        `rows`: events of the pass, or of what followed it, where the error was raised.
        """
        too_large = isinstance(error, RuntimeError) and out_of_memory(error)
        # Memory runs out on one rank of a split model, whose other ranks wait for activations of so many events.
        recorded = self.able and (not self._ranks.splits_model if too_large else may_be_of_events(error))
        if recorded:
            self.error = self.error or error
            self._too_large = max(self._too_large, rows if too_large else 0)
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
