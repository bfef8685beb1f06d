"""Runs the steps of a model: forward and backward passes in micro-batches that fit the device, then the optimizer.

Legend: B new events, C classes.
"""

import contextlib
import logging
import math
import sys
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import NoReturn, TypeVar

import torch
from torch import Tensor, nn

from anabranch.core.failures import out_of_memory
from anabranch.core.users_code import in_one_line
from anabranch.learner.device.out_of_memory import free_cached_memory, halve_micro_batch, oom_warning
from anabranch.learner.errors import MemoryShortageError, RankTooLargeError
from anabranch.learner.model.embedding import TaskEmbedding
from anabranch.learner.model.examples import Examples, Tensors, concat, pad_single
from anabranch.learner.model.factory import forward
from anabranch.learner.model.faulty_events import (
    RaisingEventsError,
    error_of,
    may_be_of_events,
    raising,
    works_on_zeros,
)
from anabranch.learner.strategies.base import ComputeLoss, Forward, MicroBatchLoss, StepWeights, overrides
from anabranch.learner.train.micro_batches import StepHooks, idle, micro_batches, num_parts
from anabranch.learner.train.optimizer_step import OptimizerStep
from anabranch.learner.train.parallelism import Ranks
from anabranch.learner.train.raising import RankFallback, RankRaisedError
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.step_graphs import CudaGraphs, DeviceStep, StepGraphs
from anabranch.learner.train.step_result import RoundEvents, StepResult
from anabranch.learner.train.step_snapshot import Snapshots, StepSnapshot

_SCALE_RETRIES = 16
"""How often fp16 may halve its loss scale within a step before the events themselves are to blame."""

_T = TypeVar("_T")

log = logging.getLogger(__name__)


