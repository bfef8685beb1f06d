"""Keeps topics of events and of labels aligned in time while a backlog is read.

What is read ahead of the other topics has to be stored until they are there: labels in memory, events in the file of
those that wait. So a partition that is ahead waits for the others once there is little room.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

from ingest.reader.cursors import Partition
from learner.stream.ledger import Ledger

_STARTS, _ENDS = 1 / 8, 1 / 16
"""Partitions wait for each other from this share of the room on that is taken, until this one."""
_STALLED_AFTER = timedelta(minutes=1)
"""A partition from which nothing comes for so long is not waited for: its broker or its registry may be away."""
_SLACK = 8
"""A partition waits when it is ahead by more than 1 / `_SLACK` of the wait of events."""


class AlignedReading:
    """Says which partitions are ahead. Used by one thread."""

    def __init__(self, wait_ms: int, clock: Callable[[], float]) -> None:
        """Take how long an event waits, and a monotonic clock."""
        self._slack_ms = wait_ms // _SLACK
        self._clock = clock
        self._moved: dict[int, tuple[int, float]] = {}
        """The offset of each partition, and since when it is there."""
        self._aligns = False

    def ahead(
        self, taken: float, partitions: Sequence[Partition], ledger: Ledger, stream_time: Callable[[int], int]
    ) -> frozenset[int]:
        """Return the indexes of the partitions that are not to be read now.

        Args:
            taken: the share of the room for labels, or of that for events, that is taken, whichever is more.
            partitions: all partitions.
            ledger: with their positions.
            stream_time: returns the time up to which a partition was read, by its index.
        """
        self._aligns = taken > (_ENDS if self._aligns else _STARTS)
        if not self._aligns:
            self._moved.clear()
            return frozenset()
        now, times, behind = self._clock(), dict[int, int](), list[int]()
        for index, (partition, account) in enumerate(zip(partitions, ledger.partitions, strict=False)):
            ended = partition.end is not None and account.position.offset >= partition.end
            if not partition.read or (partition.name.history and ended):
                continue
            if partition.name.history:
                return frozenset()  # files are read before topics
            times[index] = stream_time(index)
            offset, since = self._moved.get(index, (-1, now))
            if offset != account.position.offset:
                offset, since = account.position.offset, now
            self._moved[index] = offset, since
            if not ended and now - since < _STALLED_AFTER.total_seconds():
                behind.append(times[index])
        if not behind:
            return frozenset()
        return frozenset(index for index, time_ms in times.items() if time_ms > min(behind) + self._slack_ms)
