"""Samplers that sample in proportion to a weight: of age, or of the last loss.

Legend: H events held, n sampled.
"""

import math
from collections.abc import Mapping
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from replay.reservoir.event_table import EventTable
from replay.sampling.base import Choice, Slots, UniformSampler
from replay.sampling.stable_positions import StablePositions
from replay.sampling.sum_tree import SumTree

_ROUNDS = 2
"""Rounds of points that may hit chosen events again, before these are excluded."""
_MAX_ROUNDS = 16
"""Rounds with chosen events excluded, before the rest is sampled uniformly."""
_MAX_EXPONENT = 500.0
_HIGH = 0.99
"""New events get this quantile of the newest weights; the maximum would follow outliers."""
_LEAST = 1e-3
"""Lower bound of a loss, so that every event may be sampled."""
_NEWEST = 1024
"""How many of the newest losses determine the weight of an event whose own loss is unknown."""
_ALPHA, _BETA = 0.6, 0.4
"""The exponents of the loss in the weight, and of the probability in the correction (Schaul et al. 2016)."""


class WeightedSampler(UniformSampler):
    """Events are sampled in proportion to weights, without repeats within a sample."""

    divisible = False

    def __init__(self, event_table: EventTable, slots: int) -> None:
        super().__init__(event_table)
        self._positions = StablePositions(slots, event_table.limit)
        self._tree = SumTree(event_table.limit)

    @override
    def sample(self, n: int, generator: np.random.Generator) -> Choice:
        # Random points on the sum of weights; points that hit an event twice are repeated, in the end with the weights
        # of chosen events at 0. If weights are too uneven, or 0, the rest is sampled uniformly.
        n = min(n, len(self._event_table))
        chosen = self._complete(np.empty(0, np.int64), n, generator, _ROUNDS)
        if len(chosen) < n:
            chosen = self._complete_excluding(chosen, n, generator)
        slots = self._positions.slots(chosen)
        if len(slots) < n:
            # Of n different events, at most `len(slots)` are already in the sample.
            any_ = UniformSampler.sample(self, n, generator).slots
            slots = np.concatenate([slots, any_[~np.isin(any_, slots)][: n - len(slots)]])
        return Choice(slots, self._correction(slots))

    def _complete(
        self, chosen: NDArray[np.int64], n: int, generator: np.random.Generator, rounds: int
    ) -> NDArray[np.int64]:
        """Return the chosen positions and those that further points hit, up to n, in the order of the hits."""
        for _ in range(rounds):
            if len(chosen) == n or self._tree.total <= 0:
                break
            hits = self._tree.find(generator.random(n - len(chosen)) * self._tree.total)
            both = np.concatenate([chosen, hits[self._tree[hits] > 0]])
            chosen = both[np.sort(np.unique(both, return_index=True)[1])]
        return chosen

    def _complete_excluding(
        self, chosen: NDArray[np.int64], n: int, generator: np.random.Generator
    ) -> NDArray[np.int64]:
        """Do the same with chosen positions at weight 0, since one event may have nearly all the weight."""
        weights, left = np.empty(0), chosen
        for _ in range(_MAX_ROUNDS):
            weights = np.concatenate([weights, self._tree[left]])
            self._tree.set(left, 0.0)
            before, chosen = len(chosen), self._complete(chosen, n, generator, 1)
            left = chosen[before:]
            if len(chosen) == n or self._tree.total <= 0:
                break
        self._tree.set(chosen[: len(weights)], weights)
        return chosen

    @override
    def remove(self, slots: Slots) -> None:
        self._tree.set(self._positions.release(slots), 0.0)

    @override
    def state(self) -> dict[str, NDArray[np.generic]]:
        return {"positions": self._positions.of(self._event_table.slots)}

    @override
    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        # The checkpoint of another sampler has no positions that fit.
        positions, slots = state.get("positions", np.empty(0)).astype(np.int32), self._event_table.slots
        if len(positions) == len(slots) and positions.max(initial=-1) < self._positions.count:
            weights = self._weights(slots)
            self._tree.set(self._positions.of(slots), 0.0)
            self._positions.restore(slots, positions)
            self._weigh(slots, weights)

    def _weigh(self, slots: Slots, weights: NDArray[np.float64] | float, /) -> None:
        self._tree.set(self._positions.of(slots), weights)

    def _weights(self, slots: Slots, /) -> NDArray[np.float64]:
        return self._tree[self._positions.of(slots)]

    def _correction(self, _slots: Slots, /) -> NDArray[np.float64] | None:
        return None


