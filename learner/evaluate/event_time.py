"""Predictions made when an event comes, and their scores once its label is there: of prediction, not of hindsight.

Legend: N events, B those with a known output.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Schema
from anabranch.learner.evaluate.chunks import Chunks
from anabranch.learner.evaluate.scoring import output_of_each
from anabranch.learner.evaluate.stream_monitor import NOT_SCORED, Scored, scored
from anabranch.learner.model.device import Precision
from anabranch.learner.model.task import Task


class EventTimePredictor:
    """Predicts with the model that is trained, between two steps. Used by the loop's thread."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        schema: Schema,
        device: torch.device,
        precision: Precision,
        output_shape: Sequence[int],
        before_chunk: Callable[[], object] = bool,
    ) -> None:
        """Take the trained model, training's arithmetic, and `before_chunk`, which waits while requests do."""
        self._model = model
        self._task = task
        self._names = [feature.name for feature in schema.features]
        self._shape = output_shape
        self._chunks = Chunks(device, precision, before_chunk)

    def predict(self, columns: Mapping[str, Array]) -> NDArray[np.float32]:
        """Return the model's output for each of N events, float32 `[N, *output]`; NaN where the model raises."""
        self._chunks.follow()
        self._model.eval()
        try:
            with self._chunks.on_stream():
                return output_of_each(self._model, self._names, columns, self._shape, self._chunks)
        finally:
            self._model.train()

    def score(self, output_N: NDArray[np.float32], label_N: Array) -> Scored:
        """Return the sums of score and loss of N predictions; those that are not known are left out."""
        if not len(output_N):
            return NOT_SCORED
        known = np.isfinite(output_N.reshape(len(output_N), -1)).all(axis=1)
        if not known.any():
            return NOT_SCORED
        return scored(self._task, output_N[known], label_N[known])
