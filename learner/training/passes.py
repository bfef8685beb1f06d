"""The forward and backward passes of a step, in micro-batches that fit the device.

Legend: B new events, C classes.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import TypeVar

import torch
from torch import Tensor, nn

from anabranch.core.failures import out_of_memory
from learner.config import LearnerSettings
from learner.errors import MemoryShortageError
from learner.model.cuda_graph import graphed_pass
from learner.model.device import Precision
from learner.model.embedding import Embeddings, TaskEmbedding
from learner.model.factory import forward
from learner.model.task import Task
from learner.strategies.base import Forward, MicroBatchLoss, StepWeights, Strategy, overrides
from learner.strategies.early_negatives import weighted_by_importance
from learner.strategies.examples import Examples
from learner.strategies.teacher_loss import TeacherLoss
from learner.training.micro_batches import StepHooks, idle, micro_batches, run_graphed
from learner.training.optimizer_step import OptimizerStep
from learner.training.out_of_memory import free_cached_memory, halve_micro_batch, oom_warning
from learner.training.parallelism import Ranks
from learner.training.raising.rank_fallback import RankFallback
from learner.training.step_result import StepOutputs, cat, decide
from learner.training.step_snapshot import Snapshots, StepSnapshot

_SCALE_RETRIES = 16
"""How often fp16 may halve its loss scale within a step before the events themselves are to blame."""

_T = TypeVar("_T")


class Passes:
    """Runs the passes of steps, and updates the weights where all numbers of a step are finite. Used by one thread."""

    def __init__(
        self,
        model: nn.Module,
        trained: nn.Module,
        task: Task,
        strategy: Strategy,
        settings: LearnerSettings,
        classes: int | None,
        device: torch.device,
        precision: Precision,
        embedding: Embeddings | None,
        ranks: Ranks,
        fallback: RankFallback,
        update: OptimizerStep,
        hooks: StepHooks,
        warning: str | None = None,
        teaching: TeacherLoss | None = None,
    ) -> None:
        """Take the model, and `trained`, which runs it so that gradients are averaged; `classes`: of the label."""
        self._balanced: Callable[[Examples], Examples] | None = None if teaching is None else teaching.balanced
        self._loss = strategy.loss if teaching is None else partial(teaching.loss, strategy)
        self.task = task
        self.strategy = strategy
        self.device = device
        self.embedding = embedding
        self.update = update
        self.forward = partial(forward, model)
        """Runs the model on this rank alone and without the compiler."""
        self.autocast = partial(precision.autocast, device) if precision.dtype is not None else contextlib.nullcontext
        self.micro_batch_size = settings.micro_batch_size
        """Most events of a micro-batch; None: all of a step."""
        self.warning = warning
        """One sentence when micro-batches were made smaller after running out of memory."""
        self._forward_trained: Forward = partial(forward, trained)
        self._classes = classes if strategy.sees_classes else None
        self._fixed = settings.deterministic
        self._attempts = _SCALE_RETRIES if precision.scaled and strategy.learns_gradient else 1
        self._ranks = ranks
        self._fallback = fallback
        self.snapshots = Snapshots(model, device)
        """From which passes can be undone or retried."""
        self._graphs = graphed_pass(model, device) if settings.graphs else None
        self._before_micro_batch = hooks.before_micro_batch
        self.before_wait: Callable[[], object] = bool
        """Called when the work of a step is queued, before the host waits for its numbers."""
        self._passes = 0
        self._transforms = overrides(strategy, "transform_gradients")
        self._prepares = overrides(strategy, "on_step_start")
        self._together = ranks.world > 1 or ranks.weights.sharded
        """Whether ranks exchange anything in a step."""

    def begin(self) -> StepSnapshot:
        """Begin to count the passes of a step, or of a probe; return a snapshot, which is valid until the next call."""
        self._passes = 0
        return self.snapshots.of_step()

    def before_pass(self) -> None:
        """Let device sharing wait; called before each pass of the model."""
        if self._before_micro_batch is not None:
            self._before_micro_batch(self._passes)
            self._passes += 1

    def run(self, new: Examples, old: Sequence[Examples], rows: int, before: StepSnapshot) -> StepOutputs:
        """Compute the gradient of a step and, if all is finite, update the weights; nothing else is changed.

        Args:
            new: new events, of which only the first `rows` count.
            old: replayed events, by sample.
            rows: number of new events.
            before: the state before the step.

        Raises:
            RankRaisedError: the model raised on one of the ranks.
        """
        if self._balanced is not None:
            new, *old = map(self._balanced, (new, *old))
        picked = self._pick(new, old, before) if self.strategy.picks and any(map(len, old)) else None
        if picked is not None:
            old = [events[indices] for events, indices in zip(old, picked, strict=True)]
            before = before.with_current_rng()
        weights, scaled = self._step_weights(new, old), self._attempts > 1
        scale = self.update.loss_scale() if scaled else 1.0
        may_skip = self.strategy.learns_gradient and self.update.decides_on_device and self.update.can_skip()
        on_device = self.update if may_skip else None
        for attempt in range(self._attempts):
            if attempt:
                self.update.gradients.clear()
                before = before.with_current_rng()
            outputs = self.fitting(partial(self._attempt, new, old, rows, weights, before), [[new, *old]], before)
            applied = decide(outputs, before, self._ranks, on_device, self._fallback, self.before_wait)
            if not outputs.finite:
                before.restore_buffers()
                self.strategy.give_up()
                self._ranks.reset_comm_state()
            elif self.strategy.learns_gradient and not applied:
                self.update.apply()
            if scaled:
                self.update.rescale()
            if outputs.finite or not math.isfinite(outputs.loss):
                break
        if scaled and not outputs.finite:
            # The events caused it, not the scale.
            self.update.rescale(scale)
        outputs.picked = picked
        return outputs

    def fitting(self, passes: Callable[[], _T], at_once: Sequence[Sequence[Examples]], before: StepSnapshot) -> _T:
        """Run passes; if memory runs out, restart them from a snapshot, with micro-batches of half the size.

        The strategy restores the weights when one of its passes fails. `at_once`: groups of events, each of which goes
        through the model together unless micro-batches are smaller.

        Raises:
            MemoryShortageError: not even a few events fit for now. Micro-batches have the size of before.
        """
        size_before = self.micro_batch_size, self.warning
        while True:
            try:
                return passes()
            except RuntimeError as exc:
                if not out_of_memory(exc) or self._fixed:
                    raise
                message = " ".join(str(exc).split())
            # After the handler, since the error references tensors of the pass.
            self.update.give_up()
            free_cached_memory(self.device)
            before.restore()
            rows = max(sum(map(len, group)) for group in at_once)
            try:
                size = halve_micro_batch(rows, self.micro_batch_size, self.device, self._ranks.world, message)
            except MemoryShortageError:
                self.micro_batch_size, self.warning = size_before
                self.strategy.give_up()
                raise
            self.micro_batch_size, self.warning = size, oom_warning(self.device, size)

    def parts(self, events: Examples) -> Iterator[Examples]:
        """Yield parts of events that are small enough for one pass of the model; run it before taking the next part."""
        for part, _ in micro_batches(events, (), self.micro_batch_size):
            self.before_pass()
            yield part

    def captured(self) -> Tensor:
        """Return the embeddings of the events of the last pass, for which some models run once more."""
        assert self.embedding is not None
        if isinstance(self.embedding, TaskEmbedding):
            self.before_pass()
        return self.embedding.captured()

    def present(self, new: Examples) -> Tensor | None:
        """Return which classes are among this rank's new events, bool `[C]`; None where the strategy needs none."""
        if self._classes is None:
            return None
        # One extra entry takes the labels of weight 0: to filter them would be to wait for the device.
        present = torch.zeros(self._classes + 1, dtype=torch.bool, device=self.device)
        has_label_B = new.weight_B > 0 if new.labelled_B is None else new.labelled_B
        present.index_fill_(0, torch.where(has_label_B, new.label_B, self._classes), True)
        return present[: self._classes]

    def _pick(self, new: Examples, old: Sequence[Examples], before: StepSnapshot) -> Sequence[Tensor] | None:
        """Let the strategy pick among the old events; the model is unchanged afterwards."""

        def pick(new: Examples, old: Sequence[Examples]) -> Sequence[Tensor] | None:
            with self.autocast():
                return self.strategy.select(self.forward, new, old)

        picked = self.fitting(partial(self._run, pick, new, old), [[events] for events in (new, *old)], before)
        self.update.gradients.clear()
        if picked is not None:
            before.restore_buffers()
        return picked

    def _step_weights(self, new: Examples, old: Sequence[Examples]) -> StepWeights:
        """Return the event weights of a step, averaged over all ranks."""
        weights = [events.total_weight for events in (new, *old)]
        if self._ranks.size > 1:
            together = torch.stack(weights)
            self._ranks.average([together])
            weights = list(together)
        present = self.present(new)
        return StepWeights(weights[0], weights[1:], None if present is None else self._ranks.any(present))

    def _attempt(
        self, new: Examples, old: Sequence[Examples], rows: int, weights: StepWeights, before: StepSnapshot
    ) -> StepOutputs:
        """Compute the gradient of the step, transformed by the strategy and clipped, and its numbers."""
        if self._prepares:
            self.strategy.on_step_start()
        outputs = StepOutputs()
        total = self._run_parts(new, old, weights, outputs, before)
        if self.strategy.learns_gradient:
            if self._together:
                self._ranks.count_gradients()
                self.update.end_backward()
            if self._attempts > 1:
                self.update.unscale()
            if self._transforms:
                self.strategy.transform_gradients(self.update.loss_scale())
        self._measure(outputs, total, new, rows, before)
        return outputs

    def _run_parts(
        self, new: Examples, old: Sequence[Examples], weights: StepWeights, outputs: StepOutputs, before: StepSnapshot
    ) -> Tensor:
        """Add the gradient of all micro-batches, and their outputs to `outputs`; return the loss of the step."""
        totals = list[Tensor]()
        whole = self.micro_batch_size is None
        parts = [(new, list(old))] if whole else micro_batches(new, old, self.micro_batch_size)
        # Before the first pass, in which ranks wait.
        last = (self._ranks.weights.num_forwards(len(parts)) if self._together else len(parts)) - 1
        for index, (some_new, some_old) in enumerate(parts):
            self.before_pass()
            with self._ranks.no_sync() if index < last else contextlib.nullcontext():
                loss = None
                if self._graphs is not None and len(parts) == 1:
                    loss = run_graphed(
                        self._graphs, self._pass, (some_new, some_old, weights), partial(self._undo, before)
                    )
                totals.append(self._forward_backward(some_new, some_old, weights, outputs, loss))
        for index in range(len(parts), last + 1):
            with self._ranks.no_sync() if index < last else contextlib.nullcontext():
                self._run_idle(new, old, weights)
        return reduce(torch.add, totals)

    def _run_idle(self, new: Examples, old: Sequence[Examples], weights: StepWeights) -> None:
        """Run a pass of weight 0, which other ranks with more micro-batches need this rank to run."""
        self.before_pass()
        with self.snapshots.taken() as before:
            self._forward_backward(*idle(new, old), weights, StepOutputs())
            before.restore_buffers()

    def _forward_backward(
        self,
        new: Examples,
        old: Sequence[Examples],
        weights: StepWeights,
        outputs: StepOutputs,
        loss: MicroBatchLoss | None = None,
    ) -> Tensor:
        """Add the gradient of a micro-batch to that of the step, and its outputs to `outputs`; return its loss.

        `loss`: that of a pass which has run; None: this runs it.
        """
        if loss is None:
            loss = self._run(lambda new, old: self._pass(new, old, weights), new, old)
        outputs.output.append(loss.output_B)
        if loss.new_B is not None:
            outputs.new.append(loss.new_B)
        outputs.old.append(loss.old)
        if self.embedding is not None:
            try:
                embedding_N, rows = self.captured(), len(loss.output_B)
                outputs.embedding.append((embedding_N[:rows], embedding_N[rows:]))
            except Exception as exc:  # the user's own code may raise anything
                if not self._fallback.recorded(exc, len(new) + sum(map(len, old))):
                    raise
        return loss.total.detach()

    def _undo(self, before: StepSnapshot) -> None:
        self.update.gradients.clear()
        before.restore()

    def _pass(self, new: Examples, old: Sequence[Examples], weights: StepWeights) -> MicroBatchLoss:
        if self.embedding is not None:
            self.embedding.capture_next()
        forward = self._forward_trained
        if new.early_B is not None:
            forward = weighted_by_importance(forward, new.early_B)
        with self.autocast():
            loss = self._loss(forward, new, old, weights)
        if self.strategy.learns_gradient:
            self.strategy.backward(loss, self.update.scaler.scale)
        return loss

    def _run(
        self, run_pass: Callable[[Examples, Sequence[Examples]], _T], new: Examples, old: Sequence[Examples]
    ) -> _T:
        """Run a pass; where other ranks need this one to go on, with all-zero events in place of those that raise."""
        return self._fallback.run(run_pass, new, old) if self._fallback.able else run_pass(new, old)

    def _measure(self, outputs: StepOutputs, total: Tensor, new: Examples, rows: int, before: StepSnapshot) -> None:
        """Clip the gradient, and put the numbers of the step into `outputs`, of this rank and on the device."""
        norm = self.update.gradients.clip()
        with torch.no_grad():
            outputs.output_B = cat(outputs.output)
            output_B, label_B = outputs.output_B[:rows], new.label_B[:rows]
            score = loss_new = norm.new_zeros(())
            if self._fallback.error is None:  # else the step is undone, and its outputs may be of other events
                try:
                    loss_B = cat(outputs.new)[:rows] if outputs.new else self.task.loss(output_B, label_B)
                    score_B, labelled_B = self.task.score(output_B, label_B), new.labelled_B
                    if labelled_B is not None:
                        score_B, loss_B = (torch.where(labelled_B[:rows], each, 0) for each in (score_B, loss_B))
                    score, loss_new = score_B.sum(), loss_B.sum()
                except Exception as exc:  # the user's own code may raise anything
                    if not self._fallback.recorded(exc, rows):
                        raise
            # An overflow can make running statistics non-finite while loss and gradient are finite.
            magnitude = before.magnitude()
            # Times 0 it is 0 or NaN: finite magnitudes of several ranks may add up to infinity.
            outputs.numbers = [score, loss_new, total, norm, *([] if magnitude is None else [magnitude * 0])]
