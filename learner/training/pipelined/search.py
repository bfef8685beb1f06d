"""Finds the events of a step on which the model raises, where it is divided into the stages of a pipeline."""

from collections.abc import Sequence

import torch
from typing_extensions import override

from anabranch.core.failures import out_of_memory
from learner.strategies.examples import Examples, pad_single
from learner.training.pipelined.passes import PipelinedPasses
from learner.training.raising.search import RaisingSearch
from learner.training.step_snapshot import StepSnapshot

_RAISED, _OUT_OF_MEMORY = 1, 2


class OtherStageError(Exception):
    """The model raises on another rank of the pipeline, on events that this one has too."""


class PipelinedSearch(RaisingSearch):
    """Searches together: what raises on one rank of a pipeline counts as raising on all, which try the same parts."""

    _passes: PipelinedPasses

    @override
    def raise_named(self, error: Exception | None, events: Sequence[Examples], before: StepSnapshot) -> None:
        super().raise_named(self._of_all(error), events, before)

    @override
    def _check(self, events: Examples, before: StepSnapshot) -> None:
        padded = pad_single(events) if len(events) == 1 else events
        try:
            error = self._of_all(self._passes.error_on(padded, self._weights(padded)))
        finally:
            self.undo(before)
        if error is not None:
            raise error

    def _of_all(self, error: Exception | None) -> Exception | None:
        """Return the error of this rank, or else one for that of another rank of the pipeline."""
        kind = 0 if error is None else _OUT_OF_MEMORY if out_of_memory(error) else _RAISED
        kinds = torch.zeros(2, dtype=torch.int64)
        if kind:
            kinds[kind - 1] = 1
        raised, too_large = self._passes.pipeline.share(kinds).tolist()
        if error is None and too_large:
            return torch.OutOfMemoryError("out of memory on another rank of the pipeline")
        if error is None and raised:
            return OtherStageError("on another rank of the pipeline")
        return error
