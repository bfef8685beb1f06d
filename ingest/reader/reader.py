"""The learner's end of ingest: starts the process, receives blocks, gives slots back."""

import logging
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

from anabranch.core.backoff import Backoff
from anabranch.core.errors import AnabranchError
from ingest import errors
from ingest.child_environment import without_settings
from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.errors import BrokerError
from ingest.events.block import Block, BlockLayout
from ingest.events.partition import TopicPartition, latest_incarnations
from ingest.events.position import PartitionFingerprint, Position
from ingest.events.schema import Schema
from ingest.reader.hang_detector import ANSWER_SECONDS, SILENT_SECONDS, HangDetector, Liveness
from ingest.transport.protocol import (
    BlockReady,
    Commit,
    Failed,
    FromIngest,
    LagReport,
    PartitionsOpened,
    Pause,
    Release,
    Resume,
    SkippedToEnd,
    SkipToEnd,
    Stop,
    ToIngest,
    begin,
    receive_in_learner,
    send,
)
from ingest.transport.shared_ring import SharedRing

_FIRST_BACKOFF = timedelta(seconds=0.2)
_LONGEST_BACKOFF = timedelta(seconds=10)
_STOP_SECONDS = 3.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedBlock(Block):
    """A block whose columns are views of a slot, valid until `BlockReader.release`."""

    slot: int
    ring: SharedRing


@dataclass(frozen=True)
class Partition:
    """One partition as the source found it: `start` is this pipeline's first offset, `end` the broker's, if known.

    A partition whose topic was made anew ends with what was read of it. `topic_id` is the topic's, if known, and
    `log_start` the first offset that the broker still had ten minutes ago.
    """

    name: TopicPartition
    start: int
    end: int | None
    topic_id: str | None = None
    log_start: int | None = None


