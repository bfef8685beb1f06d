"""The contract of a tier: a place where the payload of events lies, a packed row each.

Legend: n rows of a call, N rows of an array, R bytes of a row, S slots of the tier.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Tier(Protocol):
    """S slots for one row each. Which events are in the store is not its business, only where their payload lies.

    A tier that cannot be asked at the moment raises OSError: that tells nothing of its rows. What it raises in `write`
    may leave some of the rows written.
    """

    name: str
    """Its label in metrics: device, redis or disk."""
    slots: int
    slot_bytes: int
    """Bytes that an event takes here."""

    def write(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], rows_nR: NDArray[np.uint8], /) -> None:
        """Write rows `[n, R]` of the events `identity` `[n]` into slots `[n]`; raises OSError when it cannot."""
        ...

    def read(self, slots: NDArray[np.int64], identity: NDArray[np.uint64], /) -> tuple[Tensor, NDArray[np.bool_]]:
        """Return the rows of slots `[n]`, uint8 `[n, R]` on the tier's device, and which are whole, bool `[n]`.

        A row is whole when it is what was last written for the event `identity`; of others the bytes mean nothing.
        """
        ...

    def erase(self, slots: NDArray[np.int64], /) -> None:
        """Overwrite the rows of slots `[n]`, which are no event's afterwards; raises OSError when it cannot."""
        ...

    def close(self) -> None:
        """Let go of memory, files and connections."""
        ...


class SlowTier(Tier, Protocol):
    """A tier that is read in the background, into rows on the host."""

    def read_into(
        self,
        rows_NR: Tensor,
        places: NDArray[np.int64],
        slots: NDArray[np.int64],
        identity: NDArray[np.uint64],
        /,
    ) -> NDArray[np.bool_]:
        """Read n rows into places `[n]` of `rows_NR`, and return which are whole, bool `[n]`."""
        ...

    def sync(self) -> None:
        """Wait until what was written outlives the process; raises OSError when it does not."""
        ...
