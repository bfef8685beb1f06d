"""How much of a disk a pipeline takes when everything is there that it keeps."""

import math
from typing import NamedTuple

from anabranch.ingest.events.schema import Schema
from anabranch.learner.settings.pipeline import PipelineSettings

_OPTIMIZER_TENSORS = 3
"""Weights and two moments: what a checkpoint holds of a model with AdamW."""
_OUTPUT_BYTES = 4
_ROW_BYTES = 56
"""What a checkpoint holds of each event in addition to its fields."""


class DiskSpace(NamedTuple):
    """Bytes of one of each, at most."""

    file: int
    """The file of the disk tier; 0 without one."""
    checkpoint: int
    rows: int
    """The rows of all events, which checkpoints share; 0 where the disk tier or memory has them alone."""
    version: int
    base: int
    checkpoints: int
    """How many checkpoints there may be."""
    versions: int

    @property
    def total(self) -> int:
        """Bytes of all that is kept."""
        parts = self.checkpoints * self.checkpoint + 2 * self.rows + self.versions * self.version
        return self.file + parts + self.base


def disk_space(pipeline: PipelineSettings, model_bytes: int, base_bytes: int) -> DiskSpace:
    """Return what a pipeline takes, whose trained weights and frozen ones have these bytes."""
    schema = Schema(pipeline.events)
    row = sum(dtype.itemsize * math.prod(shape) for dtype, shape in schema.payload().values())
    capacity, disk, rows = pipeline.replay.capacity, pipeline.replay.disk, 0
    if pipeline.learner.strategy.kind.keeps_output:
        row += _OUTPUT_BYTES * (schema.label.classes or 1) * (schema.label.length or 1)
    file = 0
    if not pipeline.learner.strategy.kind.replays:
        replay = 0
    elif (primary := pipeline.replay.primary) is not None:
        events = min(capacity, int(pipeline.replay.slower[primary].bytes) // row)
        replay = events * _ROW_BYTES
        file = int(disk.bytes) if disk is not None else 0
        if pipeline.storage is not None and pipeline.storage.mode == "mirror":
            rows = events * row  # checkpoints share these files
    else:
        replay = min(int(pipeline.replay.device_bytes), capacity * (row + _ROW_BYTES))
    checkpoint = replay + _OPTIMIZER_TENSORS * model_bytes
    kept = pipeline.versions.keep + pipeline.versions.keep_hourly + 2
    return DiskSpace(file, checkpoint, rows, model_bytes, base_bytes, pipeline.checkpoints.keep + 1, kept)
