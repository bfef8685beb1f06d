"""Events on which the user's model or task raises: which ones they are, and how many there were lately.

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
from anabranch.core.failures import out_of_memory
from ingest.events.schema import Schema
from learner.errors import RankLostError, RankTooLargeError, tells_of_a_lost_rank
from learner.model.factory import in_one_line, sample, tensor_dtype

_DEVICE_WORDS = ("CUDA error", "device-side assert", "HIP error", "MPS error", "NCCL error")
"""What torch says of a device that answers nothing more in this process."""
_ZERO_ROWS = 3
_WINDOW = 1000
"""New events over which it is judged whether too many raise."""
_FEWEST_UNHEALTHY = 10
_UNHEALTHY_FRACTION = 0.05
_MANY_STEPS = 10
_NAMED = 5
_EVERY_SECONDS = 10.0

Check = Callable[[int, int], object]
"""Runs the model and the task on events `[begin, end)`, and raises what they raise."""

log = logging.getLogger(__name__)


class RaisingEventsError(Exception):
    """The model or the task raises on some events of a step or a probe, which was undone; without them it may not.

    Attributes:
        places: of these events, in rising order: new events first, the replayed ones after them.
        said: what was raised on the first of them, on one line.
    """

    def __init__(self, places: Sequence[int], said: str) -> None:
        super().__init__(f"the model raises on {len(places)} events: {said}")
        self.places = places
        self.said = said


def may_be_of_events(error: Exception) -> bool:
    """Whether events may be the reason: not where memory, a rank or the device is, or it has a sentence of its own."""
    if isinstance(error, AnabranchError | RankLostError | RankTooLargeError | MemoryError | RaisingEventsError):
        return False
    if not isinstance(error, RuntimeError):
        return True
    sticky = any(words in str(error) for words in _DEVICE_WORDS)
    return not (sticky or out_of_memory(error) or tells_of_a_lost_rank(error))


def raising(rows: int, check: Check) -> dict[int, str]:
    """Return what `check` raises on one line, by the place of the event.

    It is called on halves of what raises: 2 p log B times or so for p of B events. Where a part raises and neither of
    its halves does, each of its events counts as raising.

    Raises:
        Exception: what `may_be_of_events` says is of something else.
    """
    found: dict[int, str] = {}
    if rows and (error := _raised(check, 0, rows)) is not None:
        _search(0, rows, error, check, found)
    return dict(sorted(found.items()))


def _search(begin: int, end: int, error: str, check: Check, found: dict[int, str]) -> None:
    """Add the events of a part that raises."""
    if end - begin == 1:
        found[begin] = error
        return
    middle = (begin + end) // 2
    halves = [(first, last, _raised(check, first, last)) for first, last in ((begin, middle), (middle, end))]
    if all(said is None for *_, said in halves):
        found |= dict.fromkeys(range(begin, end), error)
    for first, last, said in halves:
        if said is not None:
            _search(first, last, said, check, found)


def _raised(check: Check, begin: int, end: int) -> str | None:
    try:
        check(begin, end)
    except Exception as exc:  # the user's own code may raise anything
        if not may_be_of_events(exc):
            raise
        return in_one_line(exc)
    return None


def works_on_zeros(run: Callable[[Mapping[str, Tensor], Tensor], object], schema: Schema, device: torch.device) -> bool:
    """Whether `run` raises nothing on events of zeros, as the check at start has it, with labels of 0 or of 1.

    Where every event raises, this tells a model that is broken from events that no model of its kind can take.
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


def error_of(found: Mapping[int, str]) -> RaisingEventsError:
    """Return the error that names these events, at least one."""
    return RaisingEventsError(list(found), next(iter(found.values())))


@dataclass(frozen=True)
class _Mark:
    seen: int
    """New events by then."""
    rows: int
    """New events that raised."""


class Raised:
    """Counts events that raised since the start of the process, and says so. Used by the loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: tuple[_Mark, ...] = ()
        self._said = ""
        self._quiet_until = -float("inf")
        self._untold: deque[int] = deque()
        self.new = 0
        """New events that raised."""
        self.steps_in_a_row = 0
        """Steps of which every new event raised, since one of which some did not."""

    def add(self, seen: int, rows: int, said: str) -> None:
        """Note that so many new events raised, when `seen` had come."""
        self.new += rows
        self._said = said
        recent = [mark for mark in self._marks if mark.seen > seen - _WINDOW]
        self._marks = (*recent, _Mark(seen, rows))

    def tell(self, what: str, names: Sequence[str], said: str) -> None:
        """Write into the log which events they are, at most every ten seconds."""
        if self._clock() < self._quiet_until:
            self._untold.append(len(names))
            return
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        since = f"; {sum(self._untold)} other events since the last such line" if self._untold else ""
        log.warning("the model raises on %s%s, %s%s: %s", ", ".join(names[:_NAMED]), more, what, since, said)
        self._untold.clear()
        self._quiet_until = self._clock() + _EVERY_SECONDS

    @property
    def is_all(self) -> bool:
        """Whether so many steps in a row learned nothing, since every event raised, that the model is to be doubted."""
        return self.steps_in_a_row >= _MANY_STEPS

    def problem(self, seen: int) -> str | None:
        """One sentence when too many of the new events raised lately, `seen` having come. Any thread may ask."""
        rows = sum(mark.rows for mark in self._marks if mark.seen > seen - _WINDOW)
        recent = min(seen, _WINDOW)
        if rows < _FEWEST_UNHEALTHY or rows < _UNHEALTHY_FRACTION * recent:
            return None
        held = (
            "; no checkpoint is made until it takes one, so that a restart goes on from before" if self.is_all else ""
        )
        return (
            f"the model raised on {rows} of the last {recent} new events, which are skipped: {self._said}; bound the "
            f"features in the schema, or correct the model{held}"
        )
