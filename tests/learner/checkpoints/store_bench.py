"""A store over a directory of checkpoints, without a learner."""

import torch

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.checkpoints.checkpointer import CheckpointPruning, complete
from anabranch.learner.checkpoints.format import ROWS, SEGMENT, Checkpoints
from anabranch.learner.checkpoints.parts import pack, unpack
from anabranch.replay.build import build_store
from anabranch.replay.segments import Segment
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.store import Store
from anabranch.testing.stores import add_now, plan_of

PARTITIONS = [TopicPartition("events", 0)]


class Bench:
    """A store and its checkpoints, without a learner."""

    def __init__(self, path, schema, options, *, complete=False):
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

    def resume(self):
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

    def add(self, n):
        assert self.store is not None
        add_now(self.store, fake_columns(self.schema, range(self.begin, self.begin + n)), PARTITIONS)
        self.begin += n

    def checkpoint(self, keep=3, *, fails=False):
        assert self.store is not None
        self.number += 1
        held = self.store.begin_snapshot(self.number)
        if not fails:
            oldest = sorted([*self.checkpoints.numbers(), self.number])[-keep:][0]
            packed, segments = pack(*held.contents(oldest), self.segments, self.checkpoints)
            self.checkpoints.write(self.number, complete(0, {}, {}, [packed]), 0.0)
            for primary in self.store.tiers.slow[-1:]:
                primary.mark_named()
            self.segments = tuple(segments)
            CheckpointPruning(self.checkpoints, keep).prune()
        self.store.end_snapshot(min(self.checkpoints.numbers(), default=None), written=not fails)

    @property
    def held(self):
        assert self.store is not None
        return self.store.event_table.copy()["offset"].tolist()

    def files(self, number):
        folder = self.checkpoints.path / str(number) / "rank-0"
        return {path.name: path for path in folder.iterdir() if path.name.startswith((SEGMENT, ROWS))}

    def payload(self):
        """Return the features of all events, by offset."""
        assert self.store is not None
        plan = plan_of(self.store, 0, len(self.store))
        rows = self.store.planner.fetch(plan).columns["feature.x"].tolist()
        return dict(zip(plan.records["offset"].tolist(), rows, strict=True))

    def close(self):
        if self.store is not None:
            self.store.close()
        self.store = None
