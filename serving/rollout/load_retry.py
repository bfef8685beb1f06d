"""When to retry versions that could not be loaded for now, such as from an unmounted disk.

Damaged versions do not belong here: they are refused until their files change.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from anabranch.core.backoff import Backoff
from anabranch.core.failures import Failure, failure_of

_FIRST = timedelta(seconds=1)
_LONGEST = timedelta(seconds=30)


@dataclass(frozen=True)
class _Failed:
    backoff: Backoff
    due: float
    reason: str


def may_pass(error: BaseException) -> bool:
    """Return whether a retry may succeed; raises the error when it is a bug, or the device is lost."""
    failure = failure_of(error)
    if failure in (None, Failure.DEVICE):
        raise error
    return failure is not Failure.DAMAGED


class Retries:
    """Versions that failed to load and may load later, each with its own back-off. Used by one thread at a time.

    A version may be retried at once after its first failure, then after a second, then after twice as long each time,
    up to half a minute, without a limit.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: dict[int, _Failed] = {}

    @property
    def reason(self) -> str | None:
        """Why the newest failed version failed; None when no version failed."""
        return self._failed[max(self._failed)].reason if self._failed else None

    def reason_of(self, number: int) -> str | None:
        """Return why a version failed; None when it did not."""
        return self._failed[number].reason if number in self._failed else None

    def waits(self, number: int) -> bool:
        """Return whether it is too early to retry a version."""
        return number in self._failed and self._clock() < self._failed[number].due

    def next(self) -> timedelta | None:
        """Return the time until the next retry; None when no version failed."""
        if not self._failed:
            return None
        due = min(failed.due for failed in self._failed.values())
        return timedelta(seconds=max(0.0, due - self._clock()))

    def failed(self, number: int, reason: str) -> None:
        """Count a failure, and set the time of the retry."""
        before = self._failed.get(number)
        backoff = Backoff(_FIRST, _LONGEST, retry_at_once=True) if before is None else before.backoff
        self._failed[number] = _Failed(backoff, self._clock() + backoff.next(), reason)

    def remove(self, number: int) -> None:
        """Remove a version: it was loaded, or refused."""
        self._failed.pop(number, None)

    def clear(self) -> None:
        """Remove all versions."""
        self._failed.clear()

    def keep(self, condition: Callable[[int], bool]) -> None:
        """Remove all versions whose number does not fulfil a condition."""
        self._failed = {number: failed for number, failed in self._failed.items() if condition(number)}
