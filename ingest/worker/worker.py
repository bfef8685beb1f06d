"""The ingest process: reads partitions, writes blocks into the ring, sends dead letters.

It keeps no state that would be lost: the learner sends it positions, and when it dies, the learner starts another one
after the last block that was received.
"""

import concurrent.futures
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TypeVar

from anabranch.core.backoff import Backoff
from anabranch.ingest.backfill.history_rows import HistorySource
from anabranch.ingest.errors import BrokerError, RecreatedError, TruncatedError
from anabranch.ingest.events.block import Coverage
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import PartitionFingerprint, Position
from anabranch.ingest.kafka.client import Client, Lag, Messages
from anabranch.ingest.kafka.dead_letters import DeadLetter
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.transport.protocol import (
    BlockReady,
    Commit,
    PartitionsOpened,
    PausePartitions,
    Ping,
    Release,
    SkippedToEnd,
    SkipToEnd,
    Stop,
    ToIngest,
    receive_in_ingest,
    send,
)
from anabranch.ingest.transport.shared_ring import SharedRing
from anabranch.ingest.worker.block_builder import Assembled, BlockBuilder, Incoming, contexts_of_block
from anabranch.ingest.worker.decoding_limits import DecodingLimits
from anabranch.ingest.worker.history_feed import Cover, HistoryFeed
from anabranch.ingest.worker.lag_reporter import LAG_SECONDS, LagReporter
from anabranch.ingest.worker.partition_table import PartitionTable
from anabranch.ingest.worker.paused_partitions import PausedPartitions

FIRST_BACKOFF = timedelta(seconds=0.1)
LONGEST_BACKOFF = timedelta(seconds=10)
_TIMEOUT = timedelta(seconds=10)
_LOG_SECONDS = 10.0
"""Time between two log lines about dead letters that were not written."""


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


_PAUSE_SECONDS = 0.01
"""Pause after a poll that returned few rows: a slow stream costs at most a hundred polls and blocks a second."""
_LITTLE = 8
"""A poll that returns less than this fraction, 1 / `_LITTLE`, of a slot's rows returned few rows."""
_PARTITIONS_SECONDS = 5.0
_PORTION_BYTES = 2_000_000
"""Bytes of values that are decoded together; decoded values may take many times as much memory."""

