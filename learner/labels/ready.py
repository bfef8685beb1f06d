"""The events whose fate is decided, as the loop takes them from the join.

Legend: N events of a call.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ingest.events.block import Array


class Resolution(IntEnum):
    """How the wait of an event ended."""

    LABELLED = 0
    """Its label came in time."""
    TIMED_OUT = 1
    """No label came within `wait`, or the space for waiting events was full."""
    CORRECTED = 2
    """Its label came after the event was used as a negative: on arrival with `early`, or when it had timed out."""


@dataclass(frozen=True)
class Ready:
    """N events whose fate is decided, in the order of the decisions.

    Attributes:
        columns: the schema's payload and `IDENTITY_COLUMNS`, each `[N, ...]`, with the label filled in and `labelled`
            true, save for TIMED_OUT: there the label is the schema's value for a missing one, and `labelled` false.
            `outcome` is PENDING and `reason` NONE. Columns may be views that are not contiguous.
        resolution: uint8 `[N]`.
        predictions: the model's output when each event came, float32 `[N, *output]`; NaN where there was none.
        waited_ms: int64 `[N]`: the record time of the label minus that of the event, which is negative if the label's
            is earlier; of TIMED_OUT events the time that they waited.
        early: bool `[N]`: the event waited with `early`, so that the caller trained on it as a negative on arrival.
        stored: bool `[N]`: the event timed out as a negative, which was stored and not trained on.
        taken_back: bool `[N]`: the event was returned as TIMED_OUT before, so that it has ended already.
        damaged: `partition`, `offset`, `time_ms`, `key_hash` and `taken_back` of events that were to be returned and
            whose payload is damaged, each `[D]`; they must not be trained on, and `settle` removes them as well.
    """

    columns: dict[str, Array]
    resolution: NDArray[np.uint8]
    predictions: NDArray[np.float32]
    waited_ms: NDArray[np.int64]
    early: NDArray[np.bool_]
    stored: NDArray[np.bool_]
    taken_back: NDArray[np.bool_]
    damaged: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.resolution)
