"""A join over a directory of checkpoints, as a learner uses it, and an offline join in plain Python."""

import dataclasses
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingest.config import SchemaSettings
from ingest.events.block import IDENTITY_COLUMNS, Array
from ingest.events.schema import Schema
from ingest.label_stream_settings import LabelStreamSettings
from learner.checkpointing.checkpoint_pruning import CheckpointPruning
from learner.labels.join_checkpoint import CapturedJoin, JoinPart
from learner.labels.label_join import JoinOptions, LabelJoin
from learner.labels.opening import label_folder, open_join
from learner.labels.ready import Ready, Resolution
from learner.state_dir.checkpoint import Checkpoint, Checkpoints

WAIT = 100
SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
    )
)
OUTPUT = (3,)


def schema_with(label_key: str) -> Schema:
    """Return SCHEMA with the key "user" and the group "order", and labels that find their events by one of them."""
    keys = {"key": {"name": "user"}, "group": {"name": "order"}}
    labels = LabelStreamSettings.model_validate({"topics": ["labels"], "wait": "1h", "key": label_key})
    return Schema(SchemaSettings.model_validate({**SCHEMA.settings.model_dump(), **keys}), labels)


def options(**changes: Any) -> JoinOptions:
    return dataclasses.replace(JoinOptions(timedelta(milliseconds=WAIT), 2**20), **changes)


def events(offsets: Sequence[int], keys: Sequence[int], times: Sequence[int], partition: int = 0) -> dict[str, Array]:
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


def predictions(offsets: Sequence[int]) -> NDArray[np.float32]:
    return np.stack([np.array(offsets, np.float32), *[np.zeros(len(offsets), np.float32)] * 2], axis=1)


def labels(keys: Sequence[int], values: Sequence[int], times: Sequence[int], offset: int = 0) -> dict[str, Array]:
    count = len(keys)
    return {
        "key_hash": np.array(keys, np.uint64),
        "label": np.array(values, np.int64),
        "labelled": np.ones(count, np.bool_),
        "time_ms": np.array(times, np.int64),
        "partition": np.full(count, 1, np.int32),
        "offset": np.arange(offset, offset + count),
    }


def rows_of(ready: Ready | None, *, check: bool = True) -> list[tuple[int, str, int, int]]:
    """Return offset, resolution, label and wait of each event; `check`: whether it has the features of `events`."""
    if ready is None:
        return []
    offsets = ready.columns["offset"].tolist()
    assert not check or np.array_equal(ready.columns["feature.x"], events(offsets, offsets, offsets)["feature.x"])
    assert np.array_equal(ready.predictions[:, 0], np.array(offsets, np.float32))
    names = [Resolution(value).name for value in ready.resolution.tolist()]
    assert ready.columns["labelled"].tolist() == [name != "TIMED_OUT" for name in names]
    return list(zip(offsets, names, ready.columns["label"].tolist(), ready.waited_ms.tolist(), strict=True))


def drain(join: LabelJoin, most: int = 1000, *, check: bool = True) -> list[tuple[int, str, int, int]]:
    """Take and settle all events that are decided."""
    rows = []
    while ready := join.take(most):
        rows += rows_of(ready, check=check)
        join.settle()
    return rows


class JoinBench:
    """A join and its checkpoints below one directory; `restart` opens it again as after a SIGKILL."""

    def __init__(
        self, path: Path, join_options: JoinOptions | None = None, keep: int = 2, schema: Schema = SCHEMA
    ) -> None:
        self.schema = schema
        self.folder = label_folder(path)
        self.options = join_options or options()
        self.checkpoints = Checkpoints(path / "checkpoints", SCHEMA.digest, 1)
        self.keep = keep
        self.number = 0
        self.ledger: list[dict[str, Any]] = []
        self.join = self.open(None)

    def open(self, checkpoint: tuple[int, Checkpoint] | None) -> LabelJoin:
        first = checkpoint is None and not self.checkpoints.numbers()
        return open_join(self.options, self.schema, OUTPUT, self.folder, checkpoint, first=first)

    def restart(self, join_options: JoinOptions | None = None) -> None:
        """Open the join again, with the newest checkpoint."""
        self.join.close()
        self.options = join_options or self.options
        self.join = self.open(self.checkpoints.newest())

    def restart_on_a_fresh_host(self, join_options: JoinOptions | None = None) -> None:
        """Open the join where only the checkpoints are."""
        self.join.close()
        shutil.rmtree(self.folder.parent)
        self.options = join_options or self.options
        self.join = self.open(self.checkpoints.newest())

    def capture(self) -> CapturedJoin:
        self.number += 1
        return self.join.snapshots.begin(self.number)

    def write(self, captured: CapturedJoin) -> None:
        part = captured.pack(self.checkpoints.part)
        self.checkpoints.write(self.number, self._checkpoint(part), 0.0)
        captured.file.mark_named()
        CheckpointPruning(self.checkpoints, self.keep).prune()
        self.join.snapshots.end(min(self.checkpoints.numbers()), written=True)

    def _checkpoint(self, part: JoinPart) -> Checkpoint:
        return Checkpoint(1, part.tensors, {"labels": part.state, "ledger": self.ledger}, part.carried, part.rows)

    def checkpoint(self) -> None:
        self.write(self.capture())

    def fail_checkpoint(self) -> None:
        """Capture a checkpoint that cannot be written."""
        self.capture()
        self.join.snapshots.end(min(self.checkpoints.numbers(), default=None), written=False)
