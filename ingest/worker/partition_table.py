"""The partitions that the ingest process reads."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime

from anabranch.ingest.errors import GapError, RecreatedError
from anabranch.ingest.events.block import Coverage
from anabranch.ingest.events.partition import TopicPartition, latest_incarnations
from anabranch.ingest.events.position import Fingerprint, PartitionFingerprint, Position
from anabranch.ingest.kafka.client import Client
from anabranch.ingest.kafka.diagnostics import RECREATED, overwritten
from anabranch.ingest.kafka.topic_recreation import compare, fingerprint
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.worker.block_builder import Assembled, Incoming

log = logging.getLogger(__name__)


class PartitionTable:
    """All incarnations of all partitions by index, with the position of each; assigns to the client those to read."""

    def __init__(self, stream: StreamSettings, client: Client) -> None:
        self._stream = stream
        self._client = client
        self.partitions: list[TopicPartition] = []
        self.positions: list[Position] = []
        """Where each partition is read next."""
        self.marks: list[PartitionFingerprint] = []
        self.index: dict[TopicPartition, int] = {}
        self.begin_at: datetime | None = None
        """The time from which on the events of the first `refresh` are read, in place of `start`."""
        self.read: list[int] = []
        """The indexes of the partitions that are read."""
        self._logged: set[int] = set()
        self.paused: set[int] = set()
        """The indexes of the partitions whose next message cannot be decoded yet; they are not fetched."""
        self.held: frozenset[int] = frozenset()
        """The indexes of the partitions that the learner does not read now; they are not fetched."""

    def restore(
        self, positions: Sequence[tuple[TopicPartition, Position]], marks: Sequence[PartitionFingerprint]
    ) -> None:
        """Start from the positions of the learner, in the order of the index; `marks` may be empty."""
        self.partitions = [partition for partition, _ in positions]
        self.positions = [position for _, position in positions]
        self.marks = list(marks) or [PartitionFingerprint()] * len(positions)

    def add_history(self, partitions: Sequence[TopicPartition], marks: Sequence[PartitionFingerprint]) -> None:
        """Add the partitions of files, which begin at row 0; the client does not read them."""
        self.partitions = [*self.partitions, *partitions]
        self.positions += [Position(0)] * len(partitions)
        self.marks += marks

    def assign(self) -> None:
        """Make the client fetch from the positions on."""
        paused = [self.partitions[index] for index in self.read if index in self.paused or index in self.held]
        self._client.assign({self.partitions[index]: self.positions[index].offset for index in self.read}, paused)

    def refresh(self, start: str, *, due: bool) -> int | None:
        """Assign known, added and recreated partitions; return how many are new, None where nothing was assigned.

        Added partitions are read from `start` on, and those of labels from their beginning where there is a history:
        rows of files wait for them. Recreated ones are searched when partitions were added, or `due`.
        """
        available, known = self._client.partitions(), latest_incarnations(self.partitions)
        added = [p for p in available if (p.topic, p.partition) not in known]
        if not added and not due:
            return None
        recreated_starts = self._find_recreated()
        recreated = [partition for partition, start in recreated_starts.items() if start is None]
        moment = self.begin_at or (self._stream.start_time if start == self._stream.start else None)
        self.begin_at = None
        labels = [p for p in added if self._stream.backfill is not None and p.topic in self._stream.label_topics]
        events = [partition for partition in added if partition not in labels]
        offsets = self._client.first_offsets(events, start, moment) if events else {}
        offsets |= self._client.first_offsets(labels, "earliest", None) if labels else {}
        offsets |= self._client.first_offsets(recreated, "earliest", None) if recreated else {}
        offsets |= {partition: start for partition, start in recreated_starts.items() if start is not None}
        self.partitions = [*self.partitions, *added, *recreated_starts]
        self.positions += [Position(offsets[partition]) for partition in (*added, *recreated_starts)]
        self.marks += [PartitionFingerprint()] * len([*added, *recreated_starts])
        self.index = {partition: index for index, partition in enumerate(self.partitions)}
        # The partitions of a topic that was removed from the settings keep their index, and are not read. Nor is a
        # partition that a recreated topic no longer has.
        topics, names = {each.topic for each in available}, {(each.topic, each.partition) for each in available}
        self.read = [
            index
            for name, index in latest_incarnations(self.partitions).items()
            if name[0] in self._stream.all_topics and (name[0] not in topics or name in names)
        ]
        self._log_unread(topics)
        self.paused.intersection_update(self.read)
        ids = self._client.topic_ids()
        for index in self.read:
            mark = self.marks[index]
            self.marks[index] = PartitionFingerprint(mark.topic_id or ids.get(self.partitions[index].topic), mark.last)
        self.assign()
        return len(added) + len(recreated_starts)

    def _log_unread(self, topics: Collection[str]) -> None:
        """Log the partitions that are not read any more, once each; `topics` are those that exist and are read."""
        unread = set(latest_incarnations(self.partitions).values()) - set(self.read) - self._logged
        self._logged |= unread
        for topic in sorted({self.partitions[index].topic for index in unread if not self.partitions[index].history}):
            own = [index for index in sorted(unread) if self.partitions[index].topic == topic]
            here = ", ".join(f"[{self.partitions[index].partition}]@{self.positions[index].offset}" for index in own)
            if topic in topics:
                log.warning("%s was created again with fewer partitions: there is no %s any more", topic, here)
            else:
                log.warning("%s is in stream.topics no more: nothing is read after %s", topic, here)

    def _find_recreated(self) -> dict[TopicPartition, int | None]:
        """Return the next incarnation of each partition that was recreated, and where to begin in it, if known.

        A partition whose log lost its end is recreated from there on: its offsets come again, with other records.

        Raises:
            RecreatedError: a topic was created again, and `stream.on_gap` is `fail`.
            GapError: records below the new end of a log were not read, and `stream.on_gap` is `fail`.
        """
        indexes = [
            index for name, index in latest_incarnations(self.partitions).items() if name[0] in self._stream.all_topics
        ]
        changed = compare(
            self._client,
            {self.partitions[index]: (self.marks[index], self.positions[index].offset) for index in indexes},
        )
        for partition in changed.recreated:
            name = f"{partition.topic}[{partition.partition}]"
            if self._stream.on_gap == "fail":
                raise RecreatedError(f"{name}: {RECREATED}")
            log.warning("%s was created again: it is read from its beginning", name)
        for partition, start in changed.truncated.items():
            name = f"{partition.topic}[{partition.partition}]@{start}"
            if partition in changed.overwritten and self._stream.on_gap == "fail":
                raise GapError(overwritten(name))
            read_to = self.positions[self.partitions.index(partition)].offset
            log.warning(
                "%s: the log lost its end, %d offsets after it were read; reading continues", name, read_to - start
            )
        return {p.next_incarnation: None for p in changed.recreated} | {
            p.next_incarnation: start for p, start in changed.truncated.items()
        }

    def advances(self, each: Incoming) -> bool:
        """Return whether messages move their partition forward, if only past offsets without a message."""
        return each.messages.end > self.positions[each.partition].offset

    def cover(
        self, incoming: Sequence[Incoming], assembled: Assembled, begin: int, end: int, *, last: bool
    ) -> Iterator[Coverage]:
        """Yield what rows `[begin, end)` cover of each partition, and advance its position."""
        columns, low = assembled.columns, 0
        for each, rows in zip(incoming, assembled.rows, strict=True):
            high = low + rows
            first = begin <= low < end or (low == end and last)
            if (first or (low < end and high > begin)) and (rows or each.messages.removed or self.advances(each)):
                here = self.positions[each.partition]
                done = high <= end
                stop = each.messages.end if done else int(columns["offset"][end])
                removed = each.messages.removed if first else 0
                readable = len(each.messages) and len(each.messages) - 1 not in each.messages.faults
                newest = fingerprint(each.messages, -1) if done and readable else None
                yield Coverage(each.partition, here.offset + removed, stop, removed, last=newest)
                if newest is not None:
                    topic_id = self.marks[each.partition].topic_id
                    self.marks[each.partition] = PartitionFingerprint(topic_id, newest)
                row = 0 if done or stop != columns["offset"][end - 1] else int(columns["row"][end])
                self.positions[each.partition] = Position(stop, row)
            low = high

    def pass_offsets(self, ends: Mapping[TopicPartition, int]) -> Iterator[Coverage]:
        """Yield what offsets without a row cover, up to the ends of these partitions, and advance positions."""
        for name, end in ends.items():
            index = self.index[name]
            if self.positions[index].offset < end:
                yield Coverage(index, self.positions[index].offset, end)
                self.positions[index] = Position(end)

    def cover_history(
        self,
        assembled: Assembled,
        ends: Mapping[TopicPartition, int],
        hints: Mapping[TopicPartition, Fingerprint],
        begin: int,
        end: int,
    ) -> Iterator[Coverage]:
        """Yield what rows `[begin, end)` of files cover of each partition, and advance its position.

        `ends` are the first offsets after all rows, by partition, and `hints` the last records of the coverage there.
        """
        columns, low = assembled.columns, 0
        for (name, stop), rows in zip(ends.items(), assembled.rows, strict=True):
            high = low + rows
            if low < end and high > begin:
                index = self.index[name]
                whole = high <= end
                stop = stop if whole else int(columns["offset"][end])
                last = hints.get(name) if whole else None
                yield Coverage(index, self.positions[index].offset, stop, last=last)
                self.positions[index] = Position(stop)
            low = high
