"""The ingest process: reads partitions, writes blocks into the ring, sends dead letters.

It keeps no state that would be lost: the learner sends it positions, and when it dies, the learner starts another one
after the last block that was received.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection

from anabranch.core.backoff import Backoff
from ingest.config import StreamSettings
from ingest.errors import BrokerError, GapError, RecreatedError, TruncatedError
from ingest.events.block import Coverage
from ingest.events.partition import TopicPartition, latest_incarnations
from ingest.events.position import PartitionFingerprint, Position
from ingest.kafka.client import Client, Lag, Messages
from ingest.kafka.dead_letters import DeadLetter
from ingest.kafka.diagnostics import RECREATED, TRUNCATED, overwritten
from ingest.kafka.topic_recreation import compare, fingerprint
from ingest.transport.protocol import (
    BlockReady,
    Commit,
    LagReport,
    PartitionsOpened,
    Pause,
    Release,
    Resume,
    SkippedToEnd,
    SkipToEnd,
    Stop,
    ToIngest,
    receive_in_ingest,
    send,
)
from ingest.transport.shared_ring import SharedRing
from ingest.worker.block_builder import Assembled, BlockBuilder, Incoming
from ingest.worker.stalled_partitions import StallDetector

_PAUSE_SECONDS = 0.01
"""Pause after a poll that returned few rows: a slow stream costs at most a hundred polls and blocks a second."""
_LITTLE = 8
"""A poll that returns less than this fraction, 1 / `_LITTLE`, of a slot's rows returned few rows."""
_LETTER_TIMEOUT = timedelta(seconds=10)
_LAG_SECONDS = 1.0
_LOG_STARTS_SECONDS = 600.0
"""A broker that crashes may lose the removals of its last minute: only older removals are reported."""
_PARTITIONS_SECONDS = 5.0
_BUSY_SHARE = 0.1
"""The part of the time that counts towards a stall while every poll is full: partitions may have to take turns."""
_MOST_UNANSWERED = 8
"""Reports sent to a learner that sends nothing back: a full connection would block both sides for good."""
_FIRST_BACKOFF = timedelta(seconds=0.1)
_LONGEST_BACKOFF = timedelta(seconds=10)
_PORTION_BYTES = 2_000_000
"""Bytes of values that are decoded together; decoded values may take many times as much memory."""
_LOG_SECONDS = 10.0
"""Time between two log lines about dead letters that were not written."""
_FAULT_SECONDS = 60.0
"""How long a bug in decoding is reported as a problem."""

log = logging.getLogger(__name__)


class StoppedError(Exception):
    """The learner sent `Stop`, or has closed the connection."""


