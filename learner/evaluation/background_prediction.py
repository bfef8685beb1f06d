"""Predictions in a background thread, with a copy of the weights, while the loop trains."""

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.core.job_thread import JobThread
from ingest.events.block import Array
from learner.evaluation.chunks import Chunks
from learner.evaluation.resident_models import ResidentModels
from learner.evaluation.scoring import output_of_each
from learner.model.trained_set import trained_state


class BackgroundPrediction:
    """Predicts the events of one batch at a time. Used by the loop's thread."""

    def __init__(self, model: nn.Module, names: Sequence[str], shape: Sequence[int], chunks: Chunks) -> None:
        """Copy the model, which must not have hooks yet that are of training alone.

        Args:
            model: that is trained.
            names: of its features.
            shape: of its output for one event.
            chunks: of this thread alone.
        """
        self._model, self._names, self._shape, self._chunks = model, names, shape, chunks
        self._copies = ResidentModels(model, chunks)
        self._thread = JobThread("prediction")
        self._output_N: NDArray[np.float32] | None = None

    def begin(self, columns: Mapping[str, Array]) -> None:
        """Begin to predict N events with the weights as they are now."""
        self._output_N = None
        weights = {name: tensor.clone() for name, tensor in trained_state(self._model).items()}
        self._thread.submit(lambda: self._predict(weights, columns))

    def output(self) -> NDArray[np.float32] | None:
        """Wait for the output for the N events of the last `begin`, float32 `[N, *output]`, NaN where the model raises.

        None where it failed, for lack of memory for example: the caller finds out why when it predicts itself.
        """
        self._thread.wait()
        return self._output_N

    def close(self) -> None:
        """End the thread once it is idle."""
        self._thread.close()

    def _predict(self, weights: Mapping[str, Tensor], columns: Mapping[str, Array]) -> None:
        model = self._copies.of(weights)
        self._output_N = output_of_each(model, self._names, columns, self._shape, self._chunks)


def has_spare_core(device: torch.device, ranks: int) -> bool:
    """Return whether `ranks` that train on the CPU leave a core to other threads."""
    return device.type == "cpu" and torch.get_num_threads() * ranks < usable_cores()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
