"""The memory of events that wait for labels, without their payload: the growth of a separate process."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np

from benchmarks.harness.memory import give_back, resident
from ingest.config import SchemaSettings
from ingest.events.block import IDENTITY_COLUMNS, Array
from ingest.events.identity import mix
from ingest.events.schema import Schema
from learner.labels.label_join import JoinOptions, LabelJoin
from learner.labels.opening import open_join

_BATCH = 1000
_BETWEEN_CHECKPOINTS = 10
"""Batches."""
_STRIDE = 1_000_003
"""A prime: multiples of it are all numbers in another order."""
_ROW_BYTES = 128
_ENDLESS = 2**50
_SCHEMA = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}})
)


def waiting_bytes(events: int, folder: Path) -> float:
    """Return the bytes of memory that each of `events` events takes that wait, after half as many waited before them.

    Meanwhile half as many others come and get labels in random order. `folder` gets the file with the payload.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as child:
        return child.submit(_measure, events, folder).result()


def _measure(events: int, folder: Path) -> float:
    options = JoinOptions(timedelta(days=365), bytes=4 * events * _ROW_BYTES)
    join = open_join(options, _SCHEMA, (2,), folder, None, first=True)
    first = _fill(join, events // 2, 1)
    give_back()
    before, begun = resident(), join.waiting
    _fill(join, events, first)
    give_back()
    growth = (resident() - before) / (join.waiting - begun)
    join.close()
    return growth


def _fill(join: LabelJoin, events: int, first: int) -> int:
    """Let `events` wait with the next offsets from `first` on, then half as many more, each with a label for one of the
    first ones; return the next offset."""
    keys = np.arange(first, first + events) * _STRIDE % events + first
    for begin in range(0, events * 3 // 2, _BATCH):
        join.add_events(_events(first + begin), None)
        if begin >= events:
            join.add_labels(_labels(keys[begin - events : begin - events + _BATCH], first))
            join.take(_BATCH)
            join.settle()
        join.advance(0, events_ms=_ENDLESS)
        if begin // _BATCH % _BETWEEN_CHECKPOINTS == 0:
            number = (first + begin) // _BATCH + 1
            join.snapshots.begin(number)
            join.snapshots.end(number, written=True)
    return first + begin + _BATCH


def _key(offsets: np.ndarray) -> np.ndarray:
    return mix(offsets.astype(np.uint64))


def _events(first: int) -> dict[str, Array]:
    columns: dict[str, Array] = {name: np.zeros(_BATCH, dtype) for name, dtype in IDENTITY_COLUMNS.items()}
    columns |= {name: np.zeros((_BATCH, *shape), dtype) for name, (dtype, shape) in _SCHEMA.payload().items()}
    columns["offset"] = columns["time_ms"] = np.arange(first, first + _BATCH)
    columns["key_hash"] = _key(columns["offset"])
    return columns


def _labels(offsets: np.ndarray, time_ms: int) -> dict[str, Array]:
    return {
        "key_hash": _key(offsets),
        "label": np.ones(_BATCH, np.int64),
        "labelled": np.ones(_BATCH, np.bool_),
        "time_ms": np.full(_BATCH, time_ms),
        "partition": np.zeros(_BATCH, np.int32),
        "offset": np.zeros(_BATCH, np.int64),
    }
