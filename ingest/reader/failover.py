"""Readers of other hosts that failed, and are probed while the remaining readers read."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta

from anabranch.core.backoff import Backoff
from anabranch.core.errors import AnabranchError
from ingest.events.partition import TopicPartition
from ingest.events.position import PartitionFingerprint, Position
from ingest.reader.reader import BlockReader

PATIENCE = timedelta(seconds=30)
"""How long a host may take to find the topics."""
_FIRST_BACKOFF = timedelta(seconds=1)
_LONGEST_BACKOFF = timedelta(minutes=1)
_IN_A_ROW_SECONDS = 600.0

Received = Mapping[TopicPartition, tuple[Position, PartitionFingerprint]]

log = logging.getLogger(__name__)


class FailedReaders:
    """Readers that failed; a thread probes one at a time. Used by one thread."""

    def __init__(self) -> None:
        self._readers: list[BlockReader] = []
        self._probe: _Probe | None = None
        self._backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF)
        self._failed_at = self._try_at = float("-inf")
        self.problem: str | None = None
        """Why the last reader failed, while there is one."""

    @property
    def unknown_fields(self) -> int:
        """Messages with fields that the schema does not know, which these readers read before they failed."""
        return sum(each.unknown_fields for each in self._readers)

    @property
    def letters_dropped(self) -> Counter[str]:
        """Dead letters of these readers that were not written, by reason."""
        return sum((each.letters_dropped for each in self._readers), Counter())

    def add(self, reader: BlockReader, why: str) -> None:
        """Add a reader that failed, and why."""
        self.problem = f"another host does not read its part of the stream: {why}"
        log.warning("%s", self.problem)
        self._readers.append(reader)
        self._wait()

    def poll_recovered(self, received: Callable[[], Received]) -> BlockReader | None:
        """Remove and return a reader that works again, or return None; called often.

        Args:
            received: returns how far each partition is read, where a probe begins.
        """
        if self._probe is None and self._readers and time.monotonic() >= self._try_at:
            self._probe = _Probe(self._readers[0], received())
        if self._probe is None or self._probe.is_alive():
            return None
        reader, is_well, self._probe = self._readers.pop(0), self._probe.is_well, None
        if not is_well:
            self._readers.append(reader)
            self._wait()
            return None
        if not self._readers:
            self.problem = None
        return reader

    def close(self) -> None:
        """End the probe, if there is one."""
        if self._probe is not None:
            self._probe.end()

    def _wait(self) -> None:
        """Set when to probe next; failures in a row wait longer."""
        now = time.monotonic()
        if now - self._failed_at >= _IN_A_ROW_SECONDS:
            self._backoff.reset()
        self._failed_at = now
        self._try_at = now + self._backoff.next()


class _Probe(threading.Thread):
    """Opens a reader to see whether it finds the topics; it reads no events."""

    def __init__(self, reader: BlockReader, received: Received) -> None:
        super().__init__(name="probe-reader", daemon=True)
        self._reader = reader
        self.is_well = False
        self._received = received
        self._stop_asked = threading.Event()
        self.start()

    def run(self) -> None:
        positions = {name: position for name, (position, _) in self._received.items()}
        marks = {name: mark for name, (_, mark) in self._received.items()}
        try:
            self._reader.open(
                positions, self._stop_asked, PATIENCE, marks, range(len(positions)), owns_new_partitions=False
            )
            self.is_well = not self._stop_asked.is_set()
        except AnabranchError as exc:
            log.info("the other host still does not: %s", exc)
        finally:
            self._reader.close()

    def end(self) -> None:
        self._stop_asked.set()
        self.join()
