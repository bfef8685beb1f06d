"""The learner's end of ingest: receives blocks, releases slots, and replaces an ingest process that dies or hangs."""

import logging
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from anabranch.core.backoff import Backoff
from anabranch.core.errors import AnabranchError
from anabranch.ingest import errors
from anabranch.ingest.errors import BrokerError, HistoryError
from anabranch.ingest.events.block import Block, BlockLayout
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import PartitionFingerprint, Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.reader.cursors import CursorTable, Partition
from anabranch.ingest.reader.ingest_process import PROGRAM, IngestProcess
from anabranch.ingest.reader.suspects import Suspects
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.transport.protocol import (
    BlockReady,
    Commit,
    Failed,
    FromIngest,
    HistoryProgress,
    LagReport,
    PartitionsOpened,
    PausePartitions,
    Ping,
    Release,
    SkippedToEnd,
    SkipToEnd,
    Stop,
    begin,
)
from anabranch.ingest.transport.shared_ring import SharedRing

SILENT_SECONDS = 40.0
"""A process that sent nothing for this long hangs; a broker that is away blocks it for at most 30 s."""
ANSWER_SECONDS = 5.0
"""A process that was pinged and sent nothing for this long is reported as silent."""
_MOST_PER_CHECK_SECONDS = 1.0
"""Time between two checks counts up to this: beyond it this process was busy, or suspended itself."""


class Liveness(Enum):
    """What the time without a message says of a process."""

    ALIVE = "the time is short"
    PING = "the time is long enough to ask for a report, once"
    SILENT = "it was asked for a report, and has sent none yet"
    HUNG = "it was asked for a report, and sent none"


class HangDetector:
    """Counts the time since the last message of a process. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Start counting from zero: a message came, or a process was started."""
        self._seconds, self._checked_at = 0.0, self._clock()

    def check(self) -> Liveness:
        """Count the time since the last check, in which no message came, and return what it says of the process."""
        now, before, half = self._clock(), self._seconds, SILENT_SECONDS / 2
        self._seconds += min(now - self._checked_at, _MOST_PER_CHECK_SECONDS)
        self._checked_at = now
        if before < half <= self._seconds:
            return Liveness.PING
        if before < half + ANSWER_SECONDS <= self._seconds < SILENT_SECONDS:
            return Liveness.SILENT
        return Liveness.HUNG if self._seconds >= SILENT_SECONDS else Liveness.ALIVE


_OPEN_TIMEOUT = timedelta(minutes=1)
_FIRST_BACKOFF = timedelta(seconds=0.2)
_LONGEST_BACKOFF = timedelta(seconds=10)
_STOP_SECONDS = 3.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedBlock(Block):
    """A block whose columns are views of a slot, valid until `BlockReader.release`."""

    slot: int
    ring: SharedRing


