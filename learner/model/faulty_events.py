"""Finds and counts events on which the user's model or task raises.

Legend: B events of a step or a pass.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.core.errors import AnabranchError
from anabranch.core.failures import device_lost, out_of_memory
from anabranch.core.users_code import in_one_line
from anabranch.ingest.events.schema import Schema
from anabranch.learner.errors import RankLostError, RankTooLargeError, is_of_a_lost_rank
from anabranch.learner.model.factory import sample, tensor_dtype

_ZERO_ROWS = 3
_WINDOW = 1000
"""New events over which the fraction that raises is measured."""
_FEWEST_UNHEALTHY = 10
_UNHEALTHY_FRACTION = 0.05
_MANY_STEPS = 10
_NAMED = 5
_EVERY_SECONDS = 10.0

Check = Callable[[int, int], object]
"""Runs the model and the task on events `[begin, end)`; raises their errors."""

log = logging.getLogger(__name__)


class RaisingEventsError(Exception):
    """The model or the task raises on some events of a step or a probe, which was undone.

    Attributes:
        indices: of these events, ascending: new events first, replayed ones after them.
        message: the error on the first of them, on one line.
        of_batch: whether they are all new events of a step, one of which, or of its old events, is the cause.
    """

    def __init__(self, indices: Sequence[int], message: str, *, of_batch: bool = False) -> None:
        super().__init__(f"the model raises on {len(indices)} events: {message}")
        self.indices = indices
        self.message = message
        self.of_batch = of_batch


def may_be_of_events(error: Exception) -> bool:
    """Return whether events may be the cause: not with errors of memory, ranks or the device, nor with our own."""
    if isinstance(error, AnabranchError | RankLostError | RankTooLargeError | MemoryError | RaisingEventsError):
        return False
    if not isinstance(error, RuntimeError):
        return True
    return not (device_lost(error) or out_of_memory(error) or is_of_a_lost_rank(error))


def raising(rows: int, check: Check) -> dict[int, str]:
    """Return the errors of `check`, each on one line, by the index of the event.

    Parts that raise are halved: about 2 p log B calls for p of B events. If a part raises and neither of its halves
    does, each of its events counts as raising.

    Raises:
        Exception: an error that events do not cause, by `may_be_of_events`.
    """
    errors: dict[int, str] = {}
    if rows and (error := _raised(check, 0, rows)) is not None:
        _search(0, rows, error, check, errors)
    return dict(sorted(errors.items()))


def _search(begin: int, end: int, error: str, check: Check, errors: dict[int, str]) -> None:
    """Add the events of a part that raises to `errors`."""
    if end - begin == 1:
        errors[begin] = error
        return
    middle = (begin + end) // 2
    halves = [(first, last, _raised(check, first, last)) for first, last in ((begin, middle), (middle, end))]
    if all(message is None for *_, message in halves):
        errors |= dict.fromkeys(range(begin, end), error)
    for first, last, message in halves:
        if message is not None:
            _search(first, last, message, check, errors)


def _raised(check: Check, begin: int, end: int) -> str | None:
    try:
        check(begin, end)
    except Exception as exc:  # the user's own code may raise anything
        if not may_be_of_events(exc):
            raise
        return in_one_line(exc)
    return None


def works_on_zeros(run: Callable[[Mapping[str, Tensor], Tensor], object], schema: Schema, device: torch.device) -> bool:
    """Return whether `run` succeeds on all-zero events, as in the check at start, with labels of 0 or of 1.

    When every event raises, this shows whether the model is broken or the events are invalid for it.
    """
    features, label = sample(schema, _ZERO_ROWS, device), schema.label
    dtype = tensor_dtype(label.dtype.name)
    for value in (0, 1):
        try:
            run(features, torch.full((_ZERO_ROWS, *label.shape), value, device=device).to(dtype))
        except Exception as exc:  # the user's own code may raise anything
            if not may_be_of_events(exc):
                raise
        else:
            return True
    return False


def error_of(errors: Mapping[int, str]) -> RaisingEventsError:
    """Return the error that names these events, at least one."""
    return RaisingEventsError(list(errors), next(iter(errors.values())))


@dataclass(frozen=True)
class _Mark:
    seen: int
    """New events until then."""
    rows: int
    """New events that raised."""


class Raised:
    """Counts and logs events that raised since the start of the process. Used by the loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: tuple[_Mark, ...] = ()
        self._message = ""
        self._quiet_until = -float("inf")
        self._unlogged: deque[int] = deque()
        self.new = 0
        """New events that raised."""
        self.steps_in_a_row = 0
        """Consecutive steps in which every new event raised."""

    def add(self, seen: int, rows: int, message: str) -> None:
        """Count `rows` new events that raised, after `seen` new events in all."""
        self.new += rows
        self._message = message
        recent = [mark for mark in self._marks if mark.seen > seen - _WINDOW]
        self._marks = (*recent, _Mark(seen, rows))

    def log(self, what: str, names: Sequence[str], message: str) -> None:
        """Log which events raised, at most every ten seconds."""
        if self._clock() < self._quiet_until:
            self._unlogged.append(len(names))
            return
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        since = f"; {sum(self._unlogged)} other events since the last such line" if self._unlogged else ""
        log.warning("the model raises on %s%s, %s%s: %s", ", ".join(names[:_NAMED]), more, what, since, message)
        self._unlogged.clear()
        self._quiet_until = self._clock() + _EVERY_SECONDS

    @property
    def is_all(self) -> bool:
        """Whether every event raised in the last ten steps, so that the model is likely broken."""
        return self.steps_in_a_row >= _MANY_STEPS

    def problem(self, seen: int) -> str | None:
        """Return one sentence when too many of the last new events raised, after `seen` in all. Thread-safe."""
        rows = sum(mark.rows for mark in self._marks if mark.seen > seen - _WINDOW)
        recent = min(seen, _WINDOW)
        if rows < _FEWEST_UNHEALTHY or rows < _UNHEALTHY_FRACTION * recent:
            return None
        held = "; no checkpoint is made until it takes one, so that a restart goes on from before" * self.is_all
        return (
            f"the model raised on {rows} of the last {recent} new events, which are skipped: {self._message}; bound "
            f"the features in the schema, or correct the model{held}"
        )
