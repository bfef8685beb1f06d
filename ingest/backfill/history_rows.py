"""The history as the worker reads it. Imports no pyarrow."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.backfill.files import Switch
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Fingerprint, PartitionFingerprint, Position
from anabranch.ingest.formats.base import Decoded
from anabranch.ingest.transport.protocol import HistoryProgress


@dataclass(frozen=True)
class HistoryRows:
    """K consecutive rows of files, partition after partition, each in the order of its offsets.

    Attributes:
        decoded: message `k` is row `k` of these; its only event is row 0.
        counts: how many of the rows each partition has, in their order; a partition may have none.
        ends: the first offset after these rows, by partition.
        offset: int64 `[K]`, ascending in each partition.
        time_ms: int64 `[K]`, record times in milliseconds since 1970, 0 for none.
        left: bool `[K]`, which rows are left to the topics; None: none.
        text: returns row `k` as a message value, for its dead letter.
        hints: where to begin to read when these rows are finished, by partition.
    """

    decoded: Decoded
    counts: Mapping[TopicPartition, int]
    ends: Mapping[TopicPartition, int]
    offset: NDArray[np.int64]
    time_ms: NDArray[np.int64]
    text: Callable[[int], bytes]
    left: NDArray[np.bool_] | None = None
    hints: Mapping[TopicPartition, Fingerprint] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offset)


class HistorySource(Protocol):
    """The files of `[stream.backfill]`; `ingest.backfill.history.FileHistory` is one. Used by one thread."""

    @property
    def partitions(self) -> Sequence[TopicPartition]:
        """A partition for each file and pass."""
        ...

    @property
    def ends(self) -> Mapping[TopicPartition, int]:
        """The number of rows of each partition."""
        ...

    @property
    def times(self) -> str | None:
        """The column of record times, if there is one."""
        ...

    @property
    def marks(self) -> Sequence[PartitionFingerprint]:
        """What each partition is recognised by."""
        ...

    @property
    def done(self) -> bool:
        """Whether all rows were returned."""
        ...

    @property
    def progress(self) -> HistoryProgress:
        """How far the history was read."""
        ...

    def list_files(self, switch: Switch | None, *, lost: bool | None = None) -> Switch | None:
        """List the files, and return where the topics begin; as `FileHistory.list_files`."""
        ...

    def restore(
        self, positions: Sequence[tuple[TopicPartition, Position]], marks: Sequence[PartitionFingerprint]
    ) -> None:
        """Continue from the positions of the learner."""
        ...

    def plan(
        self,
        positions: Mapping[TopicPartition, int],
        starts: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        *,
        first: bool,
    ) -> Mapping[TopicPartition, int]:
        """Return where partitions of the topics begin whose events are rows of files; see `KafkaHistory.plan`."""
        ...

    def poll(self, timeout: timedelta) -> HistoryRows | None:
        """Return the next rows, or None when none are there in time; raises as `FileHistory.poll`."""
        ...

    def close(self) -> None:
        """Stop reading."""
        ...
