"""The store that `[replay]` makes of a row size: how many events it keeps, and what they take in each tier."""

from dataclasses import dataclass

import numpy as np

from anabranch.commands.plan.constants import Constants
from anabranch.config.pipeline import Pipeline
from anabranch.ingest.events.schema import Schema
from anabranch.learner.loop.stored_events import most_added
from anabranch.replay.build import store_size
from anabranch.replay.reservoir.event_table import RECORD
from anabranch.replay.row_layout import RowLayout
from anabranch.replay.snapshot import ENTRY
from anabranch.replay.tiers.disk import DiskTier
from anabranch.replay.tiers.redis_tier import RedisTier

ENTRY_BYTES = ENTRY.itemsize
"""Bytes of an event in a checkpoint, without its row."""
_HELD_OUT_BYTES = 36
"""Bytes of a held-out event in a checkpoint, without its row."""
SLOT_BYTES = RECORD.itemsize
"""Bytes of the table of events, for each slot."""
EVENT_BYTES = ENTRY_BYTES - RECORD.itemsize
"""Bytes of the table of events, for each event in addition."""
COPIES_SAVED = 2
"""Copies of the rows of a segment at its highest, while a checkpoint that merges earlier ones into it is written."""


@dataclass(frozen=True)
class PlannedStore:
    """The store when it is full; R is the bytes of a row."""

    row_bytes: int
    events: int
    slots: int
    """Of the primary tier."""
    memory_rows: int
    """Rows in the memory tier."""
    redis_rows: int
    """Rows in the tier in Redis; 0 without one."""
    disk_record_bytes: int
    """Bytes of an event in the disk tier; 0 without one."""

    @classmethod
    def of(cls, pipeline: Pipeline, row_bytes: int) -> "PlannedStore":
        """Return the store of a pipeline.

        Raises:
            SettingsError: the bytes are too few for one event.
        """
        replay = pipeline.replay
        events, slots = store_size(replay, row_bytes, most_added(pipeline.learner, pipeline.stream, 1))
        in_redis = 0
        if replay.redis is not None:
            in_redis = min(events, int(replay.redis.bytes) // RedisTier.bytes_of(row_bytes))
        record = DiskTier.bytes_of(row_bytes) if replay.disk is not None else 0
        return cls(row_bytes, events, slots, min(slots, int(replay.device_bytes) // row_bytes), in_redis, record)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the memory tier."""
        return self.memory_rows * self.row_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of events, on the host."""
        return self.slots * SLOT_BYTES + self.events * EVENT_BYTES

    @property
    def memory_hit_rate(self) -> float:
        """Fraction of uniformly sampled events that the memory tier has."""
        return min(1.0, self.memory_rows / self.events)


def schema_row_bytes(schema: Schema) -> int:
    """Return the bytes of a row with the fields of the schema alone."""
    return RowLayout(schema.payload()).row_bytes


def admitted(store: PlannedStore, pipeline: Pipeline, rate: float, begin: float, end: float) -> float:
    """Return how many events are admitted from second `begin` to second `end` of a stream, whose store starts empty.

    A reservoir of k events admits event n with the probability k / n (Vitter 1985). With `recent`, whose weights halve
    after `half_life`, all weights sum to rate x half_life / ln 2, and a new event has the weight 1.
    """
    k, first, last = store.events, rate * begin, rate * end
    filling = max(0.0, min(last, k) - first)
    if last <= k:
        return filling
    if pipeline.replay.admission == "recent":
        weights = rate * pipeline.replay.half_life.total_seconds() / np.log(2)
        return float(filling + (last - max(first, k)) * min(1.0, k / max(1.0, weights)))
    return filling + k * float(np.log(last / max(first, k)))


def held_out_bytes(pipeline: Pipeline, constants: Constants) -> int:
    """Return the bytes of a held-out event in a checkpoint; without a store its row has the fields of the schema."""
    row = constants.row_bytes or schema_row_bytes(Schema(pipeline.events, pipeline.stream.labels))
    return row + _HELD_OUT_BYTES
