"""Finds the events of a step on which the model or the task raises, by passes over parts of it without training."""

import traceback
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ingest.events.schema import Schema
from learner.model.faulty_events import RaisingEventsError, error_of, raising, works_on_zeros
from learner.strategies.base import StepWeights
from learner.strategies.examples import Examples, Tensors, concat, pad_single
from learner.training.out_of_memory import free_cached_memory
from learner.training.passes import Passes
from learner.training.raising.rank_fallback import RankFallback
from learner.training.step_snapshot import StepSnapshot


class RaisingSearch:
    """Searches a step that raised. Used by one thread."""

    def __init__(self, passes: Passes, schema: Schema, fallback: RankFallback) -> None:
        self._passes = passes
        self._schema = schema
        self._fallback = fallback

    def raise_named(self, error: Exception | None, events: Sequence[Examples], before: StepSnapshot) -> None:
        """Undo a step that raised `error`, and find its events that raise; None: on another rank alone.

        Raises:
            RaisingEventsError: names the events.
            Exception: no part raises, or all raise and so do all-zero events: the events are not the cause.
        """
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # they reference tensors of the pass
        free_cached_memory(self._passes.device)
        everything = concat(events)
        self.undo(before)
        try:
            with self._fallback.searching(partial(self._pass, self._weights(everything)), everything):
                if error is None:
                    raise RaisingEventsError((), "")
                errors = raising(len(everything), lambda begin, end: self._check(everything[begin:end], before))
                if errors and (len(errors) < len(everything) or self._works_on_zeros(before)):
                    raise error_of(errors) from error
        finally:
            self.undo(before)

    def undo(self, before: StepSnapshot) -> None:
        """Undo a pass: clear gradients, restore strategy, buffers and random generators, reset sharded modules."""
        self._fallback.abandon()
        self._passes.strategy.give_up()
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
        """Compute gradient and score of events as if new, without the compiler."""
        self._passes.update.gradients.clear()
        self._passes.strategy.on_step_start()
        self._fallback.run_parts(partial(self._pass, self._weights(events)), self._passes.parts(events))

    def _weights(self, events: Examples) -> StepWeights:
        return StepWeights(events.weight_B.sum(), [], self._passes.present(events))

    def _pass(self, weights: StepWeights, events: Examples, _old: Sequence[Examples]) -> None:
        """Compute gradient and score of a part of the events; gradients of whole weights are not averaged."""
        passes = self._passes
        strategy, embedding = passes.strategy, passes.embedding
        if embedding is not None:
            embedding.capture_next()
        with passes.autocast():
            loss = strategy.loss(passes.forward, events, [], weights)
        if strategy.learns_gradient:
            strategy.backward(loss, passes.update.scaler.scale)
        if embedding is not None:
            passes.captured()
        with torch.no_grad():
            passes.task.score(loss.output_B, events.label_B)