class BlockReader:
    """Blocks of the pipeline's topics, in order. Used by one thread; ends with `close`.

    When the ingest process dies or hangs, another one goes on after the last block that was received, so that no block
    is lost or comes twice.
    """

    def __init__(
        self, stream: StreamSettings, schema: SchemaSettings, hold_out: HoldOut, address: str | None = None
    ) -> None:
        """With an address, that of an ingest process on another host which reads in the place of one here."""
        self._address = address
        self._excluded_partitions: Sequence[int] = ()
        self._owns_new_partitions = True
        self._stream = stream
        self._schema = schema
        self._hold_out = hold_out
        self._layout = BlockLayout(Schema(schema))
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._readable = select.poll()
        self._partitions: Sequence[Partition] | None = None
        self._there: frozenset[int] = frozenset()
        """Of those, the partitions whose topic was not made anew."""
        self._ring: SharedRing | None = None
        self._received: dict[TopicPartition, Position] = {}
        self._marks: dict[TopicPartition, PartitionFingerprint] = {}
        self._starts: dict[TopicPartition, int] = {}
        self._ends: dict[int, int] = {}
        self._log_starts: dict[int, int] = {}
        self._table: list[TopicPartition] = []
        self._paused = False
        self._is_skipping = False
        self._opened = False
        self._waiting: deque[FromIngest] = deque()
        """What was received and is not taken yet, in order."""
        self._is_gone = False
        """Whether nothing follows what waits: the process has ended."""
        self._restart_at = 0.0
        self._backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF, retry_at_once=True)
        self._hang_detector = HangDetector()
        self.problem: str | None = None
        """One sentence when the broker cannot be reached or the process had to be started again."""
        self.told: float | None = None
        """When the broker was last asked for the ends of partitions that it told, by `time.monotonic`."""
        self.unknown_fields = 0
        """Messages so far with fields that the schema does not know."""
        self.letters_dropped: Counter[str] = Counter()
        """Dead letters so far that were not written, by reason."""

    def start(self) -> None:
        """Start the process, which waits for `open` or `go_on`: before work that it need not wait for."""
        ours, theirs = socket.socketpair()
        ring = SharedRing(self._layout, int(self._stream.buffer_bytes))
        with theirs:
            # -P: a folder named ingest where the user stands must not take this package's place.
            command = [sys.executable, "-P", "-m", "ingest", "--connection", str(theirs.fileno()), "--ring"]
            command += [str(ring.descriptor), *(("--relay", self._address) if self._address else ())]
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), ring.descriptor),
                stdin=subprocess.DEVNULL,
                env=without_settings(),
            )
        self._ring, self._connection = ring, Connection(ours.detach())
        # Connection.poll makes a selector each time, which takes longer than to receive a message.
        self._readable = select.poll()
        self._readable.register(self._connection, select.POLLIN)

    def open(
        self,
        positions: Mapping[TopicPartition, Position] | None = None,
        stop: threading.Event | None = None,
        timeout: timedelta = timedelta(seconds=60),
        marks: Mapping[TopicPartition, PartitionFingerprint] | None = None,
        excluded_partitions: Sequence[int] = (),
        *,
        owns_new_partitions: bool = True,
    ) -> None:
        """Start reading and wait until the partitions are known, or `stop` is set.

        Args:
            positions: where to go on, for the partitions that are known from before; others begin at `stream.start`.
            stop: ends the waiting.
            timeout: for the broker to tell its partitions.
            marks: what the partitions that are known from before are known again by.
            excluded_partitions: partitions that another source reads, by their place in `positions`.
            alone: whether partitions that are added are this source's.

        Raises:
            BrokerError: the broker cannot be reached, refuses the credentials or lacks a topic.
            RecreatedError: a topic is another one of the same name, and `stream.on_gap` is `fail`.
            SettingsError: the format cannot hold the schema, or the buffer is too small.
        """
        self._opened = False
        self._backoff.reset()
        self._excluded_partitions, self._owns_new_partitions = excluded_partitions, owns_new_partitions
        self._received = dict(positions or {})
        self._marks = dict(marks or {})
        self._table, self._partitions = list(self._received), None
        self._begin()
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._opened and not (stop is not None and stop.is_set()):
            if self._connection is None or time.monotonic() > deadline:
                raise BrokerError(f"ingest did not find the topics on {self._stream.bootstrap_servers} in time")
            if self._readable.poll(200):
                self.receive()
            while self.waits and not self._opened:
                self._take_next()

    def go_on(
        self,
        positions: Mapping[TopicPartition, Position],
        marks: Mapping[TopicPartition, PartitionFingerprint],
        excluded_partitions: Sequence[int],
    ) -> None:
        """Read on after `close`, from these positions. Partitions are known: a broker that is away is waited for."""
        self._excluded_partitions = excluded_partitions
        self._received, self._marks, self._table = dict(positions), dict(marks), list(positions)
        self._partitions = None
        self._begin()

    @property
    def partitions(self) -> Sequence[Partition]:
        """All partitions, in the order of the index that blocks carry; the same list until one of them changes."""
        if self._partitions is None:
            self._there = frozenset(latest_incarnations(self._table).values())
            self._partitions = [
                Partition(
                    name, self._starts[name], self._ends.get(i), self._marks[name].topic_id, self._log_starts.get(i)
                )
                if i in self._there
                else Partition(name, self._starts[name], self._received[name].offset)
                for i, name in enumerate(self._table)
            ]
        return self._partitions

    @property
    def oldest_told(self) -> float | None:
        """When the broker was asked for the end that is known longest: here all are told together."""
        return self.told

    @property
    def received(self) -> Mapping[TopicPartition, tuple[Position, PartitionFingerprint]]:
        """Where another source would have to go on, and what the partitions are known again by."""
        return {name: (self._received[name], self._marks[name]) for name in self._table}

    @property
    def connection(self) -> Connection | None:
        """What becomes readable when the process says something; None while there is no process."""
        return self._connection

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
                if (block := self._take_next()) is not None:
                    return block
            elif self._connection is None:
                if time.monotonic() < self._restart_at:
                    time.sleep(max(0.0, min(left, self._restart_at - time.monotonic(), 0.05)))
                else:
                    self._begin()
            elif not self._readable.poll(left * 1000):
                self._note_silence()
            if time.monotonic() >= deadline and not self.waits:
                return None

    def receive(self) -> None:
        """Receive what the process has sent by now, without waiting; called between steps.

        What it reports of the broker holds at once: blocks that wait for the learner are older than that. All else
        waits for `poll`, in order.
        """
        while self._connection is not None and not self._is_gone and self._readable.poll(0):
            try:
                message = receive_in_learner(self._connection)
            except (EOFError, OSError):
                self._is_gone = True
                return
            self._hang_detector.reset()
            if isinstance(message, LagReport):
                self._note_broker(message)
                continue
            if isinstance(message, PartitionsOpened):
                self.problem = None
            self._waiting.append(message)

    @property
    def waits(self) -> bool:
        """Whether `poll` has something to do with what was received."""
        return bool(self._waiting) or self._is_gone

    def release(self, block: Block) -> None:
        """Give a block's slot back; its columns must not be looked at any more."""
        assert isinstance(block, SharedBlock)
        if block.ring is self._ring:
            self._send(Release(block.slot))

    def pause(self) -> None:
        """Read no further until `resume`; blocks already read still come."""
        self._paused = True
        self._send(Pause())

    def resume(self) -> None:
        """Read on."""
        self._paused = False
        self._send(Resume())

    def pass_over(self) -> None:
        """Go on at the end of every partition; a block tells what was passed. Asking again meanwhile does nothing."""
        if not self._is_skipping:
            self._is_skipping = True
            self._send(SkipToEnd())

    def commit(self, offsets: dict[int, int]) -> None:
        """Write positions, by index of the partition, for lag tools; best effort."""
        self._send(Commit(list(offsets.items())))

    def close(self) -> None:
        """End the process, within a few seconds."""
        self._send(Stop())
        self._end_process(_STOP_SECONDS if self._opened else 0)
        self._is_skipping = False

    def _begin(self) -> None:
        """Have a process read, a new one unless one waits."""
        if self._process is not None and self._process.poll() is not None:
            self._end_process(0)
        if self._process is None:
            self.start()
        self._hang_detector.reset()
        positions = [(name, self._received[name]) for name in self._table]
        marks = [self._marks.get(name, PartitionFingerprint()) for name in self._table]
        settings = self._stream, self._schema, self._hold_out
        self._send(
            begin(
                *settings,
                positions,
                marks,
                list(self._excluded_partitions),
                owns_new_partitions=self._owns_new_partitions,
            )
        )
        if self._paused:
            self._send(Pause())
        if self._is_skipping:
            self._send(SkipToEnd())

    def _take_next(self) -> Block | None:
        """Take the message that waits longest, or that the process has ended where none does."""
        if self._waiting:
            return self._take(self._waiting.popleft())
        here = "the ingest process died; another one is started"
        self._restart_later(f"no ingest process answers at {self._address}" if self._address else here)
        return None

    def _note_broker(self, report: LagReport) -> None:
        self.problem = report.problem
        if report.ends:
            self.told, self._partitions = report.time, None
        self._ends.update(report.ends)
        self._log_starts.update(report.log_starts)

    def _note_silence(self) -> None:
        told = self._hang_detector.check()
        if told is Liveness.PING:
            self._send(Pause() if self._paused else Resume())  # as it is: any word makes it report again
        elif told is Liveness.SILENT:
            self.problem = (
                self.problem or f"ingest has reported nothing for {SILENT_SECONDS / 2 + ANSWER_SECONDS:.0f} s"
            )
        elif told is Liveness.HUNG:
            here = "the ingest process hangs; another one is started"
            self._restart_later(f"the ingest process at {self._address} hangs" if self._address else here)

    def _take(self, message: FromIngest) -> Block | None:
        match message:
            case PartitionsOpened(partitions, starts, ids):
                self._opened, self._partitions = True, None
                for name, start, topic_id in zip(partitions, starts, ids, strict=True):
                    self._starts.setdefault(name, start)
                    self._received.setdefault(name, Position(start))
                    self._marks[name] = PartitionFingerprint(
                        topic_id, self._marks.get(name, PartitionFingerprint()).last
                    )
                self._table = partitions
            case BlockReady(slot, rows, coverage, unknown_fields, letters_dropped):
                self._backoff.reset()
                assert self._ring is not None
                block = SharedBlock(self._ring.views(slot, rows), coverage, slot, self._ring)
                self.unknown_fields += unknown_fields
                self.letters_dropped.update(letters_dropped)
                self._note(block)
                return block
            case SkippedToEnd():
                self._is_skipping = False
            case Failed(error, sentence):
                self._fail(error, sentence)
        return None

    def _note(self, block: Block) -> None:
        """Remember where a new process would have to go on."""
        partition, offset, row = (block.columns[name] for name in ("partition", "offset", "row"))
        for cover in block.coverage:
            rows = (partition == cover.partition).nonzero()[0]
            torn = len(rows) and int(offset[rows[-1]]) == cover.end
            position = Position(cover.end, int(row[rows[-1]]) + 1 if torn else 0)
            name = self._table[cover.partition]
            self._received[name] = position
            if cover.partition not in self._there:
                self._partitions = None
            if cover.last is not None:
                self._marks[name] = PartitionFingerprint(self._marks[name].topic_id, cover.last)

    def _fail(self, error: str, sentence: str) -> None:
        kind = getattr(errors, error)
        assert issubclass(kind, AnabranchError)
        if self._opened and issubclass(kind, BrokerError):
            self._restart_later(sentence)
        else:
            self._end_process(_STOP_SECONDS)
            raise kind(sentence)

    def _restart_later(self, problem: str) -> None:
        log.warning("%s", problem)
        self.problem = problem
        self._end_process(0)
        if not self._opened:
            raise BrokerError("the ingest process died before it had found the topics; its own words stand above")
        self._restart_at = time.monotonic() + self._backoff.next()

    def _send(self, message: ToIngest) -> None:
        if self._connection is not None:
            try:
                send(self._connection, message)
            except (BrokenPipeError, ConnectionError):
                log.debug("the ingest process is gone; the next poll starts another one")

    def _end_process(self, seconds: float) -> None:
        """Forget the process, and kill it when it does not end by itself in time."""
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._connection is not None:
            self._connection.close()
        if self._ring is not None:
            self._ring.close()
        self._process = self._connection = self._ring = None
        self._waiting.clear()
        self._is_gone = False
