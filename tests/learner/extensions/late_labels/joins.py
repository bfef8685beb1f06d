"""A join over a directory of checkpoints, as a learner uses it, and an offline join in plain Python."""

import shutil
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from anabranch.ingest.events.block import IDENTITY_COLUMNS, Array
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.checkpoints.checkpointer import CheckpointPruning, complete
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.checkpoints.part_formats import WAITING_EVENTS
from anabranch.learner.extensions.late_labels.decisions import Resolution
from anabranch.learner.extensions.late_labels.join_part import open_join

WAIT = 100
SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
    )
)
OUTPUT = (3,)


def schema_with(label_key):
    """Return SCHEMA with the key "user" and the group "order", and labels that find their events by one of them."""
    keys = {"key": {"name": "user"}, "group": {"name": "order"}}
    labels = LabelStreamSettings.model_validate({"topics": ["labels"], "wait": "1h", "key": label_key})
    return Schema(SchemaSettings.model_validate({**SCHEMA.settings.model_dump(), **keys}), labels)


NONE = np.empty(0, np.int64)
"""No slots."""


class JoinOptions(NamedTuple):
    settings: LabelStreamSettings
    complete: bool


def options(*, complete=False, early=False, **changes):
    values = {"topics": ("labels",), "wait": timedelta(milliseconds=WAIT), "bytes": 2**20}
    values |= {"early": "negative-then-correct" if early else "none"}
    return JoinOptions(LabelStreamSettings.model_construct(**{**values, **changes}), complete)


def oldest_open(join, partition):
    """Return what is open of the partition of events, 0, or of labels, 1."""
    return {index: offset for index, offset in join.oldest_open().items() if index == partition}


def problem(join):
    """Return what the extension says of the join."""
    return join.payload.tier.problem or join.losses.problem


def events(offsets, keys, times, partition=0):
    """Events whose features follow from their offset."""
    count = len(offsets)
    columns: dict[str, Array] = {name: np.zeros(count, dtype) for name, dtype in IDENTITY_COLUMNS.items()}
    columns |= {name: np.zeros((count, *shape), dtype) for name, (dtype, shape) in SCHEMA.payload().items()}
    columns["offset"], columns["key_hash"] = np.array(offsets, np.int64), np.array(keys, np.uint64)
    columns["time_ms"], columns["partition"] = np.array(times, np.int64), np.full(count, partition, np.int32)
    columns["feature.x"] = np.array(offsets, np.float32)[:, None] + np.array([0, 0.25, 0.5], np.float32)
    columns["label"] = np.full(count, -1, np.int64)
    columns["weight"] = np.ones(count, np.float32)
    return columns


def predictions(offsets):
    return np.stack([np.array(offsets, np.float32), *[np.zeros(len(offsets), np.float32)] * 2], axis=1)


def labels(keys, values, times, offset=0):
    count = len(keys)
    return {
        "key_hash": np.array(keys, np.uint64),
        "label": np.array(values, np.int64),
        "labelled": np.ones(count, np.bool_),
        "time_ms": np.array(times, np.int64),
        "partition": np.full(count, 1, np.int32),
        "offset": np.arange(offset, offset + count),
    }


def rows_of(ready, *, check=True):
    """Return offset, resolution, label and wait of each undamaged event; `check`: whether it has the features of
    `events`."""
    if ready is None:
        return []
    intact = ~ready.damaged
    columns = {name: column[intact] for name, column in ready.columns.items()}
    offsets = columns["offset"].tolist()
    assert not check or np.array_equal(columns["feature.x"], events(offsets, offsets, offsets)["feature.x"])
    assert np.array_equal(ready.predictions[intact, 0], np.array(offsets, np.float32))
    names = [Resolution(value).name for value in ready.resolution[intact].tolist()]
    assert columns["labelled"].tolist() == [name != "TIMED_OUT" for name in names]
    return list(zip(offsets, names, columns["label"].tolist(), ready.waited_ms[intact].tolist(), strict=True))


def drain(join, most=1000, *, check=True):
    """Take and settle all events that are decided."""
    rows = []
    while ready := join.take(most):
        rows += rows_of(ready, check=check)
        join.settle()
    return rows


class JoinBench:
    """A join and its checkpoints below one directory; `restart` opens it again as after a SIGKILL."""

    def __init__(self, path, join_options=None, keep=2, schema=SCHEMA):
        self.schema = schema
        self.folder = WAITING_EVENTS.folder(path)
        self.options = join_options or options()
        self.checkpoints = Checkpoints(path / "checkpoints", SCHEMA.digest, 1)
        self.keep = keep
        self.number = 0
        self.ledger: list[dict[str, Any]] = []
        self.part = self.open(None)

    @property
    def join(self):
        return self.part.join

    def open(self, checkpoint):
        first = checkpoint is None and not self.checkpoints.numbers()
        settings, complete = self.options
        return open_join(settings, self.schema, OUTPUT, self.folder, checkpoint, first=first, complete=complete)

    def restart(self, join_options=None):
        """Open the join again, with the newest checkpoint."""
        self.join.payload.tier.close()
        self.options = join_options or self.options
        self.part = self.open(self.checkpoints.newest())

    def restart_on_a_fresh_host(self, join_options=None):
        """Open the join where only the checkpoints are."""
        self.join.payload.tier.close()
        shutil.rmtree(self.folder.parent)
        self.options = join_options or self.options
        self.part = self.open(self.checkpoints.newest())

    def capture(self):
        self.number += 1
        return self.part.capture(self.number)

    def write(self, captured):
        packed = captured.pack(self.checkpoints)
        self.checkpoints.write(self.number, complete(1, {}, {"ledger": self.ledger}, [packed]), 0.0)
        captured.mark_named()
        CheckpointPruning(self.checkpoints, self.keep).prune()
        self.part.end(min(self.checkpoints.numbers()), written=True)

    def checkpoint(self):
        self.write(self.capture())

    def fail_checkpoint(self):
        """Capture a checkpoint that cannot be written."""
        self.capture()
        self.part.end(min(self.checkpoints.numbers(), default=None), written=False)
