"""A version that others are compared with: its weights, and how it scored on held-out events."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ingest.events.block import Array
from learner.evaluation.scoring import Scorer, Scores
from learner.publishing.gate import Marks

Hashes = NDArray[np.uint64]
"""Of the identities of events."""


@dataclass
class Baseline:
    """A version in memory. Scores are kept by event, so that each event is scored once. Used by one thread."""

    number: int
    weights: Mapping[str, Tensor]
    known: Hashes
    """The events that were held out when it was published."""
    _hashes: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    _scores: Scores = field(default_factory=lambda: np.empty(0))

    def knew(self, hashes: Hashes) -> Marks:
        """Return which events were held out already when it was published."""
        return np.isin(hashes, self.known)

    def remember(self, hashes: Hashes, scores: Scores) -> None:
        """Take note of its scores on G events, which are all that it is asked for until the next call."""
        order = np.argsort(hashes)
        self._hashes, self._scores = hashes[order], scores[order]

    def scores(self, scorer: Scorer, columns: Mapping[str, Array]) -> Scores:
        """Return its scores on G events, columns `[G, ...]`; only those are scored that were not the last time."""
        hashes = columns["hash"].astype(np.uint64)
        found = np.isin(hashes, self._hashes)
        scores = np.empty(len(hashes))
        scores[found] = self._scores[np.searchsorted(self._hashes, hashes[found])]
        if not found.all():
            fresh = {name: column[~found] for name, column in columns.items()}
            scores[~found] = scorer.score(self.weights, fresh)
        self.remember(hashes, scores)
        return scores
