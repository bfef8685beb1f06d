"""The partitions that one ingest process reads."""

import logging
from collections.abc import Iterator, Sequence

from ingest.config import StreamSettings
from ingest.errors import GapError, RecreatedError, TruncatedError
from ingest.events.block import Coverage
from ingest.events.partition import TopicPartition, latest_incarnations
from ingest.events.position import PartitionFingerprint, Position
from ingest.kafka.client import Client
from ingest.kafka.diagnostics import RECREATED, TRUNCATED, overwritten
from ingest.kafka.topic_recreation import compare, fingerprint
from ingest.worker.block_builder import Assembled, Incoming

log = logging.getLogger(__name__)


class PartitionTable:
    """All incarnations of all partitions by index, with the position of each; assigns to the client those to read."""

    def __init__(
        self, stream: StreamSettings, client: Client, excluded_partitions: Sequence[int], *, owns_new_partitions: bool
    ) -> None:
        """Leave `excluded_partitions` to other readers, and new partitions too unless `owns_new_partitions`."""
        self._stream = stream
        self._client = client
        self._excluded_partitions = frozenset(excluded_partitions)
        self._owns_new_partitions = owns_new_partitions
        self.partitions: list[TopicPartition] = []
        self.positions: list[Position] = []
        """Where each partition is read next."""
        self.marks: list[PartitionFingerprint] = []
        self.index: dict[TopicPartition, int] = {}
        self.read: list[int] = []
        """The indexes of the partitions that are read."""

    def restore(
        self, positions: Sequence[tuple[TopicPartition, Position]], marks: Sequence[PartitionFingerprint]
    ) -> None:
        """Start from the positions of the learner, in the order of the index; `marks` may be empty."""
        self.partitions = [partition for partition, _ in positions]
        self.positions = [position for _, position in positions]
        self.marks = list(marks) or [PartitionFingerprint()] * len(positions)

    def assign(self) -> None:
        """Make the client fetch from the positions on."""
        self._client.assign({self.partitions[index]: self.positions[index].offset for index in self.read})

    def refresh(self, start: str, *, due: bool) -> int | None:
        """Assign known, added and recreated partitions; return how many are new, None where nothing was assigned.

        Added partitions are read from `start` on. Recreated ones are searched when partitions were added, or `due`.
        """
        available, known = self._client.partitions(), latest_incarnations(self.partitions)
        added = [p for p in available if (p.topic, p.partition) not in known and self._owns_new_partitions]
        if not added and not due:
            return None
        recreated_starts = self._find_recreated()
        recreated = [partition for partition, start in recreated_starts.items() if start is None]
        moment = self._stream.start_time if start == self._stream.start else None
        offsets = self._client.first_offsets(added, start, moment) if added else {}
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
            if name[0] in self._stream.topics
            and (name[0] not in topics or name in names)
            and index not in self._excluded_partitions
        ]
        ids = self._client.topic_ids()
        for index in self.read:
            mark = self.marks[index]
            self.marks[index] = PartitionFingerprint(mark.topic_id or ids.get(self.partitions[index].topic), mark.last)
        self.assign()
        return len(added) + len(recreated_starts)

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
            for name, index in latest_incarnations(self.partitions).items()
            if name[0] in self._stream.topics and (self._owns_new_partitions or index not in self._excluded_partitions)
        ]
        changed = compare(
            self._client,
            {self.partitions[index]: (self.marks[index], self.positions[index].offset) for index in indexes},
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
