"""Stream time of labels and events, the lags of labels, and which topics are read ahead of the others.

Legend: N rows of a call.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from anabranch.core.host_clock import HOST_CLOCK
from anabranch.ingest.events.block import Array
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.stream.ledger import Ledger

_IN_FLIGHT = timedelta(seconds=2)
"""A record may take this long from its record time until the broker reports it in an end offset."""
_MOST_AHEAD = timedelta(minutes=1)
"""Producers' clocks may be ahead of this host's by so much."""
_MESSAGES = 15
"""The stream time of a partition is the middle one of the record times of so many messages."""
_STARTS, _ENDS = 1 / 8, 1 / 16
"""Partitions wait for each other from this share of the room on that is taken, until this one."""
_STALLED_AFTER = timedelta(minutes=1)
"""A partition from which nothing comes for so long is not waited for: its broker or its registry may be away."""
_SLACK = 8
"""A partition waits when it is ahead by more than 1 / `_SLACK` of the wait of events."""
_MOST_LAGS = 16_384
_MOST_SAVED = 1024
NEVER = -(2**62)
"""Stream time before any record."""
_NO_MESSAGES = np.full(_MESSAGES, NEVER, np.int64)


@dataclass(frozen=True)
class LabelClock:
    """The clocks that stream time is computed from, for tests to replace."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = HOST_CLOCK.now
    cpu: Callable[[], float] = time.thread_time


class StreamTimes:
    """The stream time of each partition: no earlier record is expected from it.

    It is the middle one of the last record times, so that no message with a wrong time moves it, and it goes back once
    others come. A partition that is read to its end has the time at which the broker was asked for that end, so that a
    quiet topic holds nothing up. Stream time is never ahead of this host's clock: a record whose time is, by more than
    a minute, says nothing about those that follow.
    """

    def __init__(self, label_topics: Sequence[str], clock: LabelClock) -> None:
        self._label_topics = frozenset(label_topics)
        self._clock = clock
        self._last: dict[int, NDArray[np.int64]] = {}
        """The record times of the last messages, by index of the partition."""

    def add(self, columns: Mapping[str, Array]) -> None:
        """Add the record times of N rows, by `partition`, `row` and `time_ms`; a message counts once."""
        time_ms = columns["time_ms"].astype(np.int64)
        counts = (columns["row"] == 0) & (time_ms <= self._wall_ms + int(_MOST_AHEAD.total_seconds() * 1000))
        partition, time_ms = columns["partition"][counts], time_ms[counts]
        for index in np.unique(partition).tolist():
            before = self._last.get(index, _NO_MESSAGES)
            self._last[index] = np.concatenate([before, time_ms[partition == index]])[-_MESSAGES:]

    def now(
        self, partitions: Sequence[Partition], ledger: Ledger, ends_time: float | None
    ) -> tuple[int | None, int | None]:
        """Return the stream time of label topics and that of event topics, in ms; None while a partition has none."""
        age = None if ends_time is None else self._clock.monotonic() - ends_time
        asked = None if age is None else int((self._clock.wall() - age - _IN_FLIGHT.total_seconds()) * 1000)
        wall_ms = self._wall_ms
        lowest: dict[bool, int] = {}
        for index, (partition, account) in enumerate(zip(partitions, ledger.partitions, strict=False)):
            if not partition.read:
                continue
            reached = min(wall_ms, self.of(index))
            if asked is not None and partition.end is not None and account.position.offset >= partition.end:
                reached = max(reached, asked)
            labels = partition.name.topic in self._label_topics
            lowest[labels] = min(reached, lowest.get(labels, reached))
        labels_ms, events_ms = lowest.get(True, NEVER), lowest.get(False, NEVER)
        return (None if labels_ms == NEVER else labels_ms), (None if events_ms == NEVER else events_ms)

    def of(self, index: int) -> int:
        """Return the middle one of the last record times of a partition, in ms; `NEVER` before there are enough."""
        return int(np.median(self._last.get(index, _NO_MESSAGES)))

    @property
    def _wall_ms(self) -> int:
        return int(self._clock.wall() * 1000)


class LabelLags:
    """The time from event to label of the last labels, in milliseconds."""

    def __init__(self) -> None:
        self._lags = deque[int](maxlen=_MOST_LAGS)

    def add(self, lags_ms: NDArray[np.int64]) -> None:
        """Add the lags of N labels, which replace the oldest ones."""
        self._lags.extend(lags_ms.tolist())

    def quantiles(self) -> tuple[float, float] | tuple[None, None]:
        """Return the median and the 99th percentile, in seconds; None before the first label."""
        if not self._lags:
            return None, None
        p50, p99 = np.quantile(np.array(self._lags), (0.5, 0.99)) / 1000
        return float(p50), float(p99)

    def state(self) -> list[int]:
        """Return the last of the lags, for a checkpoint."""
        return list(self._lags)[-_MOST_SAVED:]


class AlignedReading:
    """Keeps topics of events and of labels aligned in time while a backlog is read. Used by one thread.

    What is read ahead of the other topics has to be stored until they are there: labels in memory, events in the file
    of those that wait. So a partition that is ahead waits for the others once there is little room.
    """

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
