"""Stalled partitions: the position in one does not advance, although its log has records beyond it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position

STALLED_SECONDS = 20.0
"""With the intervals of checks and reports, a stall is reported within 30 s."""
_MOST_PER_CHECK_SECONDS = 2.0
"""Time between two checks counts up to this: beyond it the broker was away, or this process suspended."""

log = logging.getLogger(__name__)


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
