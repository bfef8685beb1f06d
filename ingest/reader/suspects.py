"""Messages that ingest processes died of: the next process decodes them one by one, and never those that ended two."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.transport.decoding_mark import OffsetRange

_MOST_DEATHS = 2
"""Processes that may end while they decode one message alone."""
_MOST_OF_FILES = 3
"""Processes that may end while they read files from one row on."""

log = logging.getLogger(__name__)


class Suspects:
    """Which messages the processes so far were decoding when they ended. Used by one thread."""

    def __init__(self) -> None:
        self._ranges: dict[TopicPartition, tuple[int, int]] = {}
        self._deaths: Counter[tuple[TopicPartition, int]] = Counter()

    def add(self, marked: Sequence[tuple[TopicPartition, int, int]]) -> str | None:
        """Take what a process that has ended was decoding, and return it for a sentence; None if it was nothing."""
        if not marked:
            return None
        if marked[0][0].history:
            name, row, _ = marked[0]
            self._deaths[name, row] += 1
            return f"rows of files from row {row:,} of all on"
        for name, begin, end in marked:
            self._ranges[name] = begin, end
        name, begin, end = marked[0]
        first = f"{name.topic}[{name.partition}]@{begin}"
        if len(marked) > 1 or end > begin + 1:
            return f"{first} to {end - 1}" + (f" and messages of {len(marked) - 1} more partitions" * (len(marked) > 1))
        self._deaths[name, begin] += 1
        if self._deaths[name, begin] == _MOST_DEATHS:
            log.error(
                "%s: the ingest process ended twice while it decoded this message; it is dead-lettered without being "
                "decoded",
                first,
            )
        return first

    def fatal_row(self) -> int | None:
        """Return the row of all files from which on three processes ended, if there is one."""
        rows = (row for (name, row), deaths in self._deaths.items() if name.history and deaths >= _MOST_OF_FILES)
        return next(rows, None)

    def suspects(self, positions: Sequence[tuple[TopicPartition, Position]]) -> list[OffsetRange]:
        """Return the offsets that are decoded one by one, in a table of partitions in the order of their index."""
        index = _index(positions)
        return [OffsetRange(index[name], *offsets) for name, offsets in self._ranges.items() if name in index]

    def refused(self, positions: Sequence[tuple[TopicPartition, Position]]) -> list[tuple[int, int]]:
        """Return the offsets that are not decoded, each with the index of its partition."""
        index = _index(positions)
        return [
            (index[name], offset)
            for (name, offset), deaths in self._deaths.items()
            if deaths >= _MOST_DEATHS and name in index and not name.history
        ]


def _index(positions: Sequence[tuple[TopicPartition, Position]]) -> Mapping[TopicPartition, int]:
    return {name: at for at, (name, _) in enumerate(positions)}
