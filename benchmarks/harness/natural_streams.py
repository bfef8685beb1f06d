"""Four natural streams as numbers and classes."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.data import load
from ingest.config import SchemaSettings
from ingest.events.block import Array
from ingest.events.schema import Schema
from learner.model.features.moments import Moments
from learner.model.features.numbers import LIMIT

STREAMS = ("elec2", "flights", "airlines", "mnist")


@dataclass(frozen=True)
class LabelledStream:
    """Numbers `[N, D]`, float32, and classes `[N]`, int64."""

    x: Array
    y: Array

    @property
    def schema(self) -> Schema:
        """One feature, one label."""
        feature = {"dtype": "float32", "shape": [self.x.shape[1]]}
        label = {"name": "y", "classes": int(self.y.max()) + 1}
        return Schema(SchemaSettings.model_validate({"features": {"x": feature}, "label": label}))


def stream(name: str, data: Path | None, rows: int, batch: int) -> LabelledStream:
    """Return the first events of a stream; tabular numbers are scaled as `scale = "standard"` scales them."""
    if name == "elec2":
        arrays = load("elec", data)
        x, y = arrays["x"], arrays["y"]
    elif name == "mnist":
        arrays = load("mnist", data)
        x, y = arrays["x_train"], arrays["y_train"]
    else:
        arrays = load("nycflights", data)
        x, y = arrays["num"], arrays["delay"] > 15 if name == "flights" else arrays["cat"][:, 0]
    x, y = x[:rows].astype(np.float32), np.unique(y[:rows], return_inverse=True)[1].astype(np.int64)
    return LabelledStream(x / np.float32(255.0) if name == "mnist" else scaled(x, batch), y)


def scaled(x: Array, size: int) -> Array:
    """Return numbers `[N, D]` scaled by the moments of all events before their batch of `size`, as the learner does.

    A number that has been constant so far is 0. By the deviation of its first events, which is that of rounding, the
    first other value would be a million.
    """
    parts, moments = list[Array](), Moments.of(np.zeros((0, x.shape[1])))
    for start in range(0, len(x), size):
        batch, deviation = x[start : start + size].astype(np.float64), moments.deviation
        factor = np.where(deviation > 0, 1 / np.where(deviation > 0, deviation, 1), 0)
        parts.append(((batch - moments.mean) * factor).clip(-LIMIT, LIMIT).astype(np.float32))
        moments = moments.merged(Moments.of(batch))
    return np.concatenate(parts)