class IngestWorker:
    """One loop: handle the learner's messages, poll the broker, send blocks."""

    def __init__(
        self,
        stream: StreamSettings,
        client: Client,
        assembler: BlockBuilder,
        ring: SharedRing,
        connection: Connection,
        excluded_partitions: Sequence[int] = (),
        *,
        owns_new_partitions: bool = True,
    ) -> None:
        """Leave `excluded_partitions` to other readers, and new partitions too unless `owns_new_partitions`."""
        self._excluded_partitions = frozenset(excluded_partitions)
        self._owns_new_partitions = owns_new_partitions
        self._stream = stream
        self._client = client
        self._assembler = assembler
        self._ring = ring
        self._connection = connection
        self._free = list(range(ring.slots))
        self._paused = False
        self._is_skipping = False
        self._table: list[TopicPartition] = []
        self._next: list[Position] = []
        self._marks: list[PartitionFingerprint] = []
        self._index: dict[TopicPartition, int] = {}
        self._read: list[int] = []
        self._problem: str | None = None
        self._fault: str | None = None
        self._fault_until = 0.0
        self._next_lag = self._next_log_starts = 0.0
        self._log_starts: dict[TopicPartition, int] = {}
        """The first offset of each partition when the broker was last asked for it."""
        self._stall_detector = StallDetector()
        self._stall: str | None = None
        self._checked_at = time.monotonic()
        self._waited = 0.0
        """Seconds since the last check for stalls in which this process waited for the learner."""
        self._had_few_rows = False
        """Whether a poll since then returned few rows: then no partition waits for its turn behind others."""
        self._dropped: Counter[str] = Counter()
        """Dead letters that were not written, by reason, and that no block has reported yet."""
        self._dropped_log = 0.0
        self._unanswered_reports = 0

    def run(
        self, positions: Sequence[tuple[TopicPartition, Position]], marks: Sequence[PartitionFingerprint] = ()
    ) -> None:
        """Read from `positions` on, and if there are none, from `stream.start`, until the learner sends `Stop`.

        Args:
            positions: in the order of the index.
            marks: the fingerprint of each partition, in the same order; empty if unknown.

        Raises:
            StoppedError: always at the end.
            BrokerError, GapError: as the client does.
        """
        self._client.open()
        # With known partitions, new ones are read from their beginning: `stream.start` is for a first start alone.
        self._table = [partition for partition, _ in positions]
        self._next = [position for _, position in positions]
        self._marks = list(marks) or [PartitionFingerprint()] * len(self._table)
        self._refresh_assignment("earliest" if positions else self._stream.start, due=True)
        next_partitions = time.monotonic() + _PARTITIONS_SECONDS
        backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF)
        while True:
            while self._paused or not self._free:
                self._wait_for_learner()
            self._receive(wait=False)
            try:
                if self._is_skipping:
                    self._skip_to_end()
                    continue
                fetched = self._client.poll(timedelta(0), self._ring.rows)
                backoff.reset()
            except BrokerError as exc:
                self._had_few_rows = True
                self._back_off(backoff, str(exc))
                continue
            except RecreatedError as exc:
                if not self._refresh_assignment("earliest", due=True):
                    if not isinstance(exc, TruncatedError):
                        raise
                    self._back_off(backoff, str(exc))  # nothing that was read is lost
                continue
            self._process(fetched)
            few_rows = sum(map(len, fetched)) * _LITTLE < self._ring.rows
            self._had_few_rows |= few_rows
            self._report_lag_if_due()
            if few_rows:
                self._ring.clear_one(self._free)  # on a thin stream nothing else would overwrite old events for long
                time.sleep(_PAUSE_SECONDS)
            if time.monotonic() >= next_partitions and not self._problem:
                self._refresh_assignment("earliest")
                next_partitions = time.monotonic() + _PARTITIONS_SECONDS

    def _process(self, fetched: Sequence[Messages]) -> None:
        """Make blocks of one portion after another; stop when the learner asks to skip the rest."""
        for portion in _portions(fetched):
            self._receive(wait=False)
            if self._is_skipping:
                return
            self._process_portion(portion)

    def _process_portion(self, portion: Sequence[Messages]) -> None:
        """Make blocks of messages, once their dead letters are written."""
        indexes = [self._index[messages.partition] for messages in portion]
        incoming = [Incoming(each, index, self._next[index]) for each, index in zip(portion, indexes, strict=True)]
        assembled = self._assembler.assemble(incoming)
        if assembled.fault is not None:
            self._fault = f"a bug in decoding: {assembled.fault}; see the log of ingest and the dead letters"
            self._fault_until = time.monotonic() + _FAULT_SECONDS
        self._dropped["loop"] += assembled.looped
        self._send_letters(assembled.letters)
        self._log_dropped()
        self._send_blocks(incoming, assembled)

    def _refresh_assignment(self, start: str, *, due: bool = False) -> bool:
        """Assign known, added and recreated partitions; return whether there are more than before.

        Checks for recreated partitions when partitions were added, or `due`.
        """
        available, known = self._client.partitions(), latest_incarnations(self._table)
        added = [p for p in available if (p.topic, p.partition) not in known and self._owns_new_partitions]
        if not added and not due:
            return False
        recreated_starts = self._find_recreated()
        recreated = [partition for partition, start in recreated_starts.items() if start is None]
        moment = self._stream.start_time if start == self._stream.start else None
        offsets = self._client.first_offsets(added, start, moment) if added else {}
        offsets |= self._client.first_offsets(recreated, "earliest", None) if recreated else {}
        offsets |= {partition: start for partition, start in recreated_starts.items() if start is not None}
        self._table = [*self._table, *added, *recreated_starts]
        self._next += [Position(offsets[partition]) for partition in (*added, *recreated_starts)]
        self._marks += [PartitionFingerprint()] * len([*added, *recreated_starts])
        self._index = {partition: index for index, partition in enumerate(self._table)}
        # The partitions of a topic that was removed from the settings keep their index, and are not read. Nor is a
        # partition that a recreated topic no longer has.
        topics, names = {each.topic for each in available}, {(each.topic, each.partition) for each in available}
        self._read = [
            index
            for name, index in latest_incarnations(self._table).items()
            if name[0] in self._stream.topics
            and (name[0] not in topics or name in names)
            and index not in self._excluded_partitions
        ]
        ids = self._client.topic_ids()
        for index in self._read:
            mark = self._marks[index]
            self._marks[index] = PartitionFingerprint(mark.topic_id or ids.get(self._table[index].topic), mark.last)
        self._client.assign({self._table[index]: self._next[index].offset for index in self._read})
        starts = [position.offset for position in self._next]
        send(self._connection, PartitionsOpened(self._table, starts, [mark.topic_id for mark in self._marks]))
        return bool(added or recreated_starts)

    def _find_recreated(self) -> dict[TopicPartition, int | None]:
        """Return the next incarnation of each partition that was recreated, and where to begin in it, if known.

        A partition whose log lost its end is recreated from there on: its offsets come again, with other records.

        Raises:
            RecreatedError: a topic was created again, and `stream.on_gap` is `fail`, or another reader owns it.
            TruncatedError: a log lost its end, and another reader owns new partitions.
            GapError: records below the new end of a log were not read, and `stream.on_gap` is `fail`.
        """
        indexes = [
            index
            for name, index in latest_incarnations(self._table).items()
            if name[0] in self._stream.topics and (self._owns_new_partitions or index not in self._excluded_partitions)
        ]
        changed = compare(
            self._client, {self._table[index]: (self._marks[index], self._next[index].offset) for index in indexes}
        )
        for partition in changed.recreated:
            name = f"{partition.topic}[{partition.partition}]"
            if self._stream.on_gap == "fail" or not self._owns_new_partitions:
                raise RecreatedError(f"{name}: {RECREATED}")
            log.warning("%s was created again: it is read from its beginning", name)
        for partition, start in changed.truncated.items():
            name = f"{partition.topic}[{partition.partition}]@{start}"
            if partition in changed.overwritten and self._stream.on_gap == "fail":
                raise GapError(overwritten(name))
            if not self._owns_new_partitions:
                raise TruncatedError(f"{name}: {TRUNCATED}")
            read_to = self._next[self._table.index(partition)].offset
            log.warning(
                "%s: the log lost its end, %d offsets after it were read; reading continues", name, read_to - start
            )
        return {p.next_incarnation: None for p in changed.recreated} | {
            p.next_incarnation: start for p, start in changed.truncated.items()
        }

    def _skip_to_end(self) -> None:
        """Skip to the end of each partition, and report the skipped offsets; finish a message that was begun."""
        read = self._read
        whole = [index for index in read if not self._next[index].row]
        ends = self._client.first_offsets([self._table[index] for index in whole], "latest", None)
        passed = [
            Coverage(index, self._next[index].offset, end, passed=end - self._next[index].offset)
            for index in whole
            if (end := ends[self._table[index]]) > self._next[index].offset
        ]
        for cover in passed:
            self._next[cover.partition] = Position(cover.end)
        # Always: fetched messages that are not in a block yet and not skipped must be fetched again.
        self._client.assign({self._table[index]: self._next[index].offset for index in read})
        if passed:
            send(self._connection, BlockReady(self._free.pop(), 0, tuple(passed), 0))
        send(self._connection, SkippedToEnd())
        self._is_skipping = False

    def _wait_for_learner(self) -> None:
        began = time.monotonic()
        self._receive(wait=True)
        self._waited += time.monotonic() - began
        self._report_lag_if_due()

    def _receive(self, *, wait: bool) -> None:
        """Handle the messages that the learner has sent; with `wait`, wait for one up to a second."""
        while self._connection.poll(_LAG_SECONDS if wait else 0):
            try:
                self._handle(receive_in_ingest(self._connection))
            except (EOFError, OSError) as exc:
                raise StoppedError from exc
            wait = self._paused or not self._free

    def _handle(self, message: ToIngest) -> None:
        self._unanswered_reports = 0
        match message:
            case Release(slot):
                self._free.append(slot)
            case Pause():
                self._paused = True
            case Resume():
                self._paused = False
            case SkipToEnd():
                self._is_skipping = True
            case Commit(positions):
                read = set(latest_incarnations(self._table).values())
                self._client.commit({self._table[index]: offset for index, offset in positions if index in read})
            case Stop():
                raise StoppedError
            case _:
                raise AssertionError(message)

    def _send_letters(self, letters: Sequence[DeadLetter]) -> None:
        """Send until all are acknowledged: no block is sent before its dead letters are written."""
        dropped = self._client.letters_dropped
        backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF)
        problem = f'dead letters cannot be written to "{self._stream.dead_letter_topic}"'
        while letters:
            letters = letters[self._client.send_dead_letters(letters, _LETTER_TIMEOUT) :]
            if letters:
                self._back_off(backoff, problem)
            elif self._problem == problem:
                self._report(Lag())
        self._dropped["refused"] += self._client.letters_dropped - dropped

    def _log_dropped(self) -> None:
        if self._dropped.total() and time.monotonic() >= self._dropped_log:
            log.warning(
                'dead letters were not written to "%s", and their events are counted as dead-lettered all the same: '
                "%d that the broker refuses even without their contents (too large for the topic?), and %d that were "
                "dead letters several times already (do two pipelines read each other's?)",
                self._stream.dead_letter_topic,
                self._dropped["refused"],
                self._dropped["loop"],
            )
            self._dropped_log = time.monotonic() + _LOG_SECONDS

    def _send_blocks(self, incoming: Sequence[Incoming], assembled: Assembled) -> None:
        """Write rows into as many slots as they fill, and send each as a block; wait for free slots."""
        total, unknown = len(assembled), assembled.unknown_fields
        if not total and not any(each.messages.removed or self._advances(each) for each in incoming):
            return
        for begin, end in _pieces(total, self._ring.rows):
            while not self._free:
                self._wait_for_learner()
            slot = self._free.pop()
            self._ring.write(slot, assembled.columns, begin, end)
            coverage = tuple(self._cover(incoming, assembled, begin, end, last=end == total))
            send(self._connection, BlockReady(slot, end - begin, coverage, unknown, dict(+self._dropped)))
            self._dropped.clear()
            self._ring.carry(self._connection, slot, end - begin)
            unknown = 0

    def _advances(self, each: Incoming) -> bool:
        return each.messages.end > self._next[each.partition].offset

    def _cover(
        self, incoming: Sequence[Incoming], assembled: Assembled, begin: int, end: int, *, last: bool
    ) -> Iterator[Coverage]:
        """Yield what rows `[begin, end)` cover of each partition, and advance its position."""
        columns, low = assembled.columns, 0
        for each, rows in zip(incoming, assembled.rows, strict=True):
            high = low + rows
            first = begin <= low < end or (low == end and last)
            if (first or (low < end and high > begin)) and (rows or each.messages.removed or self._advances(each)):
                here = self._next[each.partition]
                done = high <= end
                stop = each.messages.end if done else int(columns["offset"][end])
                removed = each.messages.removed if first else 0
                readable = len(each.messages) and len(each.messages) - 1 not in each.messages.faults
                newest = fingerprint(each.messages, -1) if done and readable else None
                yield Coverage(each.partition, here.offset + removed, stop, removed, last=newest)
                if newest is not None:
                    self._marks[each.partition] = PartitionFingerprint(self._marks[each.partition].topic_id, newest)
                row = 0 if done or stop != columns["offset"][end - 1] else int(columns["row"][end])
                self._next[each.partition] = Position(stop, row)
            low = high

    def _back_off(self, backoff: Backoff, problem: str) -> None:
        """Report a problem, and handle the learner's messages until the back-off's next delay is over."""
        until = time.monotonic() + backoff.next()
        while (left := until - time.monotonic()) > 0:
            self._report(Lag(problem=problem))
            if self._connection.poll(min(left, _LAG_SECONDS)):
                self._receive(wait=False)

    def _report_lag_if_due(self) -> None:
        """Report the lag, also while nothing is read: that is when it grows."""
        if time.monotonic() >= self._next_lag:
            asked = time.monotonic()
            lag = self._client.lag(log_starts=asked >= self._next_log_starts)
            if not lag.problem:
                self._stall = self._stalled(lag.ends)
            if lag.log_starts:
                self._next_log_starts = asked + _LOG_STARTS_SECONDS
                before, self._log_starts = self._log_starts, lag.log_starts
                lag.log_starts = {p: min(before[p], first) for p, first in lag.log_starts.items() if p in before}
            self._report(lag, asked)
            self._next_lag = time.monotonic() + _LAG_SECONDS

    def _stalled(self, ends: Mapping[TopicPartition, int]) -> str | None:
        """Return one sentence if a partition that is read is stalled."""
        now = time.monotonic()
        seconds = max(0.0, now - self._checked_at - self._waited)
        if not self._had_few_rows:
            seconds *= _BUSY_SHARE
        self._checked_at, self._waited, self._had_few_rows = now, 0.0, False
        return self._stall_detector.check(
            {self._table[index]: self._next[index] for index in self._read}, ends, seconds
        )

    def _report(self, lag: Lag, asked: float | None = None) -> None:
        if lag.problem != self._problem and lag.problem is None:
            log.info("the Kafka broker answers again")
        elif lag.problem != self._problem:
            log.warning("%s", lag.problem)
        self._problem = lag.problem
        if self._unanswered_reports >= _MOST_UNANSWERED:
            return
        self._unanswered_reports += 1
        ends = [(index, lag.ends[partition]) for index, partition in enumerate(self._table) if partition in lag.ends]
        starts = [(index, lag.log_starts[name]) for index, name in enumerate(self._table) if name in lag.log_starts]
        fault = self._fault if time.monotonic() < self._fault_until else None
        send(
            self._connection,
            LagReport(ends, lag.problem or self._stall or fault, time.monotonic() if asked is None else asked, starts),
        )


def _portions(fetched: Sequence[Messages]) -> Iterator[list[Messages]]:
    """Split messages, in order, into portions that each end with the message that reaches `_PORTION_BYTES`."""
    portion: list[Messages] = []
    size = 0
    for messages in fetched:
        begin = 0
        for end, value in enumerate(messages.values, start=1):
            size += len(value or b"")
            if size >= _PORTION_BYTES:
                yield [*portion, messages.part(begin, end)]
                portion, size, begin = [], 0, end
        if begin < len(messages) or not len(messages):
            portion.append(messages.part(begin, len(messages)))
    if portion:
        yield portion


def _pieces(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Split `[0, total)` into ranges of at most `size`; a total of 0 gives one empty range."""
    for begin in range(0, max(total, 1), size):
        yield begin, min(total, begin + size)
