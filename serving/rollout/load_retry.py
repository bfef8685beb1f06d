"""When to try again to load versions that could not be loaded for now, such as on a disk that is away.

What is wrong with a version's contents is no matter of this module: such a version is refused until they change.
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
    """Return whether the same may work later; raises the error when it is a bug."""
    failure = failure_of(error)
    if failure is None:
        raise error
    return failure is not Failure.DAMAGED


class Retries:
    """Versions that failed to load and may load later, each with a back-off of its own. Used by one thread at a time.

    A version may be tried again at once after its first failure, then after a second, then after twice as long each
    time, up to half a minute. It is tried for ever.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: dict[int, _Failed] = {}

    @property
    def reason(self) -> str | None:
        """Why the newest of them failed; None when there is none."""
        return self._failed[max(self._failed)].reason if self._failed else None

    def reason_of(self, number: int) -> str | None:
        """Return why a version failed; None when it did not."""
        return self._failed[number].reason if number in self._failed else None

    def waits(self, number: int) -> bool:
        """Return whether it is too early to try a version again."""
        return number in self._failed and self._clock() < self._failed[number].due

    def next(self) -> timedelta | None:
        """Return how long it is until a version is to be tried again; None when there is none."""
        if not self._failed:
            return None
        due = min(each.due for each in self._failed.values())
        return timedelta(seconds=max(0.0, due - self._clock()))

    def failed(self, number: int, reason: str) -> None:
        """Count a failure, and set when the version is to be tried again."""
        before = self._failed.get(number)
        backoff = Backoff(_FIRST, _LONGEST, retry_at_once=True) if before is None else before.backoff
        self._failed[number] = _Failed(backoff, self._clock() + backoff.next(), reason)

    def drop(self, number: int) -> None:
        """Forget a version: it was loaded, or refused."""
        self._failed.pop(number, None)

    def clear(self) -> None:
        """Forget all versions."""
        self._failed.clear()

    def keep(self, wanted: Callable[[int], bool]) -> None:
        """Forget all versions but those that are wanted."""
        self._failed = {number: each for number, each in self._failed.items() if wanted(number)}
