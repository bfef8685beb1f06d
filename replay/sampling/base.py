"""The contract of a sampler, and the uniform one.

The store calls a sampler when events are added to and removed from slots, and the sampler chooses among the held
events. It may keep an index for that, which it builds again when a checkpoint is restored.

Legend: H events held, n sampled, G groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.replay.reservoir.event_table import EventTable

BY_POSITION = frozenset({"positions", "weights", "opinions"})
"""The arrays of a sampler's state that have a value for each held event, in logical order."""
Slots = NDArray[np.int32]


@dataclass(frozen=True)
class Choice:
    """The events to sample.

    Attributes:
        slots: of n different held events, in an order in which any prefix is a fair sample.
        correction: a factor of the importance that corrects for the sampling probability, float64 `[n]`; None: 1.
    """

    slots: Slots
    correction: NDArray[np.float64] | None = None


class Sampler:
    """Chooses held events for replay; one that keeps no index implements `sample` alone.

    Samples are a pure function of the held events and the arguments, except for samplers that use the index process.
    """

    uses_losses = False
    """Whether losses of sampled events influence later samples."""
    uses_embeddings = False
    """Whether embeddings of sampled events influence later samples."""
    divisible = False
    """Whether one choice may be divided among several steps: each part is as good as a separate choice."""

    def __init__(self, event_table: EventTable) -> None:
        self._event_table = event_table

    def sample(self, n: int, generator: np.random.Generator) -> Choice:
        """Choose n events, or all if fewer are held, with the random generator of the step."""
        raise NotImplementedError

    def add(self, slots: Slots) -> None:
        """Add events that are held from now on."""

    def remove(self, slots: Slots) -> None:
        """Remove events that are no longer held."""

    def update_priorities(self, slots: Slots, losses: NDArray[np.float32]) -> None:
        """Use the losses of held events, float32 `[n]`."""

    def update_embeddings(self, slots: Slots, embedding_nD: NDArray[np.float32]) -> None:
        """Use the embeddings of held events, finite numbers, float32 `[n, D]`."""

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Return arrays of any shape that a checkpoint stores, with the events, to continue the same samples."""
        return {}

    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        """Restore what `state` returned; `add` was called with the same events, in the same order."""

    def _uniform(self, n: int, generator: np.random.Generator) -> Slots:
        """Return the slots of n different events, or of all, each with the same probability."""
        held = self._event_table.slots
        return held.take(generator.choice(len(held), size=min(n, len(held)), replace=False))


class UniformSampler(Sampler):
    """Samples every held event with the same probability, without repeats within a sample."""

    divisible = True

    @override
    def sample(self, n: int, generator: np.random.Generator) -> Choice:
        return Choice(self._uniform(n, generator))
