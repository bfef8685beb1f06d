"""Steps whose loss or gradient is not finite."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from prometheus_client import Counter

from ingest.events.block import Array
from ingest.events.partition import TopicPartition

_MANY = 10

log = logging.getLogger(__name__)


class NonFiniteSteps:
    """Counts consecutive steps that were skipped. Used by the loop's thread; any may read."""

    def __init__(self, metric: Counter) -> None:
        self._metric = metric
        self.in_a_row = 0

    def add(self, step: int, loss: float, events: Mapping[str, Array], partitions: Sequence[TopicPartition]) -> None:
        """Count and log a step with the new events of these columns."""
        self._metric.inc()
        self.in_a_row += 1
        log.warning(
            "step %d: loss %s or its gradient is not finite; skipped %s", step, loss, _ranges(events, partitions)
        )

    @property
    def spoiled(self) -> bool:
        """Whether many consecutive steps were not finite, maybe because of the weights."""
        return self.in_a_row >= _MANY

    @property
    def problem(self) -> str | None:
        """One sentence when many consecutive steps are not finite."""
        if not self.spoiled:
            return None
        return (
            f"the last {self.in_a_row} steps were skipped because loss or gradient was not finite: "
            "are the weights? No checkpoint is made until a step is finite, so that a restart goes on from before"
        )


def _ranges(columns: Mapping[str, Array], partitions: Sequence[TopicPartition]) -> str:
    """Return ranges of events as `topic[partition]@first..last`, for logs."""
    parts = []
    for index in np.unique(columns["partition"]).tolist():
        name = partitions[index]
        offsets = columns["offset"][columns["partition"] == index]
        parts.append(f"{name.topic}[{name.partition}]@{offsets.min()}..{offsets.max()}")
    return ", ".join(parts)
