"""The contract of a tier: a place where the payload of events lies, row by row.

Legend: n rows of a call, S slots of the tier.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ingest.block import Array


class Tier(Protocol):
    """S slots for one event's payload each. Rows are immutable: a slot is written again only after it was let go.

    Used by one thread. Which events are in the store is not the tier's business, only where their payload lies.
    """

    name: str
    """Its label in metrics: device, redis or disk."""
    slots: int
    row_bytes: int
    """Bytes of one event's payload in this tier."""

    def put(self, slots: NDArray[np.int64], columns: Mapping[str, Array]) -> None:
        """Write n events' payload, each column `[n, ...]`, into slots `[n]`."""
        ...

    def get(self, slots: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the payload of slots `[n]`, each column `[n, ...]`, on the tier's device."""
        ...

    def rows(self, slots: NDArray[np.int64]) -> Tensor:
        """Return the payload of slots `[n]` as it lies in the tier, uint8 `[n, row_bytes]` on the CPU."""
        ...

    def put_rows(self, slots: NDArray[np.int64], rows_nR: Tensor) -> None:
        """Write what `rows` returned, uint8 `[n, row_bytes]`, into slots `[n]`."""
        ...

    def close(self) -> None:
        """Let go of memory and files."""
        ...
