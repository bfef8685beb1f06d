"""Completes a step with all-zero events on a rank where the model raises, so that no other rank waits for it."""

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from anabranch.core.failures import out_of_memory
from learner.model.faulty_events import RaisingEventsError, may_be_of_events
from learner.strategies.examples import Examples
from learner.training.micro_batches import idle
from learner.training.out_of_memory import free_cached_memory
from learner.training.parallelism import Ranks

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
    """Completes a step of several ranks when the model raises, or memory runs out, on one of them. It is undone then.

    With sharded weights, other ranks need this rank's shard of each next module, also while it searches for the events
    that raise: all ranks then run the passes of the search together.

    With one rank, errors are raised as they are; so are errors of a backward pass that has begun to average gradients
    of whole weights.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.able = ranks.world > 1
        """Whether `run` can complete a pass that raises."""
        self._averaged = 0
        self._skipped = 0
        self.error: Exception | None = None
        """The first error of this step on this rank."""
        self._too_large = 0
        self.shrunk = False
        """Whether a rank has run out of memory, so that ranks may differ in the size of their micro-batches."""

    def take_error(self) -> Exception | None:
        """Return the error of this step, and clear it for the next one."""
        error, self.error = self.error, None
        return error

    def take_too_large(self) -> int:
        """Return how many events ran out of memory on this rank in this step, and clear that; 0: none did."""
        rows, self._too_large = self._too_large, 0
        return rows

    @property
    def mark(self) -> float:
        """A number that is averaged over the ranks at the end of a step: NaN out of memory, infinite if it raised."""
        return math.nan if self._too_large else math.inf if self.error is not None else 0.0

    def check(self, mark: float) -> None:
        """Raise RankRaisedError if a rank has raised, by the mean of the marks of all ranks."""
        if not math.isfinite(mark):
            self.shrunk |= math.isnan(mark)
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
            ModelError: other ranks that have parts of the same modules do not raise.
            Exception: the events are not the cause, or all-zero events raise too.
        """
        self._averaged = self._skipped = 0
        self._ranks.weights.begin_pass()
        try:
            return run_pass(new, old)
        except Exception as exc:  # the user's own code may raise anything
            if not self.recorded(exc, len(new) + sum(map(len, old))):
                raise
            error = exc
        self._ranks.raise_together(error)
        traceback.clear_frames(error.__traceback__)  # they reference tensors of the pass
        if out_of_memory(error):
            free_cached_memory(new.label_B.device)
            new, old = idle(new, old)
        for label in (0, 1):
            self._skipped = self._averaged
            self._ranks.weights.repeat_pass()
            try:
                return run_pass(_zeros(new, label), [_zeros(events, label) for events in old])
            except Exception as exc:
                if not self.recorded(exc, len(new) + sum(map(len, old))):
                    raise
                self._ranks.raise_together(exc)
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

    def abandon(self) -> None:
        """Reset the modules of a single rank after a pass that raised; `run` completes those of several ranks."""
        if self._ranks.world == 1:
            self._ranks.weights.repeat_pass()

    def run_parts(self, run_pass: Pass[object], parts: Iterable[Examples]) -> None:
        """Run a pass of a search on each part, together with all other ranks where weights are sharded.

        Raises:
            Exception: of the first part that raises.
        """
        if not self._searches_together:
            for part in parts:
                run_pass(part, ())
            return
        parts = list(parts)
        passes = self._ranks.weights.largest(len(parts))
        for part in parts:
            self.run(run_pass, part, ())
        self._idle(run_pass, parts[0], passes - len(parts))
        if (error := self.take_error()) is not None:
            raise error

    @contextmanager
    def searching(self, run_pass: Pass[object], events: Examples) -> Iterator[None]:
        """Search in the block, then run passes on some of the events as long as other ranks search.

        Called by every rank, also by those that have nothing to search for.
        """
        try:
            yield
        except Exception as exc:
            if isinstance(exc, RaisingEventsError) or may_be_of_events(exc):
                self._assist(run_pass, events)
            raise
        self._assist(run_pass, events)

    @property
    def _searches_together(self) -> bool:
        return self.able and self._ranks.weights.sharded

    def _assist(self, run_pass: Pass[object], events: Examples) -> None:
        while self._searches_together and (passes := self._ranks.weights.largest(0)):
            self._idle(run_pass, events, passes)
            self.take_error()
            self.take_too_large()

    def _idle(self, run_pass: Pass[object], events: Examples, passes: int) -> None:
        for _ in range(passes):
            self.run(run_pass, *idle(events, ()))


def _zeros(events: Examples, label: int) -> Examples:
    """Return as many all-zero events of weight 0."""
    return replace(
        events,
        features={name: torch.zeros_like(value) for name, value in events.features.items()},
        label_B=torch.full_like(events.label_B, label),
        weight_B=torch.zeros_like(events.weight_B),
        output_B=None if events.output_B is None else torch.zeros_like(events.output_B),
    )
