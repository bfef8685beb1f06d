"""Events that contain their own number, so that a sample can be checked against what was stored.

Legend: N events, F floats of an event.
"""

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array, BlockLayout
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.replay.row_layout import RowLayout

PARTITIONS = [TopicPartition("events", 0)]
CLASSES = 10
_POOL = 4096


class Events:
    """A stream of events with `floats` (two at least) float32 and a label of ten, of which half are the first.

    An event's first two floats are its number; the others and its label come out of a pool, which costs little.
    """

    def __init__(self, floats: int) -> None:
        features = {"x": {"dtype": "float32", "shape": [floats]}}
        label = {"name": "y", "classes": CLASSES}
        self.schema = Schema(SchemaSettings.model_validate({"features": features, "label": label}))
        self.row_bytes = RowLayout(self.schema.payload()).row_bytes
        """Bytes of an event in a store."""
        generator = np.random.default_rng(0)
        self._pool = generator.standard_normal((_POOL, floats), np.float32)
        self._labels = np.minimum(generator.geometric(0.5, _POOL) - 1, CLASSES - 1)
        self._layout = BlockLayout(self.schema)

    def columns(self, begin: int, count: int) -> dict[str, Array]:
        """Return the block of events `[begin, begin + count)`, every column that ingest hands on."""
        numbers = np.arange(begin, begin + count)
        columns = self._layout.empty(count)
        columns["offset"], columns["time_ms"] = numbers, numbers * 10
        columns["labelled"][:] = True
        columns["weight"][:] = 1.0
        columns["label"] = self.labels(numbers)
        columns["feature.x"] = self.x(numbers)
        return columns

    def x(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the features of N events, `[N, F]`."""
        x_NF = self._pool[numbers % _POOL]
        x_NF[:, 0], x_NF[:, 1] = numbers % _POOL, numbers // _POOL
        return x_NF

    def labels(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the labels of N events, `[N]`."""
        return self._labels[numbers % _POOL]

    def numbers(self, x_NF: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return which events have these features, int64 `[N]`."""
        return x_NF[:, 0].astype(np.int64) + x_NF[:, 1].astype(np.int64) * _POOL

    def verify(self, x_NF: NDArray[np.float32], labels: NDArray[np.int64], below: int) -> None:
        """Check that N rows are what events with numbers less than `below` were made of, and none of them twice."""
        numbers = self.numbers(x_NF)
        if not ((numbers >= 0) & (numbers < below)).all() or len(np.unique(numbers)) < len(numbers):
            raise SystemExit("a sample has an event twice, or one that was never stored")
        if not np.array_equal(self.x(numbers), x_NF) or not np.array_equal(self.labels(numbers), labels):
            raise SystemExit("a sample has other rows than those that were stored")
