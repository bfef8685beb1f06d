"""How far each partition is read, and by what it is recognised when another process continues."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anabranch.ingest.events.block import Block
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import PartitionFingerprint, Position
from anabranch.ingest.transport.protocol import LagReport, PartitionsOpened


@dataclass(frozen=True)
class Partition:
    """One partition: `start` is this pipeline's first offset, `end` the broker's, if known.

    One that is not `read` any more ends at the last offset that was read: its topic was taken out of the settings, or
    created again, or it is a file and there is no history now. `topic_id` is the topic's, if known, and `log_start` the
    first offset that the broker still had ten minutes ago.
    """

    name: TopicPartition
    start: int
    end: int | None
    topic_id: str | None = None
    log_start: int | None = None
    read: bool = True


class CursorTable:
    """Position and fingerprint of each partition, in the order of the index that blocks carry. Used by one thread."""

    def __init__(self) -> None:
        self._table: list[TopicPartition] = []
        self._positions: dict[TopicPartition, Position] = {}
        self._fingerprints: dict[TopicPartition, PartitionFingerprint] = {}
        self._starts: dict[TopicPartition, int] = {}
        self._ends: dict[int, int] = {}
        self._log_starts: dict[int, int] = {}
        self._partitions: Sequence[Partition] | None = None
        self._unread: frozenset[int] = frozenset()
        """The indexes of the partitions that are not read any more."""
        self._files_read = 0
        """All partitions of files before this index are read to their end."""

    @property
    def partitions(self) -> Sequence[Partition]:
        """All partitions, in the order of their index; the same list until one of them changes."""
        if self._partitions is None:
            self._partitions = [
                Partition(
                    name,
                    self._starts[name],
                    self._ends.get(index),
                    self._fingerprints[name].topic_id,
                    self._log_starts.get(index),
                )
                if index not in self._unread
                else Partition(name, self._starts[name], self._positions[name].offset, read=False)
                for index, name in enumerate(self._table)
            ]
        return self._partitions

    @property
    def positions(self) -> list[tuple[TopicPartition, Position]]:
        """The next event of each partition, in the order of the index."""
        return [(name, self._positions[name]) for name in self._table]

    @property
    def fingerprints(self) -> list[PartitionFingerprint]:
        """What each partition is recognised by, in the order of the index."""
        return [self._fingerprints.get(name, PartitionFingerprint()) for name in self._table]

    @property
    def has_read_files(self) -> bool:
        """Whether the blocks so far cover all rows of files."""
        while self._files_read < len(self._table):
            name, end = self._table[self._files_read], self._ends.get(self._files_read)
            if name.history and (end is None or self._positions[name].offset < end):
                return False
            self._files_read += 1
        return True

    def load(
        self,
        positions: Mapping[TopicPartition, Position],
        fingerprints: Mapping[TopicPartition, PartitionFingerprint],
    ) -> None:
        """Replace all positions and fingerprints; offsets of starts and ends that are known already stay."""
        self._positions, self._fingerprints = dict(positions), dict(fingerprints)
        self._table, self._partitions, self._files_read = list(positions), None, 0

    def add_opened(self, opened: PartitionsOpened) -> None:
        """Add the partitions that the process has opened, each with its first offset and the id of its topic."""
        for name, start, topic_id in zip(opened.partitions, opened.starts, opened.ids, strict=True):
            self._starts.setdefault(name, start)
            self._positions.setdefault(name, Position(start))
            last = self._fingerprints.get(name, PartitionFingerprint()).last
            self._fingerprints[name] = PartitionFingerprint(topic_id, last)
        self._table, self._unread, self._partitions = opened.partitions, frozenset(opened.unread), None

    def set_ends(self, report: LagReport) -> None:
        """Store the broker's offsets of a report."""
        if report.ends:
            self._partitions = None
        self._ends.update(report.ends)
        self._log_starts.update(report.log_starts)

    def advance(self, block: Block) -> None:
        """Move past a block: from there another process would have to continue."""
        partition, offset, row = (block.columns[name] for name in ("partition", "offset", "row"))
        for cover in block.coverage:
            rows = (partition == cover.partition).nonzero()[0]
            is_torn = len(rows) and int(offset[rows[-1]]) == cover.end
            name = self._table[cover.partition]
            self._positions[name] = Position(cover.end, int(row[rows[-1]]) + 1 if is_torn else 0)
            if cover.partition in self._unread:
                self._partitions = None
            if cover.last is not None:
                self._fingerprints[name] = PartitionFingerprint(self._fingerprints[name].topic_id, cover.last)
