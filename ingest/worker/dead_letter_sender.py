"""Sends dead letters until the broker has acknowledged them."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

from anabranch.core.backoff import Backoff
from anabranch.ingest.kafka.client import Client, Lag
from anabranch.ingest.kafka.dead_letters import DeadLetter
from anabranch.ingest.worker.lag_reporter import LagReporter

FIRST_BACKOFF = timedelta(seconds=0.1)
LONGEST_BACKOFF = timedelta(seconds=10)
_TIMEOUT = timedelta(seconds=10)
_LOG_SECONDS = 10.0
"""Time between two log lines about dead letters that were not written."""

log = logging.getLogger(__name__)


class DeadLetterSender:
    """Sends dead letters, and counts those that cannot be written."""

    def __init__(
        self, client: Client, topic: str | None, reporter: LagReporter, back_off: Callable[[Backoff, str], None]
    ) -> None:
        """`back_off` waits for the next delay, and reports a problem meanwhile."""
        self._client = client
        self._topic = topic
        self._reporter = reporter
        self._back_off = back_off
        self._dropped: Counter[str] = Counter()
        """Dead letters that were not written, by reason, and that no block has reported yet."""
        self._dropped_log = 0.0

    def send(self, letters: Sequence[DeadLetter], looped: int) -> None:
        """Send until all are acknowledged: no block is sent before its dead letters are written.

        `looped` letters more were dead letters several times already, and are not written again.
        """
        self._dropped["loop"] += looped
        dropped = self._client.letters_dropped
        backoff = Backoff(FIRST_BACKOFF, LONGEST_BACKOFF)
        problem = f'dead letters cannot be written to "{self._topic}"'
        while letters:
            letters = letters[self._client.send_dead_letters(letters, _TIMEOUT) :]
            if letters:
                self._back_off(backoff, problem)
            elif self._reporter.problem == problem:
                self._reporter.report(Lag())
        self._dropped["refused"] += self._client.letters_dropped - dropped
        self._log_dropped()

    def take_dropped(self) -> dict[str, int]:
        """Return the letters that were not written since the last call, by reason."""
        dropped = dict(+self._dropped)
        self._dropped.clear()
        return dropped

    def _log_dropped(self) -> None:
        if self._dropped.total() and time.monotonic() >= self._dropped_log:
            log.warning(
                'dead letters were not written to "%s", and their events are counted as dead-lettered all the same: '
                "%d that the broker refuses even without their contents (too large for the topic?), and %d that were "
                "dead letters several times already (do two pipelines read each other's?)",
                self._topic,
                self._dropped["refused"],
                self._dropped["loop"],
            )
            self._dropped_log = time.monotonic() + _LOG_SECONDS
