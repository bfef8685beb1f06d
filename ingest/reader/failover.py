"""Hosts that do not read their part of a stream, and are tried again beside the reading of others."""

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
"""For a host to find the topics."""
_FIRST_BACKOFF = timedelta(seconds=1)
_LONGEST_BACKOFF = timedelta(minutes=1)
_IN_A_ROW_SECONDS = 600.0

Received = Mapping[TopicPartition, tuple[Position, PartitionFingerprint]]

log = logging.getLogger(__name__)


class FailedReaders:
    """Readers that were left out, and whether they read again. One is tried at a time, in a thread."""

    def __init__(self) -> None:
        self._readers: list[BlockReader] = []
        self._probe: _Probe | None = None
        self._backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF)
        self._failed_at = self._try_at = float("-inf")
        self.problem: str | None = None
        """Why the last one was left out, while any is."""

    @property
    def unknown_fields(self) -> int:
        """Messages with fields that the schema does not know, which they read before."""
        return sum(each.unknown_fields for each in self._readers)

    @property
    def letters_dropped(self) -> Counter[str]:
        """Dead letters of theirs that were not written, by reason."""
        return sum((each.letters_dropped for each in self._readers), Counter())

    def add(self, reader: BlockReader, why: str) -> None:
        """Leave a reader out."""
        self.problem = f"another host does not read its part of the stream: {why}"
        log.warning("%s", self.problem)
        self._readers.append(reader)
        self._wait()

    def poll_recovered(self, received: Callable[[], Received]) -> BlockReader | None:
        """Return one that reads again, which is the caller's from then on; called often.

        Args:
            received: tells how far all is read, for a trial to begin there.
        """
        if self._probe is None and self._readers and time.monotonic() >= self._try_at:
            self._probe = _Probe(self._readers[0], received())
        if self._probe is None or self._probe.is_alive():
            return None
        reader, reads, self._probe = self._readers.pop(0), self._probe.reads, None
        if not reads:
            self._readers.append(reader)
            self._wait()
            return None
        if not self._readers:
            self.problem = None
        return reader

    def close(self) -> None:
        """End what is being tried."""
        if self._probe is not None:
            self._probe.end()

    def _wait(self) -> None:
        """Wait longer each time in a row."""
        now = time.monotonic()
        if now - self._failed_at >= _IN_A_ROW_SECONDS:
            self._backoff.reset()
        self._failed_at = now
        self._try_at = now + self._backoff.next()


class _Probe(threading.Thread):
    """Whether a reader finds the topics; it reads nothing."""

    def __init__(self, reader: BlockReader, received: Received) -> None:
        super().__init__(name="trial", daemon=True)
        self._reader = reader
        self.reads = False
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
            self.reads = not self._stop_asked.is_set()
        except AnabranchError as exc:
            log.info("it still does not: %s", exc)
        finally:
            self._reader.close()

    def end(self) -> None:
        self._stop_asked.set()
        self.join()
