"""Predictions made when an event comes, and their scores once its label is there: of prediction, not of hindsight.

Legend: N events, B those with a known output, M events that are predicted in the background.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ingest.events.block import Array
from ingest.events.schema import Schema
from learner.evaluation.background_prediction import BackgroundPrediction
from learner.evaluation.chunks import Chunks
from learner.evaluation.prequential import NOT_SCORED, Scored, scored
from learner.evaluation.scoring import output_of_each
from learner.model.device import Precision
from learner.model.task import Task

_INDEX = "predicted_index"
"""A column of events that are predicted in the background: the index of each among them, since some may be erased."""


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
        background: BackgroundPrediction | None = None,
    ) -> None:
        """Take the trained model, training's arithmetic, and `before_chunk`, which waits while requests do.

        `background` predicts while the loop trains; None where there is no core to spare for it.
        """
        self._background = background
        self._model = model
        self._task = task
        self._names = [feature.name for feature in schema.features]
        self._shape = output_shape
        self._chunks = Chunks(device, precision, before_chunk)

    @property
    def runs_ahead(self) -> bool:
        """Whether `begin` may be called."""
        return self._background is not None

    def begin(self, columns: dict[str, Array]) -> None:
        """Begin to predict N events with the weights as they are now; `predict` returns the outputs for those left."""
        assert self._background is not None
        self._background.begin(dict(columns))
        columns[_INDEX] = np.arange(len(columns["offset"]))

    def predict(self, columns: Mapping[str, Array]) -> NDArray[np.float32]:
        """Return the model's output for each of N events, float32 `[N, *output]`; NaN where the model raises."""
        if self._background is not None and _INDEX in columns:
            output_M = self._background.output()
            if output_M is not None:
                return output_M.take(columns[_INDEX].astype(np.intp), axis=0)
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