class BlockReader:
    """Blocks of the pipeline's topics, in order. Used by one thread; ends with `close`.

    When the ingest process dies or hangs, another one continues after the last block that was received: no block is
    lost or comes twice.
    """

    def __init__(
        self,
        stream: StreamSettings,
        schema: SchemaSettings,
        hold_out: HoldOut | None,
        program: Sequence[str] = PROGRAM,
        *,
        read_only: bool = False,
        traced: bool = False,
    ) -> None:
        """Start nothing yet; `program` are the arguments of Python that start the process. Without `hold_out`, the
        attribute is set before `open`.

        With `read_only`, nothing is written to Kafka: no dead letters, and `commit` does nothing. `traced`: blocks have
        the trace contexts of their messages.
        """
        self._read_only = read_only
        self._stream = stream
        self._traced = traced
        self._schema = schema
        self.hold_out = hold_out
        """Which events are held out."""
        self._process = IngestProcess(BlockLayout(Schema(schema, stream.labels)), stream, program)
        self._cursors = CursorTable()
        self._held: frozenset[int] = frozenset()
        self._is_skipping = False
        self._opened = False
        self._inbox: deque[FromIngest] = deque()
        """Messages that were received and are not handled yet, in order."""
        self._is_gone = False
        """Whether no message follows those of the inbox: the process has ended."""
        self._restart_at = 0.0
        self._backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF, retry_at_once=True)
        self._hang_detector = HangDetector()
        self._suspects = Suspects()
        self.problem: str | None = None
        """One sentence when the broker cannot be reached or the process had to be started again."""
        self.ends_time: float | None = None
        """When the newest known end offsets were requested from the broker, by `time.monotonic`."""
        self.history: HistoryProgress | None = None
        """How far the history was read, as last reported."""
        self.unknown_fields = 0
        """Messages so far with fields that the schema does not know."""
        self.overweight = 0
        """Events whose weight was larger than `schema.weight.max`."""
        self.tombstones: Counter[str] = Counter()
        """Tombstones so far, by the form of their key."""
        self.letters_dropped: Counter[str] = Counter()
        """Dead letters so far that were not written, by reason."""

    def start(self) -> None:
        """Start the process ahead of `open`, for which it waits."""
        self._process.start()

    def open(
        self,
        positions: Mapping[TopicPartition, Position] | None = None,
        stop: threading.Event | None = None,
        timeout: timedelta | None = None,
        marks: Mapping[TopicPartition, PartitionFingerprint] | None = None,
    ) -> None:
        """Start reading and wait until the partitions are known, or `stop` is set.

        Args:
            positions: where to continue, for partitions that are known already; others begin at `stream.start`.
            stop: ends the waiting.
            timeout: for the broker to list its partitions, by default a minute; it begins again with each report that
                files are listed.
            marks: the fingerprints of the partitions that are known already.

        Raises:
            BrokerError: the broker cannot be reached, refuses the credentials or lacks a topic.
            RecreatedError: a topic is another one of the same name, and `stream.on_gap` is `fail`.
            SettingsError: the format cannot hold the schema, or the buffer is too small.
        """
        self._opened = False
        self._backoff.reset()
        self._cursors.load(positions or {}, marks or {})
        self._begin()
        patience = (timeout or _OPEN_TIMEOUT).total_seconds()
        deadline = time.monotonic() + patience
        while not self._opened and not (stop is not None and stop.is_set()):
            if self._process.connection is None or time.monotonic() > deadline:
                raise BrokerError(f"ingest did not find the topics on {self._stream.bootstrap_servers} in time")
            if self._process.wait(0.2):
                self.receive()
                if self._stream.backfill is not None:  # files are listed for as long as reports come
                    deadline = time.monotonic() + patience
                    self._ask_for_report()
            while self.waits and not self._opened:
                self._handle_next()

    @property
    def reads_history(self) -> bool:
        """Whether files are read, and the topics are not read yet, as far as blocks were handled."""
        if self._stream.backfill is None:
            return False
        # A report that the history is read takes effect before the blocks that were sent ahead of it.
        return self.history is None or not self.history.done or not self._cursors.has_read_files

    @property
    def partitions(self) -> Sequence[Partition]:
        """All partitions, in the order of the index that blocks carry; the same list until one of them changes."""
        return self._cursors.partitions

    def poll(self, timeout: timedelta) -> Block | None:
        """Return the next block, or None when none comes in time.

        Raises:
            GapError: offsets to be read are gone, and `stream.on_gap` is `fail`.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        while True:
            self.receive()
            left = max(0.0, deadline - time.monotonic())
            if self.waits:
                if (block := self._handle_next()) is not None:
                    return block
            elif self._process.connection is None:
                if time.monotonic() < self._restart_at:
                    time.sleep(max(0.0, min(left, self._restart_at - time.monotonic(), 0.05)))
                else:
                    self._begin()
            elif not self._process.wait(left):
                self._check_for_hang()
            if time.monotonic() >= deadline and not self.waits:
                return None

    def receive(self) -> None:
        """Receive what the process has sent by now, without waiting; called between steps.

        Lag reports take effect at once: they are newer than the blocks that are not handled yet. All other messages
        are handled by `poll`, in order.
        """
        while not self._is_gone and self._process.wait(0):
            try:
                message = self._process.receive()
            except (EOFError, OSError):
                self._is_gone = True
                return
            self._hang_detector.reset()
            if isinstance(message, LagReport):
                self._update_lag(message)
                continue
            if isinstance(message, PartitionsOpened):
                self.problem = None
            self._inbox.append(message)

    @property
    def waits(self) -> bool:
        """Whether `poll` has a message to handle, or the end of the process."""
        return bool(self._inbox) or self._is_gone

    def release(self, block: Block) -> None:
        """Give a block's slot back; its columns must not be read any more."""
        assert isinstance(block, SharedBlock)
        if block.ring is self._process.ring:
            self._process.send(Release(block.slot))

    def hold(self, partitions: frozenset[int]) -> None:
        """Do not read these partitions, by index, until another call names others; `poll` still returns blocks of them
        that were read before."""
        if partitions != self._held:
            self._held = partitions
            self._process.send(PausePartitions(sorted(partitions)))

    def pass_over(self) -> None:
        """Continue at the end of every partition; a block covers the skipped offsets. Does nothing while it skips."""
        if not self._is_skipping:
            self._is_skipping = True
            self._process.send(SkipToEnd())

    def commit(self, offsets: dict[int, int]) -> None:
        """Write positions, by index of the partition, for lag tools; best effort."""
        self._process.send(Commit(list(offsets.items())))

    def close(self) -> None:
        """End the process, within a few seconds."""
        self._process.send(Stop())
        self._end_process(_STOP_SECONDS if self._opened else 0)
        self._is_skipping = False

    def _begin(self) -> None:
        """Let the process read; start one unless one was started already."""
        if self._process.has_died:
            self._end_process(0)
        if self._process.connection is None:
            self.start()
        self._hang_detector.reset()
        assert self.hold_out is not None
        self._process.send(
            begin(
                self._stream,
                self._schema,
                self.hold_out,
                self._cursors.positions,
                self._cursors.fingerprints,
                read_only=self._read_only,
                traced=self._traced,
                suspects=self._suspects.suspects(self._cursors.positions),
                refused=self._suspects.refused(self._cursors.positions),
            )
        )
        if self._held:
            self._process.send(PausePartitions(sorted(self._held)))
        if self._is_skipping:
            self._process.send(SkipToEnd())

    def _handle_next(self) -> Block | None:
        """Handle the oldest message of the inbox, or the end of the process where there is none."""
        if self._inbox:
            return self._handle(self._inbox.popleft())
        self._replace("died")
        return None

    def _update_lag(self, report: LagReport) -> None:
        self.problem = report.problem
        self.history = report.history or self.history
        if report.ends:
            self.ends_time = report.time
        self._cursors.set_ends(report)

    def _ask_for_report(self) -> None:
        self._process.send(Ping())

    def _check_for_hang(self) -> None:
        liveness = self._hang_detector.check()
        if liveness is Liveness.PING:
            self._ask_for_report()
        elif liveness is Liveness.SILENT:
            self.problem = (
                self.problem or f"ingest has reported nothing for {SILENT_SECONDS / 2 + ANSWER_SECONDS:.0f} s"
            )
        elif liveness is Liveness.HUNG:
            self._replace("hangs")

    def _handle(self, message: FromIngest) -> Block | None:
        match message:
            case PartitionsOpened():
                self._opened = True
                self._cursors.add_opened(message)
            case BlockReady(slot, rows, coverage, unknown_fields, letters_dropped, contexts):
                self._backoff.reset()
                ring = self._process.ring
                assert ring is not None
                block = SharedBlock(ring.views(slot, rows), coverage, slot, ring, contexts=contexts)
                self.unknown_fields += unknown_fields
                self.overweight += message.overweight
                self.tombstones.update(message.tombstones)
                self.letters_dropped.update(letters_dropped)
                self._cursors.advance(block)
                return block
            case SkippedToEnd():
                self._is_skipping = False
            case Failed(error, sentence):
                self._fail(error, sentence)
        return None

    def _fail(self, error: str, sentence: str) -> None:
        kind = getattr(errors, error)
        assert issubclass(kind, AnabranchError)
        if self._opened and issubclass(kind, BrokerError):
            self._restart_later(sentence)
        else:
            self._end_process(_STOP_SECONDS)
            raise kind(sentence)

    def _replace(self, how: str) -> None:
        """Start another process in place of one that died or hangs; it takes care of what this one was decoding."""
        self._process.kill()
        if self._process.ended_by == signal.SIGPROF:
            how = "took too much CPU time"
        names = self._cursors.positions
        marked = self._process.ring.mark.read() if self._process.ring is not None else []
        decoded = self._suspects.add(
            [(names[each.partition][0], each.begin, each.end) for each in marked if each.partition < len(names)]
        )
        if (row := self._suspects.fatal_row()) is not None:
            self._end_process(0)
            file = self.history.file if self.history is not None and self.history.file else "a file"
            raise HistoryError(
                f"{file} cannot be read: the ingest process ended three times while it read rows from row {row:,} of "
                "all files on; leave the file out of stream.backfill.files, or give the process more memory"
            )
        decoding = "" if decoded is None else f" while it decoded {decoded}"
        self._restart_later(f"the ingest process {how}{decoding}; another one is started")

    def _restart_later(self, problem: str) -> None:
        log.warning("%s", problem)
        self.problem = problem
        self._end_process(0)
        if not self._opened:
            raise BrokerError("the ingest process exited before it found the topics; see its log above")
        self._restart_at = time.monotonic() + self._backoff.next()

    def _end_process(self, seconds: float) -> None:
        """End the process, which has `seconds` to end by itself, and drop its messages that are not handled yet."""
        self._process.close(seconds)
        self._inbox.clear()
        self._is_gone = False
