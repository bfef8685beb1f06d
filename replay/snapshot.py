"""What a checkpoint holds of a store.

The held events have a logical order that depends only on the added events. A checkpoint stores the changes since the
previous one: which of its events are still held, in their order, and the new events, which follow them.

Legend: H events held, B events held at the previous checkpoint, A new ones, n events of a plan, R bytes of a row, P
retired slots, G quota groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anabranch.replay.row_source import RowSource

ENTRY = np.dtype(
    [
        ("priority", "f8"),
        ("offset", "i8"),
        ("key_hash", "u8"),
        ("time_s", "u4"),
        ("partition", "i4"),
        ("row", "i4"),
        ("label", "i4"),
        ("slot", "i4"),
        ("group", "i2"),
    ]
)
"""An event without its payload, 46 bytes: `time_s` in seconds since 1970, `label` -1 for none, the hash of its key."""

PLANNED = np.dtype(
    [
        *((name, ENTRY[name]) for name in ("offset", "key_hash", "time_s", "partition", "row", "label", "slot")),
        ("rate", "f8"),
        ("share", "f8"),
        ("correction", "f8"),
    ]
)
"""The event of a planned row, and the numbers that its importance is computed from."""


@dataclass(frozen=True)
class TierRef:
    """The tier that slots belong to: its name, and an id that distinguishes it from others of that name."""

    name: str
    id: str


@dataclass(frozen=True)
class SavedPlan:
    """An unused plan: its rows, uint8 `[n, R]` on the host, and events, PLANNED `[n]`, which may have been removed."""

    step: int
    rows: Tensor
    events: NDArray[np.void]


@dataclass(frozen=True)
class StoreState:
    """The state of a store at one moment, without its events and their payload.

    Attributes:
        checkpoint: the number of the checkpoint.
        policy: the name of the admission policy under which priorities, groups and thresholds were computed.
        file: the tier with the payload; None if the checkpoint has it.
        retired: slots that must not be written yet, each after the number of the last checkpoint that may name it,
            int64 `[P, 2]`.
        thresholds: of each group, float64 `[G]`; infinity while everything is admitted.
        added: how many events of each group were added, held or not, int64 `[G]`.
        weight: the sum of the weights of all added events.
        bases: of each partition, by its index.
        watermarks: by index of the partition, the highest `(offset, row)` that was added.
        plans: the unused plans, for consecutive steps.
        sampler: the state of the sampler, arrays by name.
        stale: the caches that may still have rows of removed events.
        row_bytes: R, if the checkpoint has the rows although `file` has them too; else None.
        stamp: a random name of the checkpoint, by which `file` lists those whose rows it has.
    """

    checkpoint: int
    policy: str
    file: TierRef | None
    retired: NDArray[np.int64]
    thresholds: NDArray[np.float64]
    added: NDArray[np.int64]
    weight: float
    bases: Sequence[int]
    watermarks: Mapping[int, tuple[int, int]]
    plans: Sequence[SavedPlan]
    sampler: Mapping[str, NDArray[np.generic]]
    stale: Sequence[str] = ()
    row_bytes: int | None = None
    stamp: str = ""


@dataclass(frozen=True)
class StoreDelta:
    """The changes of a store's events since an earlier checkpoint.

    Attributes:
        base: the number of that checkpoint; None if all events are new.
        alive: which of its events are still held, bool `[B]`, in order.
        index: the new events, ENTRY `[A]`, which follow them.
        payload: the rows of the new events, uint8 `[A, R]` on the host; None if a tier has them.
        rows: returns the tier's rows of events held at the checkpoint, ENTRY `[n]`, if the checkpoint has them too.
    """

    base: int | None
    alive: NDArray[np.bool_]
    index: NDArray[np.void]
    payload: Tensor | None
    rows: Callable[[NDArray[np.void]], RowSource] | None = None


@dataclass(frozen=True)
class StoreSnapshot:
    """A store at one moment.

    Attributes:
        state: all but the events.
        index: the events, ENTRY `[H]`, in order.
        payload: their rows, uint8 `[H, R]`; None if a tier has them.
        lost: how many more events were held, of which nothing can be read any more.
        rows: their rows in the checkpoint, if that has those of a tier too; read where that tier is missing.
    """

    state: StoreState
    index: NDArray[np.void]
    payload: Tensor | None
    lost: int = 0
    rows: RowSource | None = None


class DeltaTracker:
    """Tracks which events of the last checkpoint are still held. Events that were added since follow them.

    Legend: B events held at that checkpoint, H held now.
    """

    def __init__(self) -> None:
        self.base: int | None = None
        """The number of the checkpoint; None if there is none to compute changes from."""
        self.alive: NDArray[np.bool_] = np.ones(0, np.bool_)
        """Which of its events are still held, bool `[B]`."""
        self.old = 0
        """How many those are: they come first among the events held now."""

    def begin(self, number: int, held: int) -> None:
        """Compute changes from checkpoint `number` from now on, which has all `held` events."""
        self.base, self.old, self.alive = number, held, np.ones(held, np.bool_)

    def clear(self) -> None:
        """Let the next checkpoint contain all events."""
        self.base, self.old, self.alive = None, 0, np.ones(0, np.bool_)

    def keep(self, stays: NDArray[np.bool_]) -> None:
        """Record that the events that do not stay, bool `[H]`, are removed."""
        self.alive[self.alive] = stays[: self.old]
        self.old = int(np.count_nonzero(stays[: self.old]))
