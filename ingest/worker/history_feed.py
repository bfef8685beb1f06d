"""Feeds the worker with the history, and begins the topics after it."""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypeVar

from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.files import DISORDER, Switch, switch_of
from anabranch.ingest.backfill.history_rows import HistoryRows, HistorySource
from anabranch.ingest.errors import BrokerError
from anabranch.ingest.events.block import Coverage
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.kafka.client import Client, Messages
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.transport.protocol import HistoryProgress
from anabranch.ingest.worker.block_builder import Assembled, BlockBuilder, OfFiles
from anabranch.ingest.worker.decoding_limits import DecodingLimits
from anabranch.ingest.worker.partition_table import PartitionTable
from anabranch.ingest.worker.topic_switch import first_times, topics_begin

_MEASURED_SECONDS = 5.0
"""How long the rate of the history is measured before it counts."""


class RetentionWatch:
    """Compares when the history is expected to end with when the first records that wait for it are removed."""

    def __init__(
        self,
        removed_at: Mapping[TopicPartition, float],
        rows_done: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Take when retention may remove the first record of each partition, in seconds since 1970.

        `rows_done` rows of the history were read before.
        """
        self._first = min(removed_at.items(), key=lambda each: each[1], default=None)
        self._clock = clock
        self._wall = wall
        self._began, self._before = clock(), rows_done

    def problem(self, progress: HistoryProgress | None) -> str | None:
        """Return one sentence when records are removed before the history ends, as its rate so far lets expect."""
        if progress is None or progress.done or self._first is None:
            return None
        read, seconds = progress.rows_done - self._before, self._clock() - self._began
        if seconds < _MEASURED_SECONDS or not read:
            return None
        (name, removed_at), ends_at = self._first, self._wall() + (progress.rows - progress.rows_done) * seconds / read
        if removed_at > ends_at:
            return None
        return (
            f"retention removes the first records of {name.topic}[{name.partition}] that wait for the history about "
            f"{_moment(removed_at)}, and the history is expected to last until {_moment(ends_at)}; raise retention.ms "
            "of the topic, or begin again with a later stream.backfill.until"
        )


def watch_of(
    client: Client, stream: StreamSettings, positions: Mapping[TopicPartition, int], rows_done: int
) -> RetentionWatch:
    """Return a watch of the records at these positions; of none where the broker shows no retention.

    Ends the assignment of the client.
    """
    # Imported here since it loads kafka-python, which an ingest process without a history may not need.
    from anabranch.ingest.kafka.topic_inspector import Inspector

    try:
        with Inspector(stream) as inspector:
            described = {topic: inspector.topic(topic) for topic in {name.topic for name in positions}}
        kept: dict[str, timedelta] = {
            name: topic.retention for name, topic in described.items() if topic is not None and topic.retention
        }
        times = first_times(client, {name: offset for name, offset in positions.items() if name.topic in kept})
    except (BrokerError, SettingsError) as exc:  # some properties are of the client that reads, and not of this one
        log.info("whether retention removes records before the history is read is not known: %s", exc)
        return RetentionWatch({})
    removed_at = {name: ms / 1000 + kept[name.topic].total_seconds() for name, ms in times.items()}
    return RetentionWatch(removed_at, rows_done)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(min(seconds, 4e9), UTC).isoformat(timespec="minutes")


Cover = Callable[[int, int], Iterable[Coverage]]
"""Returns what a range of rows covers of each partition, and advances positions."""

_T = TypeVar("_T")


_REMOVED = 2**62
"""The first offset of a log that does not exist any more."""


class Run(Protocol):
    """Returns what a function returns that reads files for long."""

    def __call__(self, work: Callable[[], _T]) -> _T:
        """Call `work`."""
        ...


_WAIT = timedelta(seconds=0.1)
"""How long to wait for rows of files, before messages of the learner are handled."""

log = logging.getLogger(__name__)


class HistoryFeed:
    """Rows of files, until all are read; none where there is no history."""

    def __init__(
        self,
        history: HistorySource | None,
        stream: StreamSettings,
        client: Client,
        table: PartitionTable,
        assembler: BlockBuilder,
        limits: DecodingLimits,
        run: Run,
    ) -> None:
        self._history = history
        self._stream = stream
        self._client = client
        self._table = table
        self._assembler = assembler
        self._limits = limits
        self._run = run
        self._first = False
        self._switch: Switch | None = None
        self._planned = history is None
        self._retention = RetentionWatch({})
        self.is_read = history is None
        """Whether all rows were read, and the topics are read now."""

    def open(self, positions: Sequence[tuple[TopicPartition, Position]]) -> None:
        """List the files at the first start; else continue from the positions of the learner.

        Raises:
            SettingsError, HistoryError, HistoryAwayError: as `FileHistory.list_files` and `restore` do.
        """
        history, self._first = self._history, not positions
        self._switch = switch_of(self._table.partitions, self._table.marks)
        if history is None:
            return
        if positions:
            history.restore(positions, self._table.marks)
            return
        # The topics' beginning comes before the list: what arrives meanwhile is read from them.
        begin, lost = topics_begin(self._client, self._stream, timed=history.times is not None)
        self._switch = self._run(lambda: history.list_files(begin, lost=lost))
        if self._switch is not None:
            # The broker finds the first record from a time on, by record times: an event's own may be later than that.
            begin_at = datetime.fromtimestamp(self._switch.until_ms / 1000, UTC)
            self._table.begin_at = begin_at - DISORDER if self._switch.own else begin_at
        elif self._stream.backfill is not None:
            self._table.begin_at = self._stream.backfill.until_time
        self._table.add_history(history.partitions, history.marks)

    def of_files(self, messages: Messages) -> OfFiles | None:
        """Return which of the messages are rows of files, if some may be."""
        switch = self._switch
        if switch is None or not len(messages) or messages.partition.incarnation:
            return None
        end = switch.ends.get(str(messages.partition), 0)
        return OfFiles(switch.until_ms, switch.own, end) if messages.offsets[0] < end else None

    def plan(self) -> None:
        """Decide which offsets of the topics are read from files, before the learner receives where they begin.

        Raises:
            SettingsError, HistoryError, HistoryAwayError: as `KafkaHistory.plan` does.
        """
        history, table = self._history, self._table
        if history is None or self._planned:
            return
        names = {index: table.partitions[index] for index in table.read}
        positions = {name: table.positions[index].offset for index, name in names.items()}
        starts = self._client.first_offsets(list(positions), "earliest", None)
        ends = self._client.log_ends(list(positions))
        # Files have the events of the topics as they were when the history began. Of a topic that was created again
        # since, nothing else has them.
        first = {name for name in table.partitions if name.topic in self._stream.topics and not name.incarnation}
        gone = first - positions.keys()
        every = positions | {name: table.positions[table.index[name]].offset for name in gone}
        begins = self._run(lambda: history.plan(every, starts | dict.fromkeys(gone, _REMOVED), ends, first=self._first))
        if not begins and not history.done:
            self._retention = watch_of(self._client, self._stream, positions, history.progress.rows_done)
            table.assign()
        self._first = False
        for index, name in names.items():
            if begins.get(name, positions[name]) != positions[name]:
                table.positions[index] = Position(begins[name])
        self._planned = True

    @property
    def indexes(self) -> set[int]:
        """The indexes of the partitions of files."""
        return set() if self._history is None else {self._table.index[name] for name in self._history.partitions}

    @property
    def problem(self) -> str | None:
        """One sentence when records of the topics are removed before the history is read."""
        return None if self._history is None else self._retention.problem(self._history.progress)

    def read(self) -> Iterator[tuple[Assembled, Cover]]:
        """Yield the next rows of files, if they are there in time, for blocks; after the last, begin the topics.

        Raises:
            HistoryError, HistoryAwayError: as `FileHistory.poll` does.
        """
        history, table = self._history, self._table
        assert history is not None
        rows = None if history.done else self._poll(history)
        if rows is not None:
            assembled = self._assembler.assemble_history(rows, [table.index[name] for name in rows.counts])
            yield assembled, functools.partial(table.cover_history, assembled, rows.ends, rows.hints)
        if history.done:
            yield from self._switch_to_topics(history)

    def _poll(self, history: HistorySource) -> HistoryRows | None:
        first = min(self.indexes, default=None)
        if first is None:
            return history.poll(_WAIT)
        with self._limits.reading_files(first, history.progress.rows_done):
            return history.poll(_WAIT)

    def _switch_to_topics(self, history: HistorySource) -> Iterator[tuple[Assembled, Cover]]:
        """Begin the topics unless retention has removed rows from them meanwhile, which are read from files then."""
        self._planned = False
        self.plan()
        if history.done:
            passed = list(self._table.pass_offsets(history.ends))
            if passed:
                yield self._assembler.assemble([]), lambda *_: passed
            self._table.assign()
            self.is_read = True
            log.info("the history is read: the topics are read from now on")
