"""Dead letters, and how both Kafka clients send them."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

LARGEST_LETTER = 100_000_000
"""Bytes of the largest message that a producer sends: only the broker's limit should apply."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeadLetter:
    """A message that cannot be used, unchanged, and the headers that are added to it.

    Added headers are separate, since a message may have headers of the same names.
    """

    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    added: Sequence[tuple[str, bytes]] = ()


def sanitize(letter: DeadLetter) -> DeadLetter:
    """Return the letter as kafka-python can send it, with a key or a value.

    The added headers come last, so that a reader finds them by name.
    """
    key = b"" if letter.key is None and letter.value is None else letter.key
    return DeadLetter(key, letter.value, [*letter.headers, *letter.added])


def shrink(letter: DeadLetter) -> Iterator[DeadLetter]:
    """Yield smaller forms of a letter that is too large for the broker; the last has no contents."""
    yield replace(letter, value=None, added=[*letter.added, ("anabranch-truncated", b"value")])
    yield DeadLetter(None, None, (), [*letter.added, ("anabranch-truncated", b"key, value and headers")])
    short = [header for header in letter.added if header[0] != "anabranch-rows"]
    if len(short) < len(letter.added):
        yield DeadLetter(None, None, (), [*short, ("anabranch-truncated", b"key, value, headers and rows")])


@dataclass(frozen=True)
class DeliveryError:
    """Why a letter was not acknowledged; `refused` if the letter causes it: sending it again gives the same."""

    sentence: str
    refused: bool


class DeadLetterWriter(ABC):
    """Writes dead letters, and waits until each is acknowledged. Used by one thread."""

    def __init__(self) -> None:
        self.dropped = 0
        """Letters that the broker refuses in each of their forms."""

    def send(self, letters: Sequence[DeadLetter], timeout: timedelta) -> int:
        """Return how many letters, from the first on, are acknowledged or dropped.

        A refused letter is sent again in its smaller forms; if the broker refuses all of them, it is dropped.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        for done, (letter, error) in enumerate(zip(letters, self._deliver(letters, deadline), strict=False)):
            forms = shrink(letter)
            while error is not None and error.refused:
                smaller = next(forms, None)
                if smaller is None:
                    log.debug("a dead letter is refused even without its contents: %s", error.sentence)
                    self.dropped += 1
                    error = None
                else:
                    (error,) = self._deliver([smaller], deadline)
            if error is not None:
                log.warning("dead letters wait: %s", error.sentence)
                return done
        return len(letters)

    @abstractmethod
    def _deliver(self, letters: Sequence[DeadLetter], deadline: float) -> Iterable[DeliveryError | None]:
        """Send letters, and return for each its error, or None when it is acknowledged.

        The errors may end with the first that is not `refused`. `deadline` is on the monotonic clock.
        """
