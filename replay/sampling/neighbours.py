"""The sampler `similar`: events whose embeddings are near those of new ones.

Legend: H events held, n sampled.
"""

import numpy as np

from replay.embedding_index.embedding_tracker import EmbeddingTracker
from replay.reservoir.event_table import EventTable
from replay.sampling.base import Choice, UniformSampler, stale_share


class NeighbourSampler(UniformSampler):
    """The nearest old events, by the model's embedding, to the new ones of a fixed number of steps before: those that
    training disturbs.

    Follows what the index process finds, and whether it does in time; else a sample is uniform. Events that it has not,
    as after a restart, are sampled as often as if all were sampled alike: it has them once they were rehearsed.
    """

    divisible = False

    def __init__(self, event_table: EventTable, tracker: EmbeddingTracker) -> None:
        super().__init__(event_table)
        self._tracker = tracker

    def sample(self, n: int, generator: np.random.Generator) -> Choice:
        """Take the nearest that were found for it, nearest first, beside what cannot be found; fill up, and mix.

        One in eight is an event whose embedding is of a model long gone, where there are such: being sampled renews it.
        """
        any_ = super().sample(n, generator).slots
        unplaced = any_[~self._tracker.placed(any_)]
        stale = self._tracker.stale(min(stale_share(n, generator), len(any_) - len(unplaced)))
        slots = np.concatenate([unplaced, stale, self._tracker.nearest(), any_])
        slots = slots[np.sort(np.unique(slots, return_index=True)[1])]
        return Choice(generator.permutation(slots[: len(any_)]))
