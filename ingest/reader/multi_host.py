"""One stream that several hosts read: each partition is read by one of them."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait

from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.errors import BrokerError, RecreatedError, TruncatedError
from ingest.events.block import Block
from ingest.events.partition import TopicPartition
from ingest.events.position import PartitionFingerprint, Position
from ingest.reader.assignment import assign, is_unbalanced
from ingest.reader.cursors import Partition
from ingest.reader.failover import PATIENCE, FailedReaders, Received
from ingest.reader.reader import BlockReader

_NOW = timedelta(0)
_REST_SECONDS = 0.05

log = logging.getLogger(__name__)


class MultiHostReader:
    """Reads a stream with readers on several hosts. Used by one thread, like a `BlockReader`.

    The reader of this host finds partitions, and reads those that are not assigned to other hosts. When another reader
    fails, its partitions are assigned to the remaining ones, and back once it recovers. Partitions keep their index:
    blocks and positions are the same whichever host reads.
    """

    def __init__(
        self, stream: StreamSettings, schema: SchemaSettings, hold_out: HoldOut, addresses: Sequence[str]
    ) -> None:
        """`addresses` are those of the ingest processes on other hosts."""
        self._stream = stream
        self._first = BlockReader(stream, schema, hold_out)
        self._others = [BlockReader(stream, schema, hold_out, address) for address in addresses]
        self._readers = [self._first]
        self._assignment: list[int] = []
        self._stop: threading.Event | None = None
        self._opened = False
        self._failed_readers = FailedReaders()
        self._turn = 0
        self._joined: list[Partition] = []
        self._joined_of: list[object] = []
        """The inputs of `_joined`, which stays the same list until one of them changes."""
        self._rates: Sequence[float] = ()
        """Events a second of each known partition, as last passed to `set_rates` or `rebalance`."""

    def set_rates(self, rates: Sequence[float]) -> None:
        """Set the events a second of each known partition, by which `open` assigns them."""
        self._rates = rates

    def open(
        self,
        positions: Mapping[TopicPartition, Position],
        stop: threading.Event,
        marks: Mapping[TopicPartition, PartitionFingerprint],
    ) -> None:
        """Start reading, with partitions assigned by their rates; raises what `BlockReader.open` raises."""
        self._stop = stop
        self._begin({name: (position, marks[name]) for name, position in positions.items()})

    @property
    def partitions(self) -> Sequence[Partition]:
        """All partitions, in the order of the index that blocks carry."""
        partitions = [reader.partitions for reader in self._readers]
        parts: list[object] = [self._assignment, *partitions]
        if len(parts) != len(self._joined_of) or any(a is not b for a, b in zip(parts, self._joined_of, strict=True)):
            joined = list(self._first.partitions)
            for index, reader in enumerate(self._assignment):
                if reader:
                    theirs = partitions[reader][index]
                    joined[index] = replace(joined[index], end=theirs.end, log_start=theirs.log_start)
            self._joined, self._joined_of = joined, parts
        return self._joined

    def poll(self, timeout: timedelta) -> Block | None:
        """Return the next block of any reader, in turn, or None when none comes in time; raises as one reader does."""
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            busy = [self._readers[number] for number in sorted({*self._assignment} - {0})]
            dead = [reader for reader in busy if reader.connection is None]
            if dead:
                self._continue_without(dead)
            left = max(0.0, deadline - time.monotonic())
            if any(each.waits for each in self._readers):
                left = 0.0
            elif self._first.connection is None:
                left = min(left, _REST_SECONDS)
            wait([each.connection for each in self._readers if each.connection is not None], left)
            for _ in self._readers:
                self._turn = (self._turn + 1) % len(self._readers)
                reader = self._readers[self._turn]
                if reader is self._first or reader.connection is not None:
                    block = self._poll(reader)
                    if block is not None:
                        return block
            if time.monotonic() >= deadline:
                return None

    def receive(self) -> None:
        """Receive what all processes have sent by now, without waiting."""
        for each in self._readers:
            each.receive()

    def release(self, block: Block) -> None:
        """Give a block's slot back; its columns must not be read any more."""
        for each in self._readers:
            each.release(block)

    def rebalance(self, rates: Sequence[float]) -> None:
        """Assign the partitions again when a host recovers, or when the rates are far from balanced.

        Does nothing while the broker is away: that would speed up no host.
        """
        if self._first.problem or (self._stop and self._stop.is_set()):
            return
        recovered = self._failed_readers.poll_recovered(self._received)
        if recovered is None and (rates is self._rates or not self._others):
            return
        self._rates = rates
        if recovered is not None:
            received = self._end()
            self._others.append(recovered)
            self._begin(received)
            return
        assignment = [*self._assignment, *[0] * (len(rates) - len(self._assignment))]
        if is_unbalanced(rates, assignment, 1 + len(self._others)):
            self._begin(self._end())

    def pass_over(self) -> None:
        """Continue at the end of every partition; blocks cover the skipped offsets."""
        for each in self._readers:
            each.pass_over()

    def commit(self, offsets: dict[int, int]) -> None:
        """Write positions, by index of the partition, for lag tools; best effort.

        Each reader writes those of the partitions that it reads. One that receives no message stops its lag reports.
        """
        offsets_of: list[dict[int, int]] = [{} for _ in self._readers]
        for index, offset in offsets.items():
            offsets_of[self._assignment[index] if index < len(self._assignment) else 0][index] = offset
        for reader, own_offsets in zip(self._readers, offsets_of, strict=True):
            reader.commit(own_offsets)

    def close(self) -> None:
        """End all processes."""
        self._failed_readers.close()
        self._close()

    @property
    def problem(self) -> str | None:
        """One sentence when the broker cannot be reached, or an ingest process is gone."""
        return next((each.problem for each in self._readers if each.problem), self._failed_readers.problem)

    @property
    def ends_time(self) -> float | None:
        """When the newest known end offsets were requested from the broker, by `time.monotonic`."""
        return max((each.ends_time for each in self._busy() if each.ends_time is not None), default=None)

    @property
    def oldest_ends_time(self) -> float | None:
        """`ends_time` of the reader whose ends are oldest; None while a reader has received none."""
        times = [each.ends_time for each in self._busy()]
        return None if None in times else min((each for each in times if each is not None), default=None)

    @property
    def unknown_fields(self) -> int:
        """Messages so far with fields that the schema does not know."""
        return sum(each.unknown_fields for each in (self._first, *self._others)) + self._failed_readers.unknown_fields

    @property
    def letters_dropped(self) -> Counter[str]:
        """Dead letters so far that were not written, by reason."""
        readers = (self._first, *self._others)
        return sum((each.letters_dropped for each in readers), self._failed_readers.letters_dropped)

    def _busy(self) -> list[BlockReader]:
        """Return the readers that have partitions; added partitions are read by the reader of this host."""
        added = len(self._first.partitions) > len(self._assignment)
        return [self._readers[number] for number in sorted({*self._assignment, *([0] if added else [])})]

    def _poll(self, reader: BlockReader) -> Block | None:
        try:
            return reader.poll(_NOW)
        except RecreatedError as exc:
            if reader is self._first or self._ends_reading(exc):
                raise
        self._read_from_this_host(self._end())
        return None

    def _ends_reading(self, exc: RecreatedError) -> bool:
        """Whether an error of another host ends the reading; else this host reads the recreated topic."""
        return self._stream.on_gap == "fail" and not isinstance(exc, TruncatedError)

    def _read_from_this_host(self, received: Received) -> None:
        """Let this host read all partitions: only its reader owns the partitions of a recreated topic."""
        self._open(received, [0] * len(received))

    def _begin(self, received: Received) -> None:
        """Assign the partitions, and start each reader that has some."""
        while True:
            rates = [*self._rates, *[0.0] * (len(received) - len(self._rates))]
            lost = self._open(received, assign(rates, 1 + len(self._others)))
            if lost is None:
                if not received:
                    return
                counts = [self._assignment.count(reader) for reader in range(1 + len(self._others))]
                log.info("partitions that each host reads: %s", ", ".join(map(str, counts)))
                return
            self._close()
            self._remove_failed(*lost)

    def _open(self, received: Received, assignment: list[int]) -> tuple[BlockReader, str] | None:
        """Start the readers of this host and of `assignment`; return one that does not start, and why."""
        assert self._stop is not None
        self._assignment, self._readers, self._turn = assignment, [self._first, *self._others], 0
        positions = {name: position for name, (position, _) in received.items()}
        marks = {name: mark for name, (_, mark) in received.items()}
        excluded_partitions = [index for index, number in enumerate(assignment) if number]
        if self._opened:
            self._first.reopen(positions, marks, excluded_partitions)
        else:
            self._first.open(positions, self._stop, marks=marks, excluded_partitions=excluded_partitions)
            self._opened = True
        for number, reader in enumerate(self._others, 1):
            excluded_partitions = [index for index, other in enumerate(assignment) if other != number]
            if len(excluded_partitions) == len(assignment):
                continue
            try:
                reader.open(positions, self._stop, PATIENCE, marks, excluded_partitions, owns_new_partitions=False)
            except RecreatedError as exc:
                if self._ends_reading(exc):
                    raise
                self._close()
                self._read_from_this_host(received)
                return None
            except BrokerError as exc:
                return reader, str(exc)
        return None

    def _continue_without(self, dead: Sequence[BlockReader]) -> None:
        received = self._end()
        for each in dead:
            self._remove_failed(each, str(each.problem))
        self._begin(received)

    def _remove_failed(self, reader: BlockReader, why: str) -> None:
        self._others.remove(reader)
        self._failed_readers.add(reader, why)

    def _end(self) -> Received:
        """End all processes, and return where to continue."""
        received = self._received()
        self._close()
        self._readers = [self._first]
        return received

    def _received(self) -> Received:
        """Return where each partition is read to, and its fingerprint."""
        received = [reader.received for reader in self._readers]
        names = list(received[0])
        assignment = [*self._assignment, *[0] * (len(names) - len(self._assignment))]
        return {name: received[reader][name] for name, reader in zip(names, assignment, strict=True)}

    def _close(self) -> None:
        for each in reversed(self._readers):
            each.close()
