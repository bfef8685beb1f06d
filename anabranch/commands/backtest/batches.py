"""The events of a file as batches of a stream.

Legend: B events of a batch.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import IDENTITY_COLUMNS, Array
from anabranch.learner.stream.batch import Batch, Span


def batch_of(
    new: Mapping[str, Array],
    stored_only: Mapping[str, Array] | None = None,
    held_out: Mapping[str, Array] | None = None,
) -> Batch:
    """Return the batch of a step on the columns of B events."""
    spans = []
    if new:
        identity = {name: new[name].copy() for name in IDENTITY_COLUMNS}
        spans.append(Span(identity, np.ones(len(new["offset"]), np.bool_), {}, {}, {}, {}))
    return Batch(dict(new), dict(stored_only or {}), dict(held_out or {}), spans)


class Numbering:
    """Gives the events of a file the columns that blocks of a stream have."""

    def __init__(self, first: int = 0) -> None:
        self.next = first
        """The number of the next event."""
        self._zeros: dict[str, Array] = {}
        """The columns that are zeros; of events that are as many as those before they are the same arrays."""

    def add(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Return the columns of the next B events with their number, and the time of `[schema.time]` or else 0."""
        rows = len(columns["label"])
        if len(self._zeros.get("row", ())) != rows:
            self._zeros = {name: np.zeros(rows, dtype) for name, dtype in IDENTITY_COLUMNS.items()}
        identity = dict(self._zeros)
        identity["offset"] = np.arange(self.next, self.next + rows)
        if "time" in columns:
            identity["time_ms"] = (columns["time"].astype(np.float64) * 1000).astype(np.int64)
        self.next += rows
        return {**identity, **columns}


def rows_of(columns: Mapping[str, Array], rows: NDArray[np.bool_]) -> dict[str, Array]:
    """Return the selected events, bool `[B]`; no columns where there are none."""
    return {name: column[rows] for name, column in columns.items()} if rows.any() else {}