class RecencySampler(WeightedSampler):
    """Samples with a probability that halves with each `half_life` of an event's age."""

    def __init__(self, event_table: EventTable, slots: int, half_life: timedelta) -> None:
        super().__init__(event_table, slots)
        self._decay = math.log(2) / half_life.total_seconds()
        self._generation = -math.inf

    @override
    def add(self, slots: Slots) -> None:
        if not len(slots):
            return
        self._positions.take(slots)
        newest = float(self._event_table.column("time_s", slots).max())
        if self._decay * (newest - self._generation) > _MAX_EXPONENT:
            self._generation = newest
            slots = self._event_table.slots
        self._weigh_by_age(slots)

    @override
    def state(self) -> dict[str, NDArray[np.generic]]:
        return {**super().state(), "generation": np.array([self._generation])}

    @override
    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        # Weights are computed again, for the present half-life.
        super().restore(state)
        if "generation" in state and len(self._event_table):
            generation = float(state["generation"][0])
            if self._decay * abs(self._generation - generation) <= _MAX_EXPONENT:
                self._generation = generation
            self._weigh_by_age(self._event_table.slots)

    def _weigh_by_age(self, slots: Slots) -> None:
        age = self._generation - self._event_table.column("time_s", slots).astype(np.float64)
        self._weigh(slots, np.exp(np.maximum(-self._decay * age, -_MAX_EXPONENT)))


class PrioritizedSampler(WeightedSampler):
    """Prioritised replay: samples events with a large last loss more often, and corrects their importance.

    The probability is proportional to the loss to the power 0.6. An event without a loss gets a high quantile of the
    newest losses; with their maximum an outlier would decide permanently. The correction is (H * probability)**-0.4,
    divided by the largest of the sample (Schaul et al. 2016, "Prioritized experience replay").
    """

    uses_losses = True

    def __init__(self, event_table: EventTable, slots: int) -> None:
        super().__init__(event_table, slots)
        self._newest = np.empty(0, np.float32)
        """The newest weights that were computed from losses, the oldest first."""

    @override
    def add(self, slots: Slots) -> None:
        self._positions.take(slots)
        self._weigh(slots, self._high)

    @property
    def _high(self) -> float:
        if not len(self._newest):
            return 1.0
        index = int(_HIGH * (len(self._newest) - 1))
        return float(np.partition(self._newest, index)[index])

    @override
    def update_priorities(self, slots: Slots, losses: NDArray[np.float32]) -> None:
        # Losses that are not finite are ignored.
        finite = np.isfinite(losses)
        slots, losses = slots[finite], losses[finite]
        if len(slots):
            # Rounded as in a checkpoint.
            weights = (np.maximum(losses.astype(np.float64), _LEAST) ** _ALPHA).astype(np.float32)
            self._newest = np.concatenate([self._newest, weights])[-_NEWEST:]
            self._weigh(slots, weights.astype(np.float64))

    @override
    def state(self) -> dict[str, NDArray[np.generic]]:
        weights = self._weights(self._event_table.slots).astype(np.float32)
        return {**super().state(), "weights": weights, "newest": self._newest}

    @override
    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        # The checkpoint of another sampler has no weights.
        super().restore(state)
        if {"weights", "newest"} <= state.keys():
            self._newest = state["newest"].astype(np.float32)
            self._weigh(self._event_table.slots, state["weights"].astype(np.float64))

    def _correction(self, slots: Slots, /) -> NDArray[np.float64] | None:
        if not len(slots):
            return None
        scarcity: NDArray[np.float64] = (len(self._event_table) * self._weights(slots) / self._tree.total) ** -_BETA
        scarcity /= scarcity.max()
        return scarcity
