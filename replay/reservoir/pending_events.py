"""Blocks of events that are added to the store together: except for copies, 100 events cost little more than ten.

Legend: K blocks, N events of all of them, D dimensions of an embedding, n rows of a call, R bytes of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array
from replay.row_layout import RowLayout

MAX_PENDING = 1024
"""About how many events may be pending, so that none is pending for long and adding them takes little time."""

MAX_PENDING_BYTES = 16_000_000
"""About how many bytes of events may be pending."""

_SCORED_COLUMNS = ("partition", "offset", "row", "time_ms", "key_hash", "weight", "label")
"""Columns that decide which events are held."""

WAITED = "waited"
"""A column that blocks may have, bool `[N]`: the event waited for its label. It comes behind later events of its
partition, and only once."""


@dataclass
class PendingEvents:
    """K blocks of columns, each `[N, ...]`, that read like one block; they are copied once, into rows."""

    blocks: list[Mapping[str, Array]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Where each block ends among the N events."""
    embeddings: list[NDArray[np.float32] | None] = field(default_factory=list)
    """Of each block, float32 `[rows, D]`."""

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def put(self, columns: Mapping[str, Array], embedding: NDArray[np.float32] | None) -> None:
        """Add a block, whose columns must not change any more."""
        self.embeddings.append(embedding)
        self.ends.append(len(self) + len(columns["offset"]))
        self.blocks.append(columns)

    @property
    def embedding(self) -> NDArray[np.float32] | None:
        """Of all events, float32 `[N, D]`, NaN where it is unknown; None: of no event."""
        dim = next((part.shape[1] for part in self.embeddings if part is not None), None)
        if dim is None or len(self.blocks) == 1:
            return self.embeddings[0] if self.embeddings else None
        rows = np.diff(self.ends, prepend=0)
        parts = zip(self.embeddings, rows, strict=True)
        return np.concatenate([np.full((n, dim), np.nan, np.float32) if part is None else part for part, n in parts])

    def columns(self) -> Mapping[str, Array]:
        """Return the columns that decide which events are held, each `[N, ...]`."""
        if len(self.blocks) == 1:
            return self.blocks[0]
        columns = {name: np.concatenate([block[name] for block in self.blocks]) for name in _SCORED_COLUMNS}
        if any(WAITED in block for block in self.blocks):
            waited = [block.get(WAITED, np.zeros(len(block["offset"]), np.bool_)) for block in self.blocks]
            columns[WAITED] = np.concatenate(waited)
        return columns

    def pack(self, layout: RowLayout, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        """Pack n events, given by their ascending row numbers, into rows, uint8 `[n, R]`."""
        if len(self.blocks) == 1:
            return layout.pack(self.blocks[0], rows)
        rows_nR = np.empty((len(rows), layout.row_bytes), np.uint8)
        bounds = [0, *np.searchsorted(rows, self.ends).tolist()]
        for block, end, first, last in zip(self.blocks, self.ends, bounds, bounds[1:], strict=False):
            layout.pack(block, rows[first:last] - (end - len(block["offset"])), rows_nR[first:last])
        return rows_nR

    def parts(self, rows: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        """Split ascending row numbers by block into K arrays."""
        return np.split(rows, np.searchsorted(rows, self.ends[:-1]))


def pending_limit(row_bytes: int) -> int:
    """Return how many events of `row_bytes` bytes may be pending before they are added."""
    return min(MAX_PENDING, max(1, MAX_PENDING_BYTES // row_bytes))
