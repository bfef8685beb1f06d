"""Samplers that sample in proportion to a weight: of age, of the last loss, or of the agreement with near events.

Legend: H events held, n sampled or of a call, S slots, D numbers of an embedding, R recent events, K neighbours.
"""

import math
from collections.abc import Mapping
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.replay.reservoir.embeddings import RecentEmbeddings, unit
from anabranch.replay.reservoir.event_table import EventTable
from anabranch.replay.sampling.base import Choice, Sampler, Slots

_FAN = 64


class SumTree:
    """S weights, initially 0, in nodes of 64 children.

    Each sum is computed from its children, so that it depends only on the weights.
    """

    def __init__(self, leaves: int) -> None:
        self._levels: list[NDArray[np.float64]] = []
        size = leaves
        while not self._levels or size > 1:
            padded = -(-size // _FAN) * _FAN
            self._levels.append(np.zeros(padded, np.float64))
            size = padded // _FAN
        self._levels.append(np.zeros(1, np.float64))

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._levels[-1][0])

    def __getitem__(self, leaves: NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.float64]:
        """Return the weights of n leaves."""
        return self._levels[0][leaves]

    def set(self, leaves: NDArray[np.int64] | NDArray[np.int32], weights: NDArray[np.float64] | float) -> None:
        """Set the weights of n leaves, finite and >= 0."""
        self._levels[0][leaves] = weights
        nodes = np.asarray(leaves)
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            nodes = np.unique(nodes // _FAN)
            above[nodes] = below.reshape(-1, _FAN)[nodes].sum(axis=1)

    def find(self, mass: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the leaves that n points in [0, total) hit, int64 `[n]`."""
        nodes = np.zeros(len(mass), np.int64)
        left = mass.copy()
        for level in reversed(self._levels[:-1]):
            children = level.reshape(-1, _FAN)[nodes]
            ends = np.cumsum(children, axis=1)
            beyond = ends > left[:, None]
            child, rows = beyond.argmax(axis=1), np.arange(len(nodes))
            # Rounding may move a point beyond the last child with a weight.
            lost = np.flatnonzero(~beyond[rows, child])
            if len(lost):
                child[lost] = _last_of(children[lost])
            left -= ends[rows, child] - children[rows, child]
            nodes = nodes * _FAN + child
        return nodes


def _last_of(children: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the last child with a weight in each of n rows; the first where there is none."""
    has = children > 0
    return np.where(has.any(axis=1), has.shape[1] - 1 - has[:, ::-1].argmax(axis=1), 0).astype(np.int64)


Ints = NDArray[np.int32]


class StablePositions:
    """At most `count` positions for events in S slots. New events take the lowest free ones.

    They depend only on the sequence of steps, while the slot of an event depends on tiers, checkpoints and restarts.
    """

    def __init__(self, slots: int, count: int) -> None:
        self.count = count
        self._position = np.zeros(slots, np.int32)
        self._slot = np.zeros(count, np.int32)
        self._free = np.arange(count, dtype=np.int32)[::-1]  # descending: the lowest are taken from the end

    def of(self, slots: Ints) -> Ints:
        """Return the positions of the events in n slots."""
        return self._position.take(slots)

    def slots(self, positions: NDArray[np.int64]) -> Ints:
        """Return the slots of the events in n positions."""
        return self._slot.take(positions)

    def take(self, slots: Ints) -> Ints:
        """Assign positions to n events, and return them."""
        left = len(self._free) - len(slots)
        taken, self._free = self._free[left:][::-1], self._free[:left]
        self._position[slots], self._slot[taken] = taken, slots
        return taken

    def release(self, slots: Ints) -> Ints:
        """Free the positions of n events, and return them."""
        left = self.of(slots)
        self._free = np.sort(np.concatenate([left, self._free[::-1]]), kind="stable")[::-1]
        return left

    def restore(self, slots: Ints, positions: Ints) -> None:
        """Replace all positions by these, of the events in n slots."""
        self._position[slots], self._slot[positions] = positions, slots
        taken = np.zeros(self.count, np.bool_)
        taken[positions] = True
        self._free = np.flatnonzero(~taken)[::-1].astype(np.int32)


_ROUNDS = 2
"""Rounds of points that may hit chosen events again, before these are excluded."""
_MAX_ROUNDS = 16
"""Rounds with chosen events excluded, before the rest is sampled uniformly."""
_MAX_EXPONENT = 500.0
_HIGH = 0.99
"""New events get this quantile of the newest weights; the maximum would follow outliers."""
_LEAST_LOSS = 1e-3
"""Lower bound of a loss, so that every event may be sampled."""
_NEWEST = 1024
"""How many of the newest losses determine the weight of an event whose own loss is unknown, and what is usual."""
_FAR = 1000.0
"""A weight of more than so many times the usual one is that of an outlier: its loss is 100,000 times as large."""
_ALPHA, _BETA = 0.6, 0.4
"""The exponents of the loss in the weight, and of the probability in the correction (Schaul et al. 2016)."""


class WeightedSampler(Sampler):
    """Events are sampled in proportion to weights, without repeats within a sample."""

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
            any_ = self._uniform(n, generator)
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
    newest losses; with their maximum an outlier would decide permanently. One with a loss far beyond all others, such
    as a label of 1e14, gets their median: else a few would be in every sample. The correction is
    (H * probability)**-0.4, divided by the largest of the sample (Schaul et al. 2016, "Prioritized experience replay").
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
            weights = (np.maximum(losses.astype(np.float64), _LEAST_LOSS) ** _ALPHA).astype(np.float32)
            if weights.max() > _FAR * _LEAST_LOSS**_ALPHA:
                usual = np.median(np.concatenate([self._newest, weights]))
                weights[weights > _FAR * usual] = usual
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


RECENT = 512
"""Replayed events that an event is compared with. They are a sample of the store, with embeddings of the present model:
an index of all would have older ones."""
_NEIGHBOURS = 10
_LEAST_COMPARED = 5 * _NEIGHBOURS
"""So many recent events are needed before any is compared."""
_MOST, _OWN = 7, 2
"""An event disagrees if so many of its neighbours have one other label, and at most so few its own. Where neighbours
disagree among themselves, the model is not good enough to judge."""
_RARELY = 0.125
"""The weight of an event that disagrees with its neighbours, where many do."""
_MANY, _FEW = 0.15, 0.12
"""Fractions of the compared events that disagree: above the first one labels are probably wrong, and weights apply
until it falls below the second. Fewer are rather events that are hard to learn."""
_UNKNOWN, _AGREES, _DISAGREES = range(3)


class AgreementSampler(WeightedSampler):
    """Samples an eighth as often what has another label than most of its nearest neighbours by the model's embedding.

    An event is compared each time that it is replayed, and until then sampled as often as any. While few disagree,
    samples are uniform.
    """

    uses_embeddings = True
    divisible = True
    """Weights differ by a factor of eight at most, so that parts of a choice differ little."""

    def __init__(self, event_table: EventTable, slots: int, recent: RecentEmbeddings) -> None:
        super().__init__(event_table, slots)
        self._recent = recent
        self._opinion = np.zeros(slots, np.int8)
        self._counts = np.zeros(3, np.int64)
        """Held events, by opinion."""
        self._avoids = False

    @override
    def add(self, slots: Slots) -> None:
        self._positions.take(slots)
        self._weigh(slots, 1.0)
        self._counts[_UNKNOWN] += len(slots)

    @override
    def remove(self, slots: Slots) -> None:
        super().remove(slots)
        self._recent.remove(slots)
        self._counts -= np.bincount(self._opinion[slots], minlength=3)
        self._opinion[slots] = _UNKNOWN

    @override
    def update_embeddings(self, slots: Slots, embedding_nD: NDArray[np.float32]) -> None:
        label = self._event_table.column("label", slots).astype(np.int64)
        labelled = label >= 0  # an event without a label cannot have a wrong one
        slots, label, unit_nD = slots[labelled], label[labelled], unit(embedding_nD[labelled])
        if len(slots) and np.count_nonzero(self._recent.slots >= 0) >= _LEAST_COMPARED:
            opinion = np.where(self._disagrees(slots, label, unit_nD), _DISAGREES, _AGREES)
            self._set(slots, opinion.astype(np.int8))
        # Each event is there once: otherwise the neighbours in a small store would be one event several times.
        self._recent.remove(slots)
        self._recent.add(unit_nD, label, slots)

    @override
    def state(self) -> dict[str, NDArray[np.generic]]:
        # Not the embeddings, which could be of erased events: soon there are new ones.
        opinions = self._opinion[self._event_table.slots]
        return {**super().state(), "opinions": opinions, "avoids": np.array([self._avoids])}

    @override
    def restore(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        super().restore(state)
        if {"opinions", "avoids"} <= state.keys():
            self._avoids = bool(state["avoids"][0])
            self._set(self._event_table.slots, state["opinions"].astype(np.int8))

    def _set(self, slots: Slots, opinion: NDArray[np.int8]) -> None:
        """Set the opinions on n events, and their weights."""
        self._counts += np.bincount(opinion, minlength=3) - np.bincount(self._opinion[slots], minlength=3)
        self._opinion[slots] = opinion
        known = int(self._counts[_AGREES:].sum())
        avoids = known >= _LEAST_COMPARED and self._counts[_DISAGREES] > (_FEW if self._avoids else _MANY) * known
        if avoids != self._avoids:
            self._avoids, slots = avoids, self._event_table.slots
        elif not avoids:
            return  # all weights are 1
        rarely = avoids & (self._opinion[slots] == _DISAGREES)
        self._weigh(slots, np.where(rarely, _RARELY, 1.0))

    def _disagrees(self, slots: Slots, label: NDArray[np.int64], unit_nD: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return which of n events have another label than most of their K nearest recent ones."""
        distance_nR = self._recent.distances(unit_nD)
        # An event is no neighbour of itself, nor is one that was removed.
        distance_nR[(self._recent.slots == slots[:, None]) | (self._recent.slots < 0)] = np.inf
        nearest_nK = np.argpartition(distance_nR, _NEIGHBOURS, axis=1)[:, :_NEIGHBOURS]
        label_nK = self._recent.labels[nearest_nK]
        # Of each neighbour, how many neighbours have the same label.
        alike_nK = (label_nK[:, :, None] == label_nK[:, None, :]).sum(axis=2)
        own = (label_nK == label[:, None]).sum(axis=1)
        disagrees: NDArray[np.bool_] = (own <= _OWN) & (alike_nK.max(axis=1) >= _MOST)
        return disagrees
