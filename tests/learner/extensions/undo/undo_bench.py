"""A learner in this process over topics of which any offsets may be missing, as after compaction."""

import threading
from collections.abc import Collection, Mapping

import numpy as np
import torch

from anabranch.ingest.events.block import Block, Coverage, Outcome
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.reader.cursors import Partition
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.extensions.undo.extension import Undo, go_back
from anabranch.learner.versions.format import Versions
from tests.learner.learner_bench import LearnerBench, Stream, small_model

NAMES = (TopicPartition("payments", 0), TopicPartition("payments", 1))
FETCHED = 50
"""Offsets of a block."""
Missing = Mapping[TopicPartition, Collection[int]]


class GappyStream(Stream):
    """Two partitions of `count` offsets, read from any position on; those of `missing` have no event."""

    def __init__(self, schema, count, missing, stop):
        super().__init__(schema, 0, stop)
        self.count, self.missing = count, missing
        self.partitions = [Partition(name, 0, count) for name in NAMES]
        self.read_to = [0, 0]

    def seek(self, positions):
        self.read_to = [positions[name].offset if name in positions else 0 for name in NAMES]

    def poll(self, timeout):
        index = int(self.read_to[0] > self.read_to[1])
        begin = self.read_to[index]
        if begin >= self.count:
            return self.end(timeout)
        end = self.read_to[index] = min(self.count, begin + FETCHED)
        gone = self.missing.get(NAMES[index], ())
        columns = fake_columns(self.schema, range(begin, end), partition=index)
        number = columns["offset"].astype(np.int64) * 2 + index
        columns["label"] = number % 3
        columns["outcome"][number % 37 == 0] = np.uint8(Outcome.HELD_OUT)
        noise = np.stack([np.sin(number * (k + 1.7)) for k in range(3)], axis=1)
        columns["feature.x"] = (noise + np.eye(3)[number % 3]).astype(np.float32)
        there = np.array([offset not in gone for offset in range(begin, end)])
        return Block({name: column[there] for name, column in columns.items()}, (Coverage(index, begin, end),))


class UndoBench(LearnerBench):
    """A learner that starts as `learner.assembly` does: it returns to a checkpoint from before what was undone."""

    def __init__(self, path, schema, count, missing=None, *, replay=None, checkpoints=None, complete=False):
        torch.manual_seed(0)
        self.versions = Versions(path / "versions")
        undone = go_back(path, Checkpoints(path / "checkpoints", schema.digest, 1), self.versions, torn=False)
        super().__init__(
            *(path, schema, small_model(), 0),
            replay={"capacity": 200, **(replay or {})},
            learner={"deterministic": True, "batch_size": 24},
            stream=lambda stop: GappyStream(schema, count, missing or {}, stop),
            checkpoints=checkpoints,
            undo=Undo(path, undone),
            complete=complete,
        )
        assert isinstance(self.stream, GappyStream)
        if self.found is not None:
            self.loop.restore(self.found[1])
            self.stream.seek(self.loop.ledger.positions)

    @property
    def position(self):
        """Offsets of both partitions that have an outcome."""
        return sum(each.offset for each in self.loop.ledger.positions.values())

    def checkpoint(self):
        """Write a checkpoint, and return its number."""
        self.checkpointer.request()
        self.loop.checkpoint_if_due()
        _wait(self.checkpointer)
        return self.checkpointer.number


def _wait(checkpointer):
    while checkpointer.busy:
        threading.Event().wait(0.001)
    checkpointer.end_snapshot_if_written()