@dataclass
class Attempt:
    """One attempt of a step, and the outputs of its passes: one entry a micro-batch, new events before replayed ones.

    Attributes:
        rows: how many of the new events count.
        weights: of the step.
        before: the state before it.
    """

    rows: int
    weights: StepWeights
    before: StepSnapshot
    output: list[Tensor] = field(default_factory=list)
    """The model's output for new events."""
    output_B: Tensor = field(init=False)
    """The same of all micro-batches, joined."""
    new: list[Tensor] = field(default_factory=list)
    """The loss of each new event, where the strategy returns it."""
    old: list[Sequence[Tensor]] = field(default_factory=list)
    """The loss of each old event, by sample."""
    embedding: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Embeddings of new and of old events."""
    numbers: Sequence[Tensor] = ()
    """Scalars on the device, until they are read back: the sums of scores and of losses of new events, then those that
    are all finite in a step that is taken: its loss, the norm of its gradient, the magnitude of the buffers."""
    loss: float = math.nan
    """Of the step, over all ranks."""
    score: float = math.nan
    """The sum of the scores of new events, over all ranks."""
    loss_new: float = math.nan
    """The sum of the losses of new events, over all ranks."""
    finite: bool = False
    """Whether the step has changed the weights."""
    picked: Sequence[Tensor] | None = None
    """Indices of the old events that were trained on, by sample; None: all."""

    def result(self, sampled: Sequence[int]) -> StepResult:
        """Return the result of the step, whose samples had these sizes: all outputs joined, in their order."""
        return StepResult(
            finite=self.finite,
            loss=self.loss,
            score=self.score,
            loss_new=self.loss_new,
            old_R=self.old_losses(sampled),
            embedding_N=self._embeddings(sampled),
            output_B=_first(self.output_B, self.rows),
            replayed=sum(sampled) if self.picked is None else sum(map(len, self.picked)),
            rows=self.rows,
        )

    def old_losses(self, sampled: Sequence[int]) -> Tensor | None:
        """Return the losses of old events, of samples of these sizes, NaN where they were not trained on."""
        samples = [_cat(parts) for parts in zip(*filter(None, self.old), strict=False)]
        if not samples:
            return None
        if self.picked is None:
            return _cat(samples)
        return torch.cat(
            [
                torch.full((n,), math.nan, device=losses.device).index_copy(0, indices, losses.float())
                for n, indices, losses in zip(sampled, self.picked, samples, strict=True)
            ]
        )

    def _embeddings(self, sampled: Sequence[int]) -> Tensor | None:
        if not self.embedding:
            return None
        new = torch.cat([part for part, _ in self.embedding])[: self.rows]
        old = torch.cat([part for _, part in self.embedding])
        if self.picked is not None or len(sampled) > 1 or len(old) != sum(sampled):
            old = new.new_full((sum(sampled), new.shape[1]), math.nan)
        return torch.cat([new, old])


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _first(values: Tensor, rows: int) -> Tensor:
    """Return the first values; all of them without a view, which takes as long as a small sum."""
    return values if values.shape[0] == rows else values[:rows]


class StepRunner:
    """Runs steps, and updates the weights where all numbers of a step are finite. Used by one thread."""

    def __init__(
        self,
        setup: TrainingSetup,
        trained: nn.Module,
        ranks: Ranks,
        update: OptimizerStep,
        hooks: StepHooks,
        *,
        warning: str | None = None,
    ) -> None:
        """Take the model in `setup`, and `trained`, which runs it so that gradients are averaged over the ranks."""
        strategy, precision, device = setup.strategy, setup.precision, setup.device
        self._loss_wrappers = setup.loss_wrappers
        self._loss: ComputeLoss = strategy.loss
        for wrapper in reversed(setup.loss_wrappers):
            self._loss = partial(wrapper.loss, self._loss)
        self.task = setup.task
        self.strategy = strategy
        self.device = device
        self.embedding = setup.embedding
        self.update = update
        self.forward = partial(forward, setup.model)
        """Runs the model on this rank alone and without the compiler."""
        self.autocast = partial(precision.autocast, device) if precision.dtype is not None else contextlib.nullcontext
        self.micro_batch_size = setup.settings.micro_batch_size
        """Most events of a micro-batch; None: all of a step."""
        self.warning = warning
        """One sentence when micro-batches were made smaller after running out of memory."""
        self.raises_without_memory = False
        """Whether all ranks raise MemoryShortageError, and do not repeat a step for which one of them has no memory."""
        self._model, self._schema = setup.model, setup.schema
        self._forward_trained: Forward = partial(forward, trained)
        self._classes = setup.schema.label.one_of if strategy.sees_classes else None
        self._fixed = setup.settings.deterministic
        self._learns = strategy.kind.learns_gradient
        self._scaled = precision.scaled and self._learns
        self._attempts = _SCALE_RETRIES if self._scaled else 1
        self._ranks = ranks
        self.fallback = RankFallback(ranks)
        self.snapshots = Snapshots(setup.model, device)
        """From which passes can be undone or retried."""
        self._before_micro_batch = hooks.before_micro_batch
        self.launch_context = hooks.launch_context
        """Returns the context manager under which device work is launched."""
        self.before_wait: Callable[[], object] = bool
        """Called when the work of a step is queued, before the host waits for its numbers."""
        self._passes = 0
        self._transforms = overrides(strategy, "transform_gradients")
        self._resets = overrides(strategy, "reset")
        self._after_step = overrides(strategy, "after_step")
        self._picks = overrides(strategy, "select")
        self._no_graphs = setup.no_graphs
        self.graphs: StepGraphs | None = None
        """Takes steps as CUDA graphs, where it has recorded them."""
        if setup.graphs and self.runs_on_device:
            record = CudaGraphs(device)
            self.graphs = StepGraphs(self.step_on_device, setup.model, self._numbers, record, self._keep)

    def step(self, new: Examples, old: Sequence[Examples], rows: int | None, number: int) -> StepResult:
        """Take step `number`: score the new events, then train on new and old ones.

        Only the first `rows` new events count, or all for None: a rank without new events has one of weight 0.

        The scored predictions come from the forward pass of the gradient: the model has not trained on the events yet,
        and a second pass would cost a third of the step. So dropout is on, if the model has it.

        Raises:
            RaisingEventsError: model or task raises on some of the events; nothing has changed, so that the caller may
                step again without them. Any other error has another cause. With several ranks each rank raises this,
                and names its own events, of which there may be none; ranks that split the model name all new events.
        """
        if self._has_graphs and (results := self.steps(RoundEvents.of_step(new, old), number)) is not None:
            return results[0]
        with self.launch_context():
            events = (new, *old)
            count, *sampled = map(len, events)
            rows = count if rows is None else rows
            if count == 1 and not sum(sampled):
                # Batch norm needs two events: the second is a copy of weight 0.
                new = pad_single(new)
            self._passes = 0
            before = self.snapshots.of_step()
            taken: Attempt | None = None
            while taken is None:
                self.update.begin(number)
                try:
                    taken = self._run_attempts(new, old, rows, before)
                except RankRaisedError as exc:
                    self._ranks.exchange.reset()
                    self._undo_all(before)
                    error, too_large = self.fallback.take_error()
                    if not exc.out_of_memory:
                        self._raise_on_ranks(error, events, before)
                    if self.raises_without_memory:
                        raise MemoryShortageError("a rank ran out of memory in a step", undone=True) from None
                    self._shrink(too_large, error, [count, *sampled])
                except Exception as exc:  # the user's own code may raise anything
                    if self.fallback.able or not may_be_of_events(exc):
                        raise
                    self._raise_named(exc, events, before)
                    raise
            if taken.finite and self._after_step:
                self.strategy.after_step(new, taken.output_B)
            if taken.finite:
                self._record_later(events[0], old, number, taken)
            return taken.result(sampled)

    @property
    def runs_on_device(self) -> bool:
        """Whether steps of one pass need the host for no decision, once the optimizer has its state."""
        reads = self._transforms or self._resets or self._after_step or self._picks or self.embedding is not None
        return self._learns and self.update.decides_on_device and not (self._scaled or reads or self._ranks.size > 1)

    @property
    def without_graphs(self) -> str:
        """One sentence on why steps do not run as CUDA graphs, where a CUDA device could; else empty."""
        refused = None if self.graphs is None else self.graphs.refused
        return self._no_graphs if refused is None else f"steps run without CUDA graphs: {refused}"

    def steps(self, events: RoundEvents, number: int) -> Sequence[StepResult] | None:
        """Take consecutive steps, `number` the first, each by one launch.

        None, and nothing was done, where they have to be taken one by one.
        """
        if self.graphs is None or not all(self._is_one_pass(sizes) for sizes in events.sizes):
            return None
        with self.launch_context():
            return self.graphs.take(events, number, self._before_launch, lambda: self.before_wait())

    def discard_graphs(self) -> None:
        """Record steps again: tensors that a step changes were replaced."""
        if self.graphs is not None:
            self.graphs.discard()

    def step_on_device(self, new: Examples, old: Sequence[Examples]) -> DeviceStep:
        """Take a step of one pass, of which the host neither reads nor decides anything: the update is skipped on the
        device where not all is finite. Only where `runs_on_device`, and once the optimizer has its state."""
        before = self._kept
        before.copy_buffers()
        self.update.gradients.clear()
        for wrapper in self._loss_wrappers:
            new, *old = map(wrapper.weigh, (new, *old))
        attempt = Attempt(len(new), self._step_weights(new, old), before)
        self._measure(attempt, self._forward_backward(new, old, attempt), new)
        numbers = torch.stack([number.float() for number in attempt.numbers])
        skipped = (torch.linalg.vector_norm(numbers[2:], math.inf) < math.inf).logical_not()
        self.update.apply(skip=skipped.float())
        before.restore_buffers_where(skipped)
        self.update.gradients.clear()
        old_R = attempt.old_losses([*map(len, old)])
        return DeviceStep(numbers, attempt.output_B, None if old_R is None else old_R.float())

    @property
    def _has_graphs(self) -> bool:
        return self.graphs is not None and self.graphs.refused is None

    def _is_one_pass(self, sizes: Sequence[int]) -> bool:
        """Return whether the events of a step are one micro-batch, for which batch norm has statistics."""
        return sum(sizes) > 1 and num_parts(sizes, self.micro_batch_size) == 1

    def _before_launch(self) -> None:
        self._passes = 0
        self.before_pass()

    def _numbers(self, number: int) -> Hashable:
        """Set the learning rate of a step, and return all numbers of its update that are not in tensors."""
        groups = self.update.optimizer.param_groups
        self.update.schedule.apply(number, groups)
        given = [(name, value) for group in groups for name, value in group.items() if name != "params"]
        return self.update.gradients.max_norm, *given

    @cached_property
    def _kept(self) -> StepSnapshot:
        """The snapshot whose memory is that of graphs."""
        return self.snapshots.kept()

    def _keep(self) -> Callable[[], object]:
        """Keep what recording a step changes; return what restores it."""
        self._kept.update()

        def restore() -> None:
            self.update.gradients.clear()
            self._kept.restore()

        return restore

    def _record_later(self, new: Examples, old: Sequence[Examples], number: int, taken: Attempt) -> None:
        """Let a step that ran as it is, and was finite, be recorded once its shape has come some times."""
        if not self._has_graphs or not self.update.has_state or not self._is_one_pass([len(new), *map(len, old)]):
            return
        assert self.graphs is not None
        old_R = taken.old_losses([*map(len, old)])
        numbers = torch.empty(len(taken.numbers), device=self.device)
        result = DeviceStep(numbers, taken.output_B, None if old_R is None else old_R.float())
        self.graphs.ran(RoundEvents.of_step(new, old), number, result)

    @property
    def sent_bytes(self) -> int | None:
        """Bytes that this rank has sent to average gradients and other tensors; None: it does not count them."""
        return None if self._ranks.weights.sharded else self._ranks.exchange.sent_bytes

    def before_pass(self) -> None:
        """Let device sharing wait; called before each pass of the model."""
        if self._before_micro_batch is not None:
            self._before_micro_batch(self._passes)
            self._passes += 1

    def _run_attempts(self, new: Examples, old: Sequence[Examples], rows: int, before: StepSnapshot) -> Attempt:
        """Compute the gradient of a step and, if all is finite, update the weights; nothing else is changed.

        Raises:
            RankRaisedError: the model raised on one of the ranks.
        """
        for wrapper in self._loss_wrappers:
            new, *old = map(wrapper.weigh, (new, *old))
        picked = self._pick(new, old, before) if self._picks and any(map(len, old)) else None
        if picked is not None:
            old = [events[indices] for events, indices in zip(old, picked, strict=True)]
            before = before.with_current_rng()
        weights, scaler = self._step_weights(new, old), self.update.scaler
        scale = scaler.value() if self._scaled else 1.0
        for again in range(self._attempts):
            if again:
                self.update.gradients.clear()
                before = before.with_current_rng()
            attempt = self.fitting(partial(self._attempt, new, old, rows, weights, before), [[new, *old]], before)
            self._apply_if_finite(attempt)
            if not attempt.finite:
                before.restore_buffers()
                self.strategy.reset()
                self._ranks.exchange.reset()
            if self._scaled:
                scaler.update()
            if attempt.finite or not math.isfinite(attempt.loss):
                break
        if self._scaled and not attempt.finite:
            # The events caused it, not the scale.
            scaler.update(scale)
        attempt.picked = picked
        return attempt

    def _apply_if_finite(self, attempt: Attempt) -> None:
        """Read back the numbers of a step, over all ranks, and change the weights if they are finite.

        Called by every rank. Where there is no gradient, no weight is changed.

        Raises:
            RankRaisedError: the model raised on one of the ranks.
            SettingsError, MemoryShortageError: see `OptimizerStep.apply`.
        """
        on_device, mark = self._learns and self.update.decides_on_device and self.update.has_state, 0.0
        if not self.fallback.able and attempt.numbers[0].is_cpu and not on_device:
            self.before_wait()
            attempt.score, attempt.loss_new, *deciding = map(Tensor.item, attempt.numbers)
        else:
            # Of the kind of the norm: the scores of some tasks are integers, which are neither infinite nor NaN.
            numbers = *attempt.numbers, attempt.numbers[3].new_full((), self.fallback.mark)
            together = torch.stack([number.float() for number in numbers])
            self._ranks.average_all(together)
            if on_device:
                all_finite = torch.linalg.vector_norm(together[2:], math.inf) < math.inf
                self.update.apply(skip=all_finite.logical_not().float())
            self.before_wait()
            # The one wait for the device in a step: whether it is taken has to be known before the next.
            score, loss_new, *deciding, mark = together.tolist()
            attempt.score, attempt.loss_new = score * self._ranks.size, loss_new * self._ranks.size
        if mark:
            self.fallback.check(mark)
        attempt.loss, norm, *magnitudes = deciding
        attempt.finite = math.isfinite(attempt.loss) and math.isfinite(norm)
        if attempt.finite and not all(map(math.isfinite, magnitudes)):
            # Rare: buffers have lost finite values, or have had others all along.
            attempt.finite, on_device = not self._ranks.any(attempt.before.lost_finite()).item(), False
            if attempt.finite:
                attempt.before.expect_non_finite()
        if attempt.finite and self._learns and not on_device:
            self.update.apply()

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
                self.strategy.reset()
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

    def _present(self, new: Examples) -> Tensor | None:
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
        present = self._present(new)
        return StepWeights(weights[0], weights[1:], None if present is None else self._ranks.any(present))

    def _attempt(
        self, new: Examples, old: Sequence[Examples], rows: int, weights: StepWeights, before: StepSnapshot
    ) -> Attempt:
        """Compute the gradient of the step, transformed by the strategy and clipped, and its numbers."""
        if self._resets:
            self.strategy.reset()
        attempt = Attempt(rows, weights, before)
        total = self._run_parts(new, old, attempt)
        if self._learns:
            if self.fallback.able:
                self._ranks.exchange.count_gradients()
                self.update.end_backward()
            if self._scaled:
                self.update.scaler.unscale_(self.update.optimizer)
            if self._transforms:
                self.strategy.transform_gradients(self.update.scaler.value())
        self._measure(attempt, total, new)
        return attempt

    def _run_parts(self, new: Examples, old: Sequence[Examples], attempt: Attempt) -> Tensor:
        """Add the gradient of all micro-batches, and their outputs to `attempt`; return the loss of the step."""
        totals = list[Tensor]()
        whole = self.micro_batch_size is None
        parts = [(new, list(old))] if whole else micro_batches(new, old, self.micro_batch_size)
        last = max(len(parts), self._ranks.forwards) - 1
        for index, (some_new, some_old) in enumerate(parts):
            self.before_pass()
            with self._ranks.no_sync() if index < last else contextlib.nullcontext():
                totals.append(self._forward_backward(some_new, some_old, attempt))
        for index in range(len(parts), last + 1):
            with self._ranks.no_sync() if index < last else contextlib.nullcontext():
                self._run_idle(new, old, attempt.weights)
        return reduce(torch.add, totals)

    def _run_idle(self, new: Examples, old: Sequence[Examples], weights: StepWeights) -> None:
        """Run a pass of weight 0, which other ranks with more micro-batches need this rank to run."""
        self.before_pass()
        with self.snapshots.taken() as before:
            self._forward_backward(*idle(new, old), Attempt(0, weights, before))
            before.restore_buffers()

    def _forward_backward(self, new: Examples, old: Sequence[Examples], attempt: Attempt) -> Tensor:
        """Add the gradient of a micro-batch to that of the step, and its outputs to `attempt`; return its loss."""
        loss = self._run(lambda new, old: self._pass(new, old, attempt.weights), new, old)
        attempt.output.append(loss.output_B)
        if loss.new_B is not None:
            attempt.new.append(loss.new_B)
        attempt.old.append(loss.old)
        if self.embedding is not None:
            try:
                embedding_N, rows = self.captured(), len(loss.output_B)
                attempt.embedding.append((embedding_N[:rows], embedding_N[rows:]))
            except Exception as exc:  # the user's own code may raise anything
                if not self.fallback.recorded(exc, len(new) + sum(map(len, old))):
                    raise
        return loss.total.detach()

    def _pass(self, new: Examples, old: Sequence[Examples], weights: StepWeights) -> MicroBatchLoss:
        if self.embedding is not None:
            self.embedding.capture_next()
        with self.autocast():
            loss = self._loss(self._forward_trained, new, old, weights)
        if self._learns:
            self.strategy.backward(loss, self.update.scaler.scale)
        return loss

    def _run(
        self, run_pass: Callable[[Examples, Sequence[Examples]], _T], new: Examples, old: Sequence[Examples]
    ) -> _T:
        """Run a pass; where other ranks need this one to go on, with all-zero events in place of those that raise."""
        return self.fallback.run(run_pass, new, old) if self.fallback.able else run_pass(new, old)

    def _measure(self, attempt: Attempt, total: Tensor, new: Examples) -> None:
        """Clip the gradient, and put the numbers of the step into `attempt`, of this rank and on the device."""
        with torch.no_grad():
            norm = self.update.gradients.clip()
            attempt.output_B = _cat(attempt.output)
            score: Tensor | None = None
            if self.fallback.error is None:  # else the step is undone, and its outputs may be of other events
                try:
                    score, loss_new = self._scores_of_new(attempt, new)
                except Exception as exc:  # the user's own code may raise anything
                    if not self.fallback.recorded(exc, attempt.rows):
                        raise
            if score is None:
                score = loss_new = norm.new_zeros(())
            # An overflow can make running statistics non-finite while loss and gradient are finite.
            magnitude = attempt.before.magnitude()
            # Times 0 it is 0 or NaN: finite magnitudes of several ranks may add up to infinity.
            attempt.numbers = [score, loss_new, total, norm, *([] if magnitude is None else [magnitude * 0])]

    def _scores_of_new(self, attempt: Attempt, new: Examples) -> tuple[Tensor, Tensor]:
        """Return the sums of the scores and of the losses of the new events that have a label."""
        rows = attempt.rows
        output_B, label_B = _first(attempt.output_B, rows), _first(new.label_B, rows)
        loss_B = _first(_cat(attempt.new), rows) if attempt.new else self.task.loss(output_B, label_B)
        score_B = self.task.score(output_B, label_B)
        if new.labelled_B is not None:
            labelled_B = new.labelled_B[:rows]
            score_B, loss_B = (torch.where(labelled_B, each, 0) for each in (score_B, loss_B))
        return score_B.sum(), loss_B.sum()

    def _shrink(self, rows: int, error: Exception | None, counts: Sequence[int]) -> None:
        """Halve micro-batches after `rows` events of one ran out of memory on this rank; 0: on another rank."""
        if rows:
            try:
                message = " ".join(str(error).split())
                halve_micro_batch(rows, self.micro_batch_size, self.device, self._ranks.world, message)
            except RankTooLargeError as exc:
                log.error("%s", exc)  # noqa: TRY400 the sentence says all
                self.micro_batch_size, self.warning = exc.rows, str(exc)
        else:
            self.warning = self.warning or "another replica ran out of memory, and runs fewer events at once"
        if self._ranks.weights.sharded:
            # All run as many passes, of the same size, since each pass takes shards of all of them.
            self.micro_batch_size = -self._ranks.most(-(self.micro_batch_size or sys.maxsize))
            self._ranks.forwards = self._ranks.most(num_parts(counts, self.micro_batch_size))

    # Which events the model raises on.

    def _raise_on_ranks(self, error: Exception | None, events: Sequence[Examples], before: StepSnapshot) -> NoReturn:
        """Raise RaisingEventsError after the model raised on some rank; `error`: on this one, None: on another alone.

        A rank that has all weights searches its own events, by itself. Ranks that split the model would have to search
        together, in passes that all of them run: they leave out the whole batch.
        """
        if not self._ranks.weights.sharded:
            if error is None:
                raise RaisingEventsError((), "")
            self._raise_named(error, events, before)
            raise error
        message = "" if error is None else f"{in_one_line(error)}; ranks that split a model leave out all of the step"
        raise RaisingEventsError(range(len(events[0])), message, of_batch=True) from error

    def _raise_named(self, error: Exception, events: Sequence[Examples], before: StepSnapshot) -> None:
        """Undo a step that raised `error`, and find its events that raise, by passes without training.

        Raises:
            RaisingEventsError: names the events.
            Exception: an error that events do not cause.
        """
        traceback.clear_frames(error.__traceback__)  # they reference tensors of the pass
        free_cached_memory(self.device)
        everything = concat(events)
        self._undo_all(before)
        try:
            errors = raising(len(everything), lambda begin, end: self._check(everything[begin:end], before))
            if errors and (len(errors) < len(everything) or self._works_on_zeros(before)):
                raise error_of(errors) from error
        finally:
            self._undo_all(before)

    def _undo_all(self, before: StepSnapshot) -> None:
        """Undo a pass: clear gradients, restore strategy, buffers and random generators."""
        self.strategy.reset()
        self.update.give_up()
        before.restore()

    def _works_on_zeros(self, before: StepSnapshot) -> bool:
        def run(features: Tensors, label_B: Tensor) -> None:
            weight_B = torch.ones(len(label_B), device=self.device)
            self._check(Examples(dict(features), label_B, weight_B), before)

        return works_on_zeros(run, self._schema, self.device)

    def _check(self, events: Examples, before: StepSnapshot) -> None:
        """Run the passes of a step with these new events, and undo them; raises the errors of model and task."""
        padded = pad_single(events) if len(events) == 1 else events
        try:
            with self.snapshots.taken() as now:
                self.fitting(partial(self._try, padded), [[padded]], now)
        finally:
            self._undo_all(before)

    def _try(self, events: Examples) -> None:
        """Compute gradient and score of events as if new, without the compiler; nothing is averaged over ranks."""
        self.update.gradients.clear()
        self.strategy.reset()
        weights = StepWeights(events.weight_B.sum(), [], self._present(events))
        for part in self.parts(events):
            if self.embedding is not None:
                self.embedding.capture_next()
            with self.autocast():
                loss = self.strategy.loss(self.forward, part, [], weights)
            if self._learns:
                self.strategy.backward(loss, self.update.scaler.scale)
            if self.embedding is not None:
                self.captured()
            with torch.no_grad():
                self.task.score(loss.output_B, part.label_B)

    # Scores of old events.

    def probe(self, old: Examples) -> tuple[int, float]:
        """Score old events in evaluation mode, without training on them.

        Waits for the device: the score decides how much the next step replays.

        Returns:
            How many events have a label, and that many times their mean score, weighted by importance.

        Raises:
            RaisingEventsError: model or task raises on some of them.
        """
        with self.launch_context():
            self._passes = 0
            labelled, score, weight = self._scores(old, self.snapshots.of_step())
        mean = score / weight.clamp_min(torch.finfo(torch.float32).tiny)
        rows, mean_score = torch.stack([labelled, mean]).tolist()
        return int(rows), mean_score * rows

    def _scores(self, old: Examples, before: StepSnapshot) -> Tensor:
        """Return the sums of `_scored`, or raise RaisingEventsError with the events on which model or task raises."""

        def scored(part: Examples) -> Tensor:
            self._model.eval()
            try:
                with torch.no_grad(), self.autocast():
                    return self.fitting(partial(self._scored, part), [[part]], before)
            finally:
                self._model.train()

        try:
            return scored(old)
        except Exception as exc:  # the user's own code may raise anything
            if not may_be_of_events(exc):
                raise
            before.restore()
            if errors := raising(len(old), lambda begin, end: scored(old[begin:end])):
                raise error_of(errors) from exc
            raise

    def _scored(self, old: Examples) -> Tensor:
        """Return how many events have a label, the sum of their weighted scores, and the sum of their weights."""
        totals = []
        for part in self.parts(old):
            output_B, weight_B = self.forward(part.features), part.weight_B
            score_B = self.task.score(output_B, part.label_B)
            sums = (weight_B > 0).sum(), (score_B * weight_B).sum(), weight_B.sum()
            totals.append(torch.stack([value.float() for value in sums]))
        return reduce(torch.add, totals)
