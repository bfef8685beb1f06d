"""What a version is made of, copied between two steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ingest.events.position import Position
from learner.evaluation.holdout import HoldoutRows
from learner.state_dir.trained_through import PartitionProgress
from learner.stream.record_times import RecordTimes

Progress = tuple[int, tuple[Position, ...], int]
"""Steps, the position of each partition, and how many events that waited for their label have ended."""


@dataclass(frozen=True)
class Snapshot:
    """The data of a version, copied at one step boundary."""

    step: int
    weights: Mapping[str, Tensor]
    trained_through: Mapping[str, PartitionProgress]
    holdout: HoldoutRows
    accuracy_now: float | None
    newly_trained: RecordTimes
    """Record times of the newly trained events since the last snapshot."""
    seen_through: Mapping[str, int] | None = None
    """How far the stream was read, by `topic:partition`; None where no labels come late."""
    learned_from: Mapping[str, int] | None = None
    """The first offset that was read, by `topic:partition`."""
    erasures: int | None = None
    """The number of the last erasure that was applied to stored events."""
    found: Mapping[str, float] = field(default_factory=dict)
    """The settings that a search has found, by key."""
