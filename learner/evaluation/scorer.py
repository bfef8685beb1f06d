"""Scores any weights of one model on held-out events."""

import copy
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ingest.events.block import Array
from ingest.events.schema import Schema
from learner.evaluation.scoring import Chunk, score_each
from learner.model.task import Task
from learner.publishing.gate import Scores


class Scorer:
    """A copy of the model that takes up the weights to be scored. Used by one thread."""

    def __init__(self, model: nn.Module, task: Task, schema: Schema, device: torch.device) -> None:
        self.schema = schema
        self.bounded = schema.label.classes is not None
        """Whether scores lie between 0 and 1."""
        self._model = copy.deepcopy(model).eval()
        self._task = task
        self._device = device
        self._chunk = Chunk()
        self._loaded: Mapping[str, Tensor] | None = None
        self.raised: deque[tuple[NDArray[np.uint64], str]] = deque()
        """Hashes of events on which the model raised, whose score is NaN, and what it raised on the first of them: for
        the loop's thread to take out of the held-out set."""

    def score(self, weights: Mapping[str, Tensor], columns: Mapping[str, Array]) -> Scores:
        """Return the scores of G events, columns `[G, ...]`, NaN where the model raises; the weights fit."""
        return self.score_and_find(weights, columns)[0]

    def score_and_find(
        self, weights: Mapping[str, Tensor], columns: Mapping[str, Array]
    ) -> tuple[Scores, NDArray[np.uint64]]:
        """Return the scores likewise, and the hashes of the events on which the model raises."""
        nothing = np.empty(0, np.uint64)
        if not columns:
            return np.empty(0), nothing
        if weights is not self._loaded:
            self._loaded = None
            self._model.load_state_dict(dict(weights))
            self._loaded = weights
        raised: dict[int, str] = {}
        scores_G = score_each(self._model, self._task, self.schema, columns, self._device, self._chunk, raised)
        if not raised:
            return scores_G, nothing
        hashes = columns["hash"].astype(np.uint64)[list(raised)]
        self.raised.append((hashes, next(iter(raised.values()))))
        return scores_G, hashes

    def fits(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether weights are of this model."""
        self._loaded = None
        try:
            self._model.load_state_dict(dict(weights))
        except RuntimeError:
            return False
        return True
