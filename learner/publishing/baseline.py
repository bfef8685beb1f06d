"""A baseline: a version that candidates are compared with, and its scores on held-out events."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ingest.events.block import Array
from learner.evaluation.scoring import Scorer, Scores
from learner.publishing.gate import Marks

Hashes = NDArray[np.uint64]
"""Hashes of the identities of events."""


@dataclass
class Baseline:
    """The weights of a version, and its scores by event and label: each is scored once. Used by one thread.

    A held-out event may get another label later, and then has another score.
    """

    number: int
    weights: Mapping[str, Tensor]
    held_out: Hashes
    """The events that were held out when it was published."""
    _scored: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    _labels: Array | None = None
    _scores: Scores = field(default_factory=lambda: np.empty(0))

    def held_out_before(self, hashes: Hashes) -> Marks:
        """Return which events had been held out when this version was published."""
        return np.isin(hashes, self.held_out)

    def set_scores(self, columns: Mapping[str, Array], scores: Scores) -> None:
        """Store its scores on G events, columns `[G, ...]`, and drop earlier ones."""
        hashes = columns["hash"].astype(np.uint64)
        order = np.argsort(hashes)
        self._scored, self._labels, self._scores = hashes[order], columns["label"][order], scores[order]

    def scores(self, scorer: Scorer, columns: Mapping[str, Array]) -> Scores:
        """Return its scores on G events, columns `[G, ...]`; only those without a stored score of the same label are
        scored."""
        hashes, label = columns["hash"].astype(np.uint64), columns["label"]
        kept, scores = np.isin(hashes, self._scored), np.empty(len(hashes))
        if self._labels is not None:
            at = np.searchsorted(self._scored, hashes[kept])
            same = (self._labels[at] == label[kept]).all(axis=tuple(range(1, label.ndim)))
            kept[kept] = same
            scores[kept] = self._scores[at[same]]
        if not kept.all():
            fresh = {name: column[~kept] for name, column in columns.items()}
            scores[~kept] = scorer.score(self.weights, fresh)
        self.set_scores(columns, scores)
        return scores
