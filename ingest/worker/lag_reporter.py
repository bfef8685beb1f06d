"""Reports the lag, and problems with reading, to the learner."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from anabranch.ingest.backfill.history_rows import HistorySource
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.kafka.client import Client, Lag
from anabranch.ingest.transport.protocol import LagReport, send
from anabranch.ingest.worker.partition_table import PartitionTable
from anabranch.ingest.worker.paused_partitions import PausedPartitions

STALLED_SECONDS = 20.0
"""With the intervals of checks and reports, a stall is reported within 30 s."""
_MOST_PER_CHECK_SECONDS = 2.0
"""Time between two checks counts up to this: beyond it the broker was away, or this process suspended."""


@dataclass
class _Unmoved:
    position: Position
    seconds: float = 0.0


class StallDetector:
    """Counts how long each partition has not advanced while it was read. Checked about once a second."""

    def __init__(self) -> None:
        self._unmoved: dict[TopicPartition, _Unmoved] = {}
        self._reported: list[TopicPartition] = []

    def check(
        self, positions: Mapping[TopicPartition, Position], ends: Mapping[TopicPartition, int], seconds: float
    ) -> str | None:
        """Return one sentence if a partition is stalled; it names the one that is stalled longest.

        Args:
            positions: the next event of each partition that is read.
            ends: the end of each partition, where it is known.
            seconds: how long partitions were read since the last check, without the time spent waiting for the learner.
        """
        before, self._unmoved = self._unmoved, {}
        for partition, position in positions.items():
            end = ends.get(partition)
            if end is not None and position.offset < end:
                unmoved = before.get(partition)
                known = unmoved is not None and unmoved.position == position
                self._unmoved[partition] = unmoved if known and unmoved is not None else _Unmoved(position)
                self._unmoved[partition].seconds += min(seconds, _MOST_PER_CHECK_SECONDS) if known else 0.0
        stalled = [p for p, unmoved in self._unmoved.items() if unmoved.seconds >= STALLED_SECONDS]
        stalled.sort(key=lambda partition: -self._unmoved[partition].seconds)
        sentence = self._sentence(stalled, ends) if stalled else None
        if sentence is not None and stalled != self._reported:
            log.warning("%s", sentence)
        elif self._reported and not stalled:
            log.info("no partition is stalled any more")
        self._reported = stalled
        return sentence

    def _sentence(self, stalled: list[TopicPartition], ends: Mapping[TopicPartition, int]) -> str:
        partition, others = stalled[0], len(stalled) - 1
        unmoved = self._unmoved[partition]
        more = f"; {others} more partition{'' if others == 1 else 's'} likewise" if others else ""
        return (
            f"{partition.topic}[{partition.partition}] is stalled at offset {unmoved.position.offset}, while it ends "
            f"at {ends[partition]}: the broker has returned nothing from there for {unmoved.seconds:.0f} s{more}"
        )


LAG_SECONDS = 1.0
"""Time between two reports."""
_LOG_STARTS_SECONDS = 600.0
"""A broker that crashes may lose the removals of its last minute: only older removals are reported."""
_BUSY_SHARE = 0.1
"""The part of the time that counts towards a stall while every poll is full: partitions may have to take turns."""
_MOST_UNANSWERED = 8
"""Reports sent to a learner that sends nothing back: a full connection would block both sides forever."""
_FAULT_SECONDS = 60.0
"""How long a bug in decoding is reported as a problem."""

log = logging.getLogger(__name__)


class LagReporter:
    """Asks the broker for the ends of the partitions about once a second, and sends them to the learner."""

    def __init__(
        self,
        client: Client,
        table: PartitionTable,
        connection: Connection,
        history: HistorySource | None = None,
        pauses: PausedPartitions | None = None,
        later_problem: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`later_problem` returns one sentence on what will go wrong."""
        self._client = client
        self._table = table
        self._connection = connection
        self._history = history
        self._sent_ends: dict[TopicPartition, int] = {}
        """Ends of files that were sent."""
        self._pauses = pauses
        self._later_problem = later_problem
        self.problem: str | None = None
        """What was wrong at the last report."""
        self._fault: str | None = None
        self._fault_until = 0.0
        self._due = self._next_log_starts = 0.0
        self._log_starts: dict[TopicPartition, int] = {}
        """The first offset of each partition when the broker was last asked for it."""
        self._stall_detector = StallDetector()
        self._stall: str | None = None
        self._checked_at = time.monotonic()
        self._waited = 0.0
        """Seconds since the last check for stalls in which this process waited for the learner."""
        self._had_few_rows = False
        """Whether a poll since then returned few rows: then no partition waits for its turn behind others."""
        self._unanswered = 0
        """Reports since the last message of the learner."""

    def add_wait(self, seconds: float) -> None:
        """Count time for which this process waited for the learner: no partition is stalled by it."""
        self._waited += seconds

    def add_poll(self, *, few_rows: bool) -> None:
        """Count a poll, which returned few rows or many."""
        self._had_few_rows |= few_rows

    def reset_unanswered(self) -> None:
        """Count the reports without an answer from 0: the learner has sent a message."""
        self._unanswered = 0

    def set_fault(self, fault: str) -> None:
        """Report a bug in decoding for some time."""
        self._fault = f"a bug in decoding: {fault}; see the log of ingest and the dead letters"
        self._fault_until = time.monotonic() + _FAULT_SECONDS

    def make_due(self) -> None:
        """Report with the next `report_if_due`."""
        self._due = 0.0

    def report_if_due(self) -> None:
        """Report the lag once a second, also while nothing is read: it grows fastest at that time."""
        if time.monotonic() >= self._due:
            asked = time.monotonic()
            lag = self._client.lag(log_starts=asked >= self._next_log_starts)
            if not lag.problem:
                self._stall = self._stalled(lag.ends)
            if lag.log_starts:
                self._next_log_starts = asked + _LOG_STARTS_SECONDS
                before, self._log_starts = self._log_starts, lag.log_starts
                lag.log_starts = {p: min(before[p], first) for p, first in lag.log_starts.items() if p in before}
            self.report(lag, asked)
            self._due = time.monotonic() + LAG_SECONDS

    def _stalled(self, ends: Mapping[TopicPartition, int]) -> str | None:
        """Return one sentence if a partition that is read is stalled; topics that wait for the history are not."""
        now = time.monotonic()
        seconds = max(0.0, now - self._checked_at - self._waited)
        if not self._had_few_rows:
            seconds *= _BUSY_SHARE
        self._checked_at, self._waited, self._had_few_rows = now, 0.0, False
        if self._history is not None and not self._history.done:
            return None
        return self._stall_detector.check(
            {
                self._table.partitions[index]: self._table.positions[index]
                for index in self._table.read
                if index not in self._table.paused and index not in self._table.held
            },
            ends,
            seconds,
        )

    def report_busy(self) -> None:
        """Send that this process works on what takes long, with nothing of the broker or of the history."""
        if self._unanswered < _MOST_UNANSWERED:
            self._unanswered += 1
            send(self._connection, LagReport([], self.problem, time.monotonic()))

    def report(self, lag: Lag, asked: float | None = None) -> None:
        """Send a lag that was asked for at the time `asked`, and log when its problem changes."""
        if lag.problem != self.problem and lag.problem is None:
            log.info("the Kafka broker answers again")
        elif lag.problem != self.problem:
            log.warning("%s", lag.problem)
        self.problem = lag.problem
        if self._unanswered >= _MOST_UNANSWERED:
            return
        self._unanswered += 1
        ends = [
            (index, lag.ends[partition])
            for index, partition in enumerate(self._table.partitions)
            if partition in lag.ends
        ]
        if self._history is not None:
            new = dict(self._history.ends.items() - self._sent_ends.items())
            ends += [(index, new[name]) for index, name in enumerate(self._table.partitions) if name in new]
            self._sent_ends |= new
        starts = [
            (index, lag.log_starts[name]) for index, name in enumerate(self._table.partitions) if name in lag.log_starts
        ]
        progress = None if self._history is None else self._history.progress
        fault = self._fault if time.monotonic() < self._fault_until else None
        pause = None if self._pauses is None else self._pauses.problem
        problem = lag.problem or pause or self._stall or fault or self._later_problem()
        time_asked = time.monotonic() if asked is None else asked
        send(self._connection, LagReport(ends, problem, time_asked, starts, progress))
