"""Versions in an object store that cannot be used: they are tried again later, and do not block the others."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta

from anabranch.core.backoff import Backoff
from anabranch.core.failures import DamagedError, Failure, failure_of

_FIRST_PAUSE = timedelta(seconds=10)
_LONGEST_PAUSE = timedelta(minutes=10)
"""A retry copies the whole version again."""


@dataclass
class _Damage:
    sentence: str
    failures: int
    until: float
    waits: bool = True


class DamagedVersions:
    """Versions that were damaged or incomplete when they were copied. Used by one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._found: dict[int, _Damage] = {}

    @contextlib.contextmanager
    def catching(self, number: int) -> Iterator[None]:
        """Set a version aside when it is damaged, or a file of it is missing or cannot have its name."""
        try:
            yield
        except (DamagedError, OSError) as exc:
            if failure_of(exc) is not Failure.DAMAGED:
                raise
            failures = 1 + (self._found[number].failures if number in self._found else 0)
            until = self._clock() + self._backoff.seconds_after(failures)
            self._found[number] = _Damage(f"version {number} cannot be copied: {exc}", failures, until)

    def waits(self, number: int) -> bool:
        """Return whether a version is not to be tried now."""
        return number in self._found and self._found[number].waits

    def is_due(self) -> bool:
        """Return whether a version is to be tried again."""
        return any(each.waits and each.until <= self._clock() for each in self._found.values())

    def take_due(self) -> set[int]:
        """Return the versions that are to be tried again; they no longer wait."""
        due = {number for number, each in self._found.items() if each.waits and each.until <= self._clock()}
        for number in due:
            self._found[number].waits = False
        return due

    def remove(self, number: int) -> None:
        """Remove a version that was copied."""
        self._found.pop(number, None)

    def keep(self, numbers: Collection[int]) -> None:
        """Remove versions that no longer exist."""
        self._found = {number: each for number, each in self._found.items() if number in numbers}

    def latest(self) -> int:
        """Return the highest number of a damaged version; 0 without one."""
        return max(self._found, default=0)

    def sentence(self, above: int, chosen: Collection[int | None]) -> str | None:
        """Return what is wrong with the newest damaged version above a number, or among chosen ones."""
        relevant = [number for number in self._found if number > above or number in chosen]
        return self._found[max(relevant)].sentence if relevant else None
