"""What a checkpoint holds of a store.

The held events have a logical order that depends only on the added events. A checkpoint stores it as what has
changed since the checkpoint before: which of that one's events are still held, in their order, and the new ones after
them.

Legend: H events held, B of them at the checkpoint before, A new ones, n events of a plan, R bytes of a row, P retired
slots, G quota groups.
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
        ("key_hash", "u8"),
        ("time_s", "u4"),
        ("partition", "i4"),
        ("row", "i4"),
        ("label", "i4"),
        ("slot", "i4"),
        ("group", "i2"),
    ]
)
"""What is known of each event beside its payload, 46 bytes: `time_s` are seconds since 1970, `label` is -1 where there
is none, `key_hash` is that of its key."""

PLANNED = np.dtype(
    [
        *((name, ENTRY[name]) for name in ("offset", "key_hash", "time_s", "partition", "row", "label", "slot")),
        ("rate", "f8"),
        ("share", "f8"),
        ("correction", "f8"),
    ]
)
"""Which event a row of a plan is, and what its importance is made of."""


@dataclass(frozen=True)
class TierRef:
    """The tier that slots belong to: its name, and what tells it from another of that name."""

    name: str
    id: str


@dataclass(frozen=True)
class SavedPlan:
    """An unused plan with its rows, uint8 `[n, R]` on the host, and PLANNED `[n]`: its events may have left since."""

    step: int
    rows: Tensor
    events: NDArray[np.void]


@dataclass(frozen=True)
class StoreState:
    """All of a store at one moment but for its events and their payload.

    Attributes:
        checkpoint: the number of the checkpoint.
        policy: the name of the admission policy that priorities, groups and thresholds are of.
        file: where the payload is; None where the checkpoint has it.
        retired: int64 `[P, 2]`, slots not to be written yet, each after the number of the last checkpoint that may name
        it.
        thresholds: of each group, float64 `[G]`; infinity while everything is admitted.
        added: how many events of each group were added, held or not, int64 `[G]`.
        weight: the sum of the weights of all added events.
        bases: of each partition, by its index.
        watermarks: by index of the partition, the highest `(offset, row)` that was added.
        plans: those that are unused, for consecutive steps.
        sampler: what the sampler's samples depend on beside the events, arrays by name.
        stale: the caches in which there may be something of events that have left.
        seed: that identities are of.
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
    seed: int | None = None


@dataclass(frozen=True)
class StoreDelta:
    """The events of a store as what has changed since an earlier checkpoint.

    Attributes:
        base: the number of that checkpoint; None where all events are new.
        alive: which of its events are still held, bool `[B]`, in order.
        index: ENTRY `[A]`, those that came after them.
        payload: their rows, uint8 `[A, R]` on the host; None where a tier's file has it.
    """

    base: int | None
    alive: NDArray[np.bool_]
    index: NDArray[np.void]
    payload: Tensor | None


@dataclass(frozen=True)
class StoreSnapshot:
    """A store at one moment: its events, ENTRY `[H]` and perhaps payload uint8 `[H, R]`, in order, and the rest.

    `lost` events more were held, of which nothing can be read any more.
    """

    standing: StoreState
    index: NDArray[np.void]
    payload: Tensor | None
    lost: int = 0


class DeltaTracker:
    """Keeps, of the events held at the last checkpoint, which are still held; those that came since stand after them.

    Legend: B events held at that checkpoint, H held now.
    """

    def __init__(self) -> None:
        self.base: int | None = None
        """The number of the checkpoint; None: there is none to tell a difference from."""
        self.alive: NDArray[np.bool_] = np.ones(0, np.bool_)
        """Which of its events are still held, bool `[B]`."""
        self.old = 0
        """How many those are: the first so many of the events held now."""

    def begin(self, number: int, held: int) -> None:
        """From now on the difference is told from checkpoint `number`, which has all that is held."""
        self.base, self.old, self.alive = number, held, np.ones(held, np.bool_)

    def clear(self) -> None:
        """Let the next checkpoint tell all."""
        self.base, self.old, self.alive = None, 0, np.ones(0, np.bool_)

    def keep(self, stays: NDArray[np.bool_]) -> None:
        """Take note that those leave that do not stay, bool `[H]`."""
        self.alive[self.alive] = stays[: self.old]
        self.old = int(np.count_nonzero(stays[: self.old]))
