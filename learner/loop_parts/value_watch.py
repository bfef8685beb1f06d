"""Values that a model gets as they are, or has to predict, and that are far from all others: floats and their labels.

Nothing learns from them but weights, in one step of a bounded gradient. Their offsets are logged.

Legend: B events, F columns.
"""

import logging
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ingest.events.block import Array
from ingest.events.partition import TopicPartition
from learner.model.features.host_state import HostState
from learner.model.features.numbers import FAR, MOST
from learner.model.features.outliers import OutlierBounds, empty_bounds

_MOST_LOGGED = 20

log = logging.getLogger(__name__)


class ValueWatch:
    """Logs such values with their offset, the first ones of a process. Used by the loop's thread; any may read."""

    def __init__(self, known: Collection[str]) -> None:
        """Watch all features of floats but the `known` ones, which are scaled; and labels of a regression."""
        self._known = {f"feature.{name}" for name in known}
        self._names: list[str] | None = None
        self._bounds: OutlierBounds | None = None
        self.said: list[str] = []
        """What was logged."""
        self.warning: str | None = None
        """One sentence on the last of them."""

    def observe(self, columns: Mapping[str, Array], partitions: Sequence[TopicPartition]) -> None:
        """Take the new events of a step; `partitions` are those that their column points into."""
        if self._names is None:
            self._names = [name for name, column in columns.items() if self._is_watched(name, column)]
            bounds = empty_bounds(len(self._names), exponents=600)
            self._bounds = OutlierBounds(HostState(**{name: torch.from_numpy(each) for name, each in bounds.items()}))
        if not self._names or not len(columns["offset"]):
            return
        assert self._bounds is not None
        value_BF = np.stack([_largest(columns[name]) for name in self._names], axis=1)
        _, _, reach_F = self._bounds.add(value_BF)
        far_BF = (self._bounds.distance(value_BF) > FAR * reach_F) & (reach_F > 0)
        for row, index in zip(*np.nonzero(far_BF), strict=True):
            name = partitions[int(columns["partition"][row])]
            where, at = f"{name.topic}[{name.partition}]", int(columns["offset"][row])
            what = self._names[index]
            key = f"schema.features.{what[8:]}" if what != "label" else "schema.label"
            command = f'"anabranch undo --offsets {where}@{at}..{at}"'
            self.warning = (
                f"{key} of {where}@{at} is as large as {value_BF[row, index]:g}, far from all others. "
                f"{command} takes the event out again; {key}.min and max refuse such values"
            )
            if len(self.said) < _MOST_LOGGED:
                self.said.append(self.warning)
                log.warning("%s", self.warning)

    def _is_watched(self, name: str, column: Array) -> bool:
        is_input = name.startswith("feature.") and name not in self._known
        return column.dtype.kind == "f" and (is_input or (name == "label" and column.ndim == 1))


def _largest(column: Array) -> NDArray[np.float64]:
    """Return the number of each event that is largest by its absolute value, float64 `[B]`; NaN where all are."""
    flat = column.reshape(len(column), -1)
    if flat.shape[1] > 1:
        absolute = np.nan_to_num(np.abs(flat), nan=0.0)
        flat = np.take_along_axis(flat, absolute.argmax(axis=1)[:, None], axis=1)
    return np.clip(flat[:, 0].astype(np.float64), -MOST, MOST)
