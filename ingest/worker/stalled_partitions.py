"""Partitions that stand still: the position in one does not move, although the topic goes on beyond it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ingest.events.partition import TopicPartition
from ingest.events.position import Position

STALLED_SECONDS = 20.0
"""With what it takes to look and to report this is told within 30 s."""
_AT_ONCE_SECONDS = 2.0
"""Between two looks no more counts: in the rest of it the broker was away, or this process suspended."""

log = logging.getLogger(__name__)


@dataclass
class _Still:
    position: Position
    seconds: float = 0.0


class StallDetector:
    """How long each partition has not moved while it was read. Looked at about once a second."""

    def __init__(self) -> None:
        self._still: dict[TopicPartition, _Still] = {}
        self._told: list[TopicPartition] = []

    def check(
        self, positions: Mapping[TopicPartition, Position], ends: Mapping[TopicPartition, int], seconds: float
    ) -> str | None:
        """Return one sentence if a partition stands still; it names the one that has done so longest.

        Args:
            positions: the next event of each partition that is read.
            ends: of those that are known.
            seconds: how long they were read since the last look; time in which the learner took nothing is none.
        """
        before, self._still = self._still, {}
        for partition, position in positions.items():
            end = ends.get(partition)
            if end is not None and position.offset < end:
                still = before.get(partition)
                known = still is not None and still.position == position
                self._still[partition] = still if known and still is not None else _Still(position)
                self._still[partition].seconds += min(seconds, _AT_ONCE_SECONDS) if known else 0.0
        stalled = [p for p, still in self._still.items() if still.seconds >= STALLED_SECONDS]
        stalled.sort(key=lambda partition: -self._still[partition].seconds)
        sentence = self._sentence(stalled, ends) if stalled else None
        if sentence is not None and stalled != self._told:
            log.warning("%s", sentence)
        elif self._told and not stalled:
            log.info("no partition stands still any more")
        self._told = stalled
        return sentence

    def _sentence(self, stalled: list[TopicPartition], ends: Mapping[TopicPartition, int]) -> str:
        partition, others = stalled[0], len(stalled) - 1
        still = self._still[partition]
        more = f"; {others} more partition{'' if others == 1 else 's'} likewise" if others else ""
        return (
            f"{partition.topic}[{partition.partition}] stands still at offset {still.position.offset}, while it ends "
            f"at {ends[partition]}: the broker has returned nothing from there for {still.seconds:.0f} s{more}"
        )
