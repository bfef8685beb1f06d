"""The contract of a sampler, and the uniform one.

The store calls a sampler when events are added and removed, by slot, and the sampler chooses among held events. It may
keep what it needs to choose fast, and builds that again when a checkpoint is restored.

Legend: H events held, n sampled, G groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replay.reservoir.event_table import EventTable

BY_POSITION = frozenset({"positions", "weights"})
"""The names in a sampler's state whose arrays have a value for each held event, in logical order."""
Slots = NDArray[np.int32]
_STALE_SHARE = 8
MOST_STALE = 64
"""Stale events that wait for a sample of their cluster."""
PLACED = -1
"""A cluster that no event is in."""


@dataclass(frozen=True)
class Choice:
    """The events to sample.

    Attributes:
        slots: of n different held events, in an order in which any prefix is a fair sample.
        correction: the factor by which each counts less for being chosen more often, float64 `[n]`; None: 1 for all.
    """

    slots: Slots
    correction: NDArray[np.float64] | None = None


class Sampler(Protocol):
    """Chooses held events for replay.

    A pure function of the contents and its arguments, except for samplers that depend on other processes.
    """

    uses_losses: bool
    """Whether losses of sampled events influence later samples."""
    divisible: bool
    """Whether one choice may be divided among several steps: each part is as good as a separate choice."""

    def sample(self, n: int, generator: np.random.Generator, /) -> Choice:
        """Choose n events, or all when fewer are held, by a generator that belongs to the step."""
        ...

    def add(self, slots: Slots, /) -> None:
        """Add events that are held from now on."""
        ...

    def remove(self, slots: Slots, /) -> None:
        """Remove events that are no longer held."""
        ...

    def update_priorities(self, slots: Slots, losses: NDArray[np.float32], /) -> None:
        """Use the losses of held events, float32 `[n]`."""
        ...

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Return what a checkpoint has to keep, beside the events, to continue the same samples; any shapes."""
        ...

    def restore(self, state: Mapping[str, NDArray[np.generic]], /) -> None:
        """Restore what `state` returned; `add` was called with the same events, in the same order."""
        ...


class UniformSampler:
    """Samples every held event with the same probability, without repeats within a sample."""

    uses_losses = False
    divisible = True

    def __init__(self, event_table: EventTable) -> None:
        self._event_table = event_table

    def sample(self, n: int, generator: np.random.Generator) -> Choice:
        """Choose positions."""
        held = self._event_table.slots
        return Choice(held.take(generator.choice(len(held), size=min(n, len(held)), replace=False)))

    def add(self, slots: Slots) -> None:
        """Nothing is kept."""

    def remove(self, slots: Slots) -> None:
        """Nothing is kept."""

    def update_priorities(self, slots: Slots, losses: NDArray[np.float32]) -> None:
        """Losses decide nothing."""

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Nothing is kept."""
        return {}

    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        """Nothing is kept."""


def stale_share(n: int, generator: np.random.Generator) -> int:
    """Return how many of n events may be sampled for their age: an eighth, by chance where that is no whole number."""
    return (n + int(generator.integers(_STALE_SHARE))) // _STALE_SHARE
