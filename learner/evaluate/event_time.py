"""Predictions made when an event comes, and their scores once its label is there: of prediction, not of hindsight.

Legend: N events, K numbers of a record, G baselines.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Schema
from anabranch.learner.evaluate.baselines import Baselines
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
        baselines: Baselines | None = None,
    ) -> None:
        """Take the trained model, training's arithmetic, and `before_chunk`, which waits while requests do.

        `baselines` predict the same events; None: there are none.
        """
        self._baselines = baselines
        self._outputs = math.prod(output_shape)
        self.width = self._outputs + (len(baselines.names) if baselines else 0)
        """Numbers of `record`, K."""
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

    def record(self, columns: Mapping[str, Array]) -> NDArray[np.float32]:
        """Return what is predicted of N events now, float32 `[N, K]`: the outputs, then what each baseline guesses."""
        output_NK = self.predict(columns).reshape(len(columns["label"]), self._outputs)
        if self._baselines is None:
            return output_NK
        return np.concatenate([output_NK, self._baselines.guess(columns["group_hash"])], axis=1)

    def score_record(self, record_NK: NDArray[np.float32], label_N: Array, group_N: Array) -> Scored:
        """Return the sums of the scores of N records whose labels are known now, and let baselines learn these."""
        output_N = record_NK[:, : self._outputs].reshape(len(record_NK), *self._shape)
        return self.score(output_N, label_N, group_N, record_NK[:, self._outputs :])

    def score(
        self,
        output_N: NDArray[np.float32],
        label_N: Array,
        group_N: Array,
        guess_NG: NDArray[np.float32] | None = None,
    ) -> Scored:
        """Return the sums of score and loss of N predictions, and let baselines learn the labels.

        Events whose output is not known are left out. `group_N`: hashes of groups, uint64. `guess_NG`: what each
        baseline guessed; None: it guesses now, each event with the labels of those before.
        """
        if not len(output_N):
            return NOT_SCORED
        known = np.isfinite(output_N.reshape(len(output_N), -1)).all(axis=1)
        found = scored(self._task, output_N[known], label_N[known], group_N[known]) if known.any() else NOT_SCORED
        if self._baselines is None:
            return found
        now_NG = self._baselines.learn(label_N, group_N)
        guess_NG = now_NG if guess_NG is None else guess_NG
        return replace(found, baselines=self._baselines.score(guess_NG[known], label_N[known]))
