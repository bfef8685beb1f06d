"""The sampler `similar`: events whose embeddings are near those of new ones.

Legend: H events held, n sampled.
"""

import numpy as np
from typing_extensions import override

from replay.embedding_index.embedding_tracker import EmbeddingTracker
from replay.reservoir.event_table import EventTable
from replay.sampling.base import Choice, UniformSampler, stale_share


class NeighbourSampler(UniformSampler):
    """Samples the nearest old events, by the model's embedding, to the new events of LAG steps earlier.

    Training on the new events disturbs these most. Without an answer of the index process in time a sample is uniform.
    Events that are not in the index, as after a restart, are sampled in proportion to their number, which adds them to
    it. One event in eight is stale, with an embedding of an old model: sampling it updates the embedding.
    """

    divisible = False

    def __init__(self, event_table: EventTable, tracker: EmbeddingTracker) -> None:
        super().__init__(event_table)
        self._tracker = tracker

    @override
    def sample(self, n: int, generator: np.random.Generator) -> Choice:
        any_ = super().sample(n, generator).slots
        unindexed = any_[~self._tracker.indexed(any_)]
        stale = self._tracker.stale(min(stale_share(n, generator), len(any_) - len(unindexed)))
        slots = np.concatenate([unindexed, stale, self._tracker.nearest(), any_])
        slots = slots[np.sort(np.unique(slots, return_index=True)[1])]
        return Choice(generator.permutation(slots[: len(any_)]))