_T = TypeVar("_T")

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
        *,
        history: HistorySource | None = None,
        limits: DecodingLimits | None = None,
        read_only: bool = False,
    ) -> None:
        """`history` is read before the partitions of the topics. `limits` has the messages that earlier processes died
        of. With `read_only`, no dead letters are sent and no positions are committed.
        """
        self._limits = limits or DecodingLimits(ring.mark)
        self._stream = stream
        self._client = client
        self._assembler = assembler
        self._ring = ring
        self._connection = connection
        self._free = list(range(ring.slots))
        self._held: frozenset[int] = frozenset()
        """The partitions that are to be held once all fetched messages are in blocks."""
        self._is_skipping = False
        self._table = PartitionTable(stream, client)
        self._pauses = PausedPartitions(self._table, assembler.schemas)
        self._history = feed = HistoryFeed(
            history, stream, client, self._table, assembler, self._limits, self._run_with_reports
        )
        self._reporter = LagReporter(
            client, self._table, connection, history, self._pauses, later_problem=lambda: feed.problem
        )
        self._read_only = read_only
        self._letters = DeadLetterSender(client, stream.dead_letter_topic, self._reporter, self._back_off)

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
        self._table.restore(positions, marks)
        self._history.open(positions)
        self._refresh_assignment("earliest" if positions else self._stream.start, due=True)
        next_partitions = time.monotonic() + _PARTITIONS_SECONDS
        backoff = Backoff(FIRST_BACKOFF, LONGEST_BACKOFF)
        while True:
            while not self._free:
                self._wait_for_learner()
            self._receive(wait=False)
            self._pauses.resume_if_answered()
            try:
                if self._is_skipping:
                    self._skip_to_end()
                    continue
                if self._held != self._table.held:
                    self._table.held = self._held
                    self._table.assign()
                if not self._history.is_read:
                    self._send_history()
                    backoff.reset()
                    self._reporter.report_if_due()
                    continue
                fetched = self._client.poll(timedelta(0), self._ring.rows)
                backoff.reset()
            except BrokerError as exc:
                self._reporter.add_poll(few_rows=True)
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
            self._reporter.add_poll(few_rows=few_rows)
            self._reporter.report_if_due()
            if few_rows:
                self._ring.clear_one(self._free)  # on a thin stream nothing else would overwrite old events for long
                time.sleep(_PAUSE_SECONDS)
            if time.monotonic() >= next_partitions and not self._reporter.problem:
                self._refresh_assignment("earliest")
                next_partitions = time.monotonic() + _PARTITIONS_SECONDS

    def _run_with_reports(self, work: Callable[[], _T]) -> _T:
        """Return what `work` returns, which takes long; meanwhile report, and handle the learner's messages."""
        pool = ThreadPoolExecutor(1, "history")
        future = pool.submit(work)
        pool.shutdown(wait=False)
        while not concurrent.futures.wait([future], LAG_SECONDS).done:
            self._receive(wait=False)
            self._reporter.report_busy()
        return future.result()

    def _send_history(self) -> None:
        """Make blocks of the next rows of files, once their dead letters are written; report when the topics begin."""
        for assembled, cover in self._history.read():
            self._send_letters(assembled)
            self._write_blocks(assembled, cover)
        if self._history.is_read:
            self._reporter.make_due()

    def _send_letters(self, assembled: Assembled) -> None:
        if not self._read_only:
            self._letters.send(assembled.letters, assembled.looped)

    def _process(self, fetched: Sequence[Messages]) -> None:
        """Make blocks of one portion after another; stop when the learner asks to skip the rest."""
        for portion in _portions(fetched):
            for part in self._limits.split(portion, self._table.index):
                self._receive(wait=False)
                if self._is_skipping:
                    return
                self._process_portion(part)
        self._pauses.assign_if_changed()

    def _process_portion(self, portion: Sequence[Messages]) -> None:
        """Make blocks of messages, once their dead letters are written."""
        indexes = [self._table.index[messages.partition] for messages in portion]
        incoming = [
            Incoming(
                self._limits.refusing(each, index), index, self._table.positions[index], self._history.of_files(each)
            )
            for each, index in zip(portion, indexes, strict=True)
            if index not in self._table.paused
        ]
        with self._limits.decoding([(each.messages, each.partition) for each in incoming]):
            assembled = self._assembler.assemble(incoming)
        if assembled.fault is not None:
            self._reporter.set_fault(assembled.fault)
        self._send_letters(assembled)
        self._send_blocks(assembled)
        self._pauses.add(assembled.deferred)

    def _refresh_assignment(self, start: str, *, due: bool = False) -> bool:
        """Assign known, added and recreated partitions; return whether there are more than before."""
        added = self._table.refresh(start, due=due)
        self._history.plan()
        if added is not None:
            starts = [position.offset for position in self._table.positions]
            ids = [mark.topic_id for mark in self._table.marks]
            unread = set(range(len(starts))) - set(self._table.read) - self._history.indexes
            send(self._connection, PartitionsOpened(self._table.partitions, starts, ids, sorted(unread)))
        return bool(added)

    def _skip_to_end(self) -> None:
        """Skip to the end of each partition of events, and report the skipped offsets; finish a message that was begun.

        Labels are read: events that were read before wait for them.
        """
        positions, names = self._table.positions, self._table.partitions
        events = [index for index in self._table.read if names[index].topic not in self._stream.label_topics]
        whole = [index for index in events if not positions[index].row]
        ends = self._client.first_offsets([self._table.partitions[index] for index in whole], "latest", None)
        passed = [
            Coverage(index, self._table.positions[index].offset, end, passed=end - self._table.positions[index].offset)
            for index in whole
            if (end := ends[self._table.partitions[index]]) > self._table.positions[index].offset
        ]
        for cover in passed:
            self._table.positions[cover.partition] = Position(cover.end)
        self._pauses.clear()  # their messages are skipped
        # Always: fetched messages that are not in a block yet and not skipped must be fetched again.
        self._table.assign()
        if passed:
            send(self._connection, BlockReady(self._free.pop(), 0, tuple(passed), 0))
        send(self._connection, SkippedToEnd())
        self._is_skipping = False

    def _wait_for_learner(self) -> None:
        began = time.monotonic()
        self._receive(wait=True)
        self._reporter.add_wait(time.monotonic() - began)
        self._reporter.report_if_due()

    def _receive(self, *, wait: bool) -> None:
        """Handle the messages that the learner has sent; with `wait`, wait for one up to a second."""
        while self._connection.poll(LAG_SECONDS if wait else 0):
            try:
                self._handle(receive_in_ingest(self._connection))
            except (EOFError, OSError) as exc:
                raise StoppedError from exc
            wait = not self._free

    def _handle(self, message: ToIngest) -> None:
        self._reporter.reset_unanswered()
        match message:
            case Release(slot):
                self._free.append(slot)
            case Ping():
                pass
            case PausePartitions(partitions):
                self._held = frozenset(partitions)
            case SkipToEnd():
                self._is_skipping = True
            case Commit(positions):
                if self._read_only:
                    return
                names, read = self._table.partitions, set(self._table.read)
                self._client.commit({names[index]: offset for index, offset in positions if index in read})
            case Stop():
                raise StoppedError
            case _:
                raise AssertionError(message)

    def _send_blocks(self, assembled: Assembled) -> None:
        """Write rows into as many slots as they fill, and send each as a block; wait for free slots."""
        incoming, total = assembled.incoming, len(assembled)
        if total or any(each.messages.removed or self._table.advances(each) for each in incoming):
            self._write_blocks(
                assembled, lambda begin, end: self._table.cover(incoming, assembled, begin, end, last=end == total)
            )

    def _write_blocks(self, assembled: Assembled, cover: Cover) -> None:
        """Write rows into slots."""
        total, unknown, heavy = len(assembled), assembled.unknown_fields, assembled.overweight
        tombstones = dict(assembled.tombstones)
        for begin, end in _pieces(total, self._ring.rows):
            while not self._free:
                self._wait_for_learner()
            slot = self._free.pop()
            self._ring.write(slot, assembled.columns, begin, end)
            coverage, dropped = tuple(cover(begin, end)), self._letters.take_dropped()
            own = contexts_of_block(assembled.contexts, begin, end)
            ready = BlockReady(slot, end - begin, coverage, unknown, dropped, own, heavy, tombstones)
            send(self._connection, ready)
            unknown = heavy = 0
            tombstones = {}

    def _back_off(self, backoff: Backoff, problem: str) -> None:
        """Report a problem, and handle the learner's messages until the back-off's next delay is over."""
        until = time.monotonic() + backoff.next()
        while (left := until - time.monotonic()) > 0:
            self._reporter.report(Lag(problem=problem))
            if self._connection.poll(min(left, LAG_SECONDS)):
                self._receive(wait=False)


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
