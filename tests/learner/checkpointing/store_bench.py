"""A store over a directory of checkpoints, without a learner."""

from pathlib import Path
from typing import Any

import torch

from ingest.events.partition import TopicPartition
from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from learner.checkpointing.checkpoint_pruning import CheckpointPruning
from learner.checkpointing.replay_state import pack, unpack
from learner.state_dir.checkpoint import ROWS, SEGMENT, Checkpoint, Checkpoints
from replay.build import build_store
from replay.checkpoint.segments import Segment
from replay.config import ReplaySettings
from replay.fake import add_now
from replay.store import Store

PARTITIONS = [TopicPartition("events", 0)]


class Bench:
    """A store and its checkpoints, without a learner."""

    def __init__(self, path: Path, schema: Schema, options: dict[str, Any], *, complete: bool = False) -> None:
        self.complete = complete
        self.checkpoints, self.schema, self.path, self.options = (
            Checkpoints(path / "checkpoints", schema.digest, 1),
            schema,
            path,
            options,
        )
        self.store: Store | None = None
        self.number, self.segments, self.begin = 0, tuple[Segment, ...](), 0
        self.resume()

    def resume(self) -> int:
        """Restore the newest checkpoint, and return its number; 0 without one."""
        self.close()
        found = self.checkpoints.newest()
        contents, segments = (unpack(found[1]) if found else None) or (None, ())
        settings = ReplaySettings.model_validate({"capacity": 1000, **self.options})
        folder = self.path / "replay"
        arguments = settings, self.schema, torch.device("cpu"), 0, folder, contents
        self.store = build_store(*arguments, keys="bench:rank-0", complete=self.complete)
        self.segments = tuple(segments)
        return found[0] if found else 0

    def add(self, n: int) -> None:
        assert self.store is not None
        add_now(self.store, fake_columns(self.schema, range(self.begin, self.begin + n)), PARTITIONS)
        self.begin += n

    def checkpoint(self, keep: int = 3, *, fails: bool = False) -> None:
        assert self.store is not None
        self.number += 1
        held = self.store.begin_snapshot(self.number)
        if not fails:
            oldest = sorted([*self.checkpoints.numbers(), self.number])[-keep:][0]
            part = pack(*self.store.contents(held, oldest), self.segments, self.checkpoints.part, self.checkpoints.rows)
            state = {"replay": part.state}
            self.checkpoints.write(self.number, Checkpoint(0, part.tensors, state, part.carried, part.rows), 0.0)
            self.store.tiers.mark_named()
            self.segments = tuple(part.segments)
            CheckpointPruning(self.checkpoints, keep).prune()
        self.store.end_snapshot(min(self.checkpoints.numbers(), default=None), written=not fails)

    @property
    def held(self) -> list[int]:
        assert self.store is not None
        return self.store.event_table.copy()["offset"].tolist()

    def files(self, number: int) -> dict[str, Path]:
        folder = self.checkpoints.path / str(number) / "rank-0"
        return {path.name: path for path in folder.iterdir() if path.name.startswith((SEGMENT, ROWS))}

    def payload(self) -> dict[int, list[float]]:
        """Return the features of all events, by offset."""
        assert self.store is not None
        plan = self.store.plan(0, len(self.store))
        rows = self.store.fetch(plan).columns["feature.x"].tolist()
        return dict(zip(plan.records["offset"].tolist(), rows, strict=True))

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
        self.store = None
