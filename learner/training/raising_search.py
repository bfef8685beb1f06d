"""Finds the events of a step on which the model or the task raises, by passes over parts of it without training."""

import traceback
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ingest.events.schema import Schema
from learner.model.faulty_events import error_of, raising, works_on_zeros
from learner.strategies.base import StepWeights
from learner.strategies.examples import Examples, Tensors, concat, pad_single
from learner.training.out_of_memory import release
from learner.training.passes import Passes
from learner.training.step_snapshot import StepSnapshot


class RaisingSearch:
    """Searches a step that raised. Used by one thread."""

    def __init__(self, passes: Passes, schema: Schema) -> None:
        self._passes = passes
        self._schema = schema

    def raise_named(self, error: Exception, events: Sequence[Examples], before: StepSnapshot) -> None:
        """Undo a step that raised `error`, and find its events that raise.

        Raises:
            RaisingEventsError: names the events.
            Exception: no part raises, or all raise and so do all-zero events: the events are not the cause.
        """
        traceback.clear_frames(error.__traceback__)  # they reference tensors of the pass
        release(self._passes.device)
        everything = concat(events)
        self.undo(before)
        errors = raising(len(everything), lambda begin, end: self._check(everything[begin:end], before))
        if errors and (len(errors) < len(everything) or self._works_on_zeros(before)):
            raise error_of(errors) from error

    def undo(self, before: StepSnapshot) -> None:
        """Undo a pass: clear gradients, restore buffers and random generators."""
        self._passes.update.give_up()
        before.restore()

    def _works_on_zeros(self, before: StepSnapshot) -> bool:
        def run(features: Tensors, label_B: Tensor) -> None:
            weight_B = torch.ones(len(label_B), device=self._passes.device)
            self._check(Examples(dict(features), label_B, weight_B), before)

        return works_on_zeros(run, self._schema, self._passes.device)

    def _check(self, events: Examples, before: StepSnapshot) -> None:
        """Run the passes of a step with these new events, and undo them; raises the errors of model and task."""
        padded = pad_single(events) if len(events) == 1 else events
        try:
            with self._passes.snapshots.taken() as now:
                self._passes.fitting(partial(self._run, padded), [[padded]], now)
        finally:
            self.undo(before)

    def _run(self, events: Examples) -> None:
        """Compute gradient and score of events as if new, on this rank alone and without the compiler."""
        passes = self._passes
        strategy, embedding = passes.strategy, passes.embedding
        passes.update.gradients.clear()
        strategy.on_step_start()
        weights = StepWeights(events.weight_B.sum(), [], passes.present(events))
        for part in passes.parts(events):
            if embedding is not None:
                embedding.capture_next()
            with passes.autocast():
                loss = strategy.loss(passes.forward, part, [], weights)
            if strategy.learns_gradient:
                strategy.backward(loss, passes.update.scaler.scale)
            if embedding is not None:
                passes.captured()
            with torch.no_grad():
                passes.task.score(loss.output_B, part.label_B)
