"""What a cut holds of a store.

Legend: H events held, n events of a plan, R bytes of a row, P retired slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

ENTRY = np.dtype(
    [
        ("priority", "f8"),
        ("offset", "i8"),
        ("slot", "i4"),
        ("partition", "i4"),
        ("row", "i4"),
        ("label", "i4"),
        ("time_ms", "i8"),
        ("identity", "u8"),
        ("key_hash", "u8"),
    ]
)
"""What is known of each event beside its payload, 56 bytes."""


@dataclass(frozen=True)
class TierFile:
    """The disk tier's file that slots belong to: its name, and what tells it from another of that name."""

    name: str
    id: str


@dataclass(frozen=True)
class PlannedRows:
    """An unused plan with its rows, uint8 `[n, R]` on the host: its events may have left the store since."""

    step: int
    rows: Tensor
    threshold: float
    share: float


@dataclass(frozen=True)
class Contents:
    """A store at one moment.

    Attributes:
        cut: the number of the cut.
        index: ENTRY `[H]`.
        payload: uint8 `[H, R]` on the host, in the order of the index; None where `file` has it.
        file: where the payload is, if not here.
        retired: int64 `[P, 2]`, slots not to be written yet, each after the number of the last cut that may name it.
        threshold: the reservoir's; infinity while everything is admitted.
        offered: how many events it is a sample of.
        watermarks: by index of the partition, the highest `(offset, row)` that was offered.
        plans: those that are unused, for consecutive steps.
    """

    cut: int
    index: NDArray[np.void]
    payload: Tensor | None
    file: TierFile | None
    retired: NDArray[np.int64]
    threshold: float
    offered: int
    watermarks: Mapping[int, tuple[int, int]]
    plans: Sequence[PlannedRows]
