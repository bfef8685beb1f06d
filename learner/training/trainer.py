"""One step: test, then train.

Legend: B new events, R replayed ones.
"""

import contextlib
import logging
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from anabranch.core.failures import out_of_memory
from ingest.events.block import Array
from ingest.events.schema import Schema
from learner.config import LearnerSettings
from learner.errors import CheckpointError
from learner.model.device import Precision
from learner.model.embedding import Embeddings
from learner.model.factory import forward, tensor_dtype
from learner.model.faulty_events import RaisingEventsError, error_of, may_be_of_events, raising, works_on_zeros
from learner.model.rng import restore_rng, rng_tensors, rng_values
from learner.model.task import Task
from learner.strategies.base import MicroBatchLoss, StepWeights, Strategy, StrategyContext
from learner.strategies.examples import Examples, Tensors, concat, pad_single
from learner.training.activation_checkpointing import checkpoint_activations
from learner.training.buffers import Buffers, Saved
from learner.training.compile import compiled
from learner.training.host_to_device import Transfer
from learner.training.micro_batches import idle, micro_batches
from learner.training.optimizer_step import OptimizerStep
from learner.training.out_of_memory import RngSnapshot, halve_micro_batch, oom_warning, release
from learner.training.parallelism import Ranks, SingleRank
from learner.training.stand_in import RankRaisedError, StandIn
from learner.training.step_result import StepAccumulator, StepResult, cat, collect_outputs

_PROBES = 3
_SCALE_RETRIES = 16
"""How often fp16 may halve its loss scale within a step before the events themselves are to blame."""

_T = TypeVar("_T")

log = logging.getLogger(__name__)


class Trainer:
    """Owns the model, its optimizer and the loss scaler. Used by one thread."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        strategy: Strategy,
        schema: Schema,
        settings: LearnerSettings,
        device: torch.device,
        precision: Precision,
        embedding: Embeddings | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model.train()
        self.task = task
        self.device = device
        self.strategy = strategy
        self.micro_batch_size = settings.micro_batch_size
        """Events of a micro-batch; None: all of a step at once. May change between steps."""
        self.yield_to_serving: Callable[[int], None] | None = None
        """Called before each micro-batch of a pass, with its index; may wait."""
        self.lane: LaunchContext = contextlib.nullcontext
        """Context manager under which a step launches device work."""
        self.warning: str | None = None
        """One sentence when micro-batches were made smaller after running out of memory."""
        self._transfer = Transfer(device)
        self._fixed = settings.deterministic
        self._steps = 0
        self._embedding = embedding
        self._schema = schema
        self._features = [feature.name for feature in schema.features]
        self._classes = schema.label.one_of
        self._precision = precision
        self._buffers = Buffers(model)
        self._ranks = ranks or SingleRank()
        self._stand_in = StandIn(self._ranks)
        self._ranks.weights.split(model)
        self.update = OptimizerStep(settings, model, precision, device, self._ranks)
        checkpoint_activations(self.model, settings.activation_checkpointing)
        self._trained = self._ranks.wrap(self.model)
        if settings.compile:
            self._trained = compiled(self._trained, schema, device, precision, self._ranks)
        strategy.setup(
            StrategyContext(
                model=model,
                task=task,
                reduce=self._stand_in.average,
                rate=self.update.rate,
                parts=self._parts,
                probe=_probe(schema, device),
                embed=None if embedding is None else self._embed,
                ranks=self._ranks.size,
            )
        )

    def examples(self, columns: Mapping[str, Array]) -> Examples:
        """Return the columns of B labelled events as tensors on the device."""
        return Examples(
            {name: self._transfer(columns[f"feature.{name}"]) for name in self._features},
            self._transfer(columns["label"]),
            self._transfer(columns["weight"]),
        )

    def probe(self, old: Examples) -> tuple[int, float]:
        """Score old events in evaluation mode, without training on them.

        Waits for the device: the score decides how much the next step replays.

        Returns:
            How many events have a label, and that many times their mean score, weighted by importance.

        Raises:
            RaisingEventsError: model or task raises on some of them.
        """
        before, rng = self._buffers.saved(), RngSnapshot(self.device)

        def scored(part: Examples) -> Tensor:
            self.model.eval()
            try:
                with torch.no_grad(), self._precision.autocast(self.device):
                    return self._fitting(lambda: self._scored(part), len(part), before, rng)
            finally:
                self.model.train()

        try:
            labelled, score, weight = scored(old)
        except Exception as exc:  # the user's own code may raise anything
            if not may_be_of_events(exc):
                raise
            self._buffers.put_back(before)
            rng.put_back()
            if found := raising(len(old), lambda begin, end: scored(old[begin:end])):
                raise error_of(found) from exc
            raise
        mean = score / weight.clamp_min(torch.finfo(torch.float32).tiny)
        rows, mean_score = torch.stack([labelled, mean]).tolist()
        return int(rows), mean_score * rows

    def _scored(self, old: Examples) -> Tensor:
        """Return how many events have a label, the sum of their weighted scores, and the sum of their weights."""
        totals = []
        for part in self._parts(old):
            score_B, weight_B = self.task.score(forward(self.model, part.features), part.label_B), part.weight_B
            sums = (weight_B > 0).sum(), (score_B * weight_B).sum(), weight_B.sum()
            totals.append(torch.stack([each.float() for each in sums]))
        return reduce(torch.add, totals)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the config's learning rate by a factor, from the next step on."""
        self.update.schedule.scale = factor

    def step(self, new: Examples, old: Sequence[Examples] = (), rows: int | None = None) -> StepResult:
        """Score the new events, then train on new and old.

        Only the first `rows` new events count, or all for None: a rank without new events has one of weight 0.

        The scored predictions come from the forward pass of the gradient: the model has not trained on the events yet,
        and a second pass would cost a third of the step. So dropout is on, if the model has it.

        Raises:
            RaisingEventsError: model or task raises on some of the events; nothing has changed, so that the caller may
                step again without them. Any other error has another cause. With several ranks each rank raises this,
                and names its own events, of which there may be none.
        """
        with self.lane():
            return self._step(new, old, rows)

    def _step(self, new: Examples, old: Sequence[Examples], rows: int | None) -> StepResult:
        rows, sampled = len(new) if rows is None else rows, [len(each) for each in old]
        given = new, *old
        if len(new) == 1 and not sum(sampled):
            # Batch norm needs two events: the second is a copy of weight 0.
            new = pad_single(new)
        self.update.begin(self._steps)
        before, rng = self._buffers.saved(), RngSnapshot(self.device)
        self._stand_in.begin()
        try:
            passed = self._passes(new, old, rows, before, rng)
        except RankRaisedError as exc:
            self._ranks.reset_comm_state()
            self._undo(before, rng)
            error = self._stand_in.error
            if error is None:
                raise RaisingEventsError((), "") from exc
            self._name_events(error, given, before, rng)
            raise error from None
        except Exception as exc:  # the user's own code may raise anything
            if self._ranks.size > 1 or not may_be_of_events(exc):
                raise
            self._name_events(exc, given, before, rng)
            raise
        accumulated, picked, finite, (total, score, loss_new) = passed
        self._steps += 1
        output_B = cat(accumulated.output)
        if finite:
            self.strategy.after_step(new, output_B)
        old_R, embedding_N = collect_outputs(accumulated, sampled, picked, rows)
        replayed = sum(sampled) if picked is None else sum(map(len, picked))
        return StepResult(finite, total, score, loss_new, old_R, embedding_N, output_B[:rows], replayed)

    def _passes(
        self, new: Examples, old: Sequence[Examples], rows: int, before: Saved, rng: RngSnapshot
    ) -> tuple[StepAccumulator, Sequence[Tensor] | None, bool, tuple[float, float, float]]:
        """Compute the gradient of a step and, if all is finite, update the weights; nothing else is changed.

        Returns:
            The outputs of the micro-batches, the indices of picked old events, whether all is finite, and three
            numbers: the loss of the step, the score and the loss of the new events.
        """
        picked = self._pick(new, old, before, rng)
        if picked is not None:
            old, rng = [each[places] for each, places in zip(old, picked, strict=True)], RngSnapshot(self.device)
        taken, whole = old, self._step_weights(new, old)
        scaler = self.update.scaler
        # With fp16 this waits for the device. The scale before the step shows whether it caused an overflow.
        scale, scaled = scaler.get_scale(), self._precision.scaled and self.strategy.learns_gradient
        for attempt in range(_SCALE_RETRIES if scaled else 1):
            rng = RngSnapshot(self.device) if attempt else rng
            backward = lambda: self._backward(new, taken, whole)  # noqa: E731
            accumulated = self._fitting(backward, len(new) + sum(map(len, taken)), before, rng)
            total, norm, spoiled, score, loss_new = self._numbers(accumulated, new, rows, before)
            finite = math.isfinite(total) and math.isfinite(norm) and not spoiled
            if not finite:
                self._buffers.put_back(before)
                self._ranks.reset_comm_state()
            elif self.strategy.learns_gradient:
                self.update.apply()
            if scaled:
                self.update.rescale()
            if finite or not math.isfinite(total):
                break
        if not finite and scaled:
            # The events caused it, not the scale.
            self.update.rescale(scale)
        return accumulated, picked, finite, (total, score, loss_new)

    def _name_events(self, error: Exception, given: Sequence[Examples], before: Saved, rng: RngSnapshot) -> None:
        """Undo a step that raised, and find the events that raise, by passes over parts of it without training.

        Raises:
            RaisingEventsError: names the events.
            Exception: no part raises, or all raise and so do all-zero events: the events are not the cause.
        """
        traceback.clear_frames(error.__traceback__)  # they reference tensors of the pass
        release(self.device)
        everything = concat(given)

        def learn(events: Examples) -> None:
            try:
                self._try(pad_single(events) if len(events) == 1 else events)
            finally:
                self._undo(before, rng)

        def learn_zeros(features: Tensors, label_B: Tensor) -> None:
            learn(Examples(dict(features), label_B, torch.ones(len(label_B), device=self.device)))

        self._undo(before, rng)
        found = raising(len(everything), lambda begin, end: learn(everything[begin:end]))
        if found and (len(found) < len(everything) or works_on_zeros(learn_zeros, self._schema, self.device)):
            raise error_of(found) from error

    def _undo(self, before: Saved, rng: RngSnapshot) -> None:
        """Undo a pass: clear gradients, restore buffers and random generators."""
        self.update.give_up()
        self._buffers.put_back(before)
        rng.put_back()

    def _try(self, events: Examples) -> None:
        """Compute gradient and score of events as if new, on this rank alone and without the compiler."""

        def backward() -> None:
            self.update.gradients.clear()
            self.strategy.on_step_start()
            weight, present = events.weight_B.sum(), self._present(events)
            for part in self._parts(events):
                if self._embedding is not None:
                    self._embedding.capture_next()
                with self._precision.autocast(self.device):
                    loss = self.strategy.loss(
                        lambda features: forward(self.model, features), part, [], StepWeights(weight, [], present)
                    )
                if self.strategy.learns_gradient:
                    self.strategy.backward(loss, self.update.scaler.scale)
                if self._embedding is not None:
                    self._embedding.captured()
                with torch.no_grad():
                    self.task.score(loss.output_B, part.label_B)

        self._fitting(backward, len(events), self._buffers.saved(), RngSnapshot(self.device))

    def _pick(self, new: Examples, old: Sequence[Examples], before: Saved, rng: RngSnapshot) -> Sequence[Tensor] | None:
        """Let the strategy pick among the old events; the model is unchanged afterwards."""
        if not self.strategy.picks or not any(map(len, old)):
            return None

        def pick(new: Examples, old: Sequence[Examples]) -> Sequence[Tensor] | None:
            with self._precision.autocast(self.device):
                return self.strategy.select(lambda features: forward(self.model, features), new, old)

        picked = self._fitting(lambda: self._stand_in.run(pick, new, old), max(map(len, (new, *old))), before, rng)
        if picked is not None:
            self._buffers.put_back(before)
        return picked

    def _step_weights(self, new: Examples, old: Sequence[Examples]) -> StepWeights:
        """Return the event weights of a step, averaged over all ranks."""
        weights = [each.weight_B.sum() for each in (new, *old)]
        if self._ranks.size > 1:
            together = torch.stack(weights)
            self._ranks.average([together])
            weights = list(together)
        present = self._present(new)
        return StepWeights(weights[0], weights[1:], None if present is None else self._ranks.any(present))

    def _present(self, new: Examples) -> Tensor | None:
        """Return which classes are among this rank's new events, bool `[C]`; None where the strategy needs none."""
        if self._classes is None or not self.strategy.sees_classes:
            return None
        # One extra entry takes the labels of weight 0: to filter them would be to wait for the device.
        present = torch.zeros(self._classes + 1, dtype=torch.bool, device=self.device)
        present.index_fill_(0, torch.where(new.weight_B > 0, new.label_B, self._classes), True)
        return present[: self._classes]

    def _fitting(self, passes: Callable[[], _T], rows: int, before: Saved, rng: RngSnapshot) -> _T:
        """Run passes of at most `rows` events; if memory runs out, restart them with smaller micro-batches.

        The strategy restores the weights when one of its passes fails. `rng` is the state before the passes.
        """
        while True:
            try:
                return passes()
            except RuntimeError as exc:
                if not out_of_memory(exc) or self._fixed:
                    raise
                said = " ".join(str(exc).split())
            # After the handler, since the error references tensors of the pass.
            self.update.give_up()
            release(self.device)
            self.micro_batch_size = halve_micro_batch(rows, self.micro_batch_size, self.device, self._ranks.size, said)
            self.warning = oom_warning(self.device, self.micro_batch_size)
            self._buffers.put_back(before)
            rng.put_back()

    def on_drift(self) -> None:
        """Apply a change of the stream: restart the schedule where `restart` says so, and consolidate the strategy."""
        self.update.schedule.on_drift(self._steps)
        self.strategy.on_drift()

    def _backward(self, new: Examples, old: Sequence[Examples], whole: StepWeights) -> StepAccumulator:
        """Compute the gradient of the whole step, transformed by the strategy."""
        self.update.gradients.clear()
        self.strategy.on_step_start()
        accumulated = StepAccumulator()
        parts = micro_batches(new, old, self.micro_batch_size)
        forwards = self._ranks.weights.num_forwards(len(parts))
        for index, (some_new, some_old) in enumerate(parts):
            if self.yield_to_serving is not None:
                self.yield_to_serving(index)
            with self._ranks.no_sync() if index < len(parts) - 1 else contextlib.nullcontext():
                self._learn(some_new, some_old, whole, accumulated)
        for _ in range(len(parts), forwards):
            before = self._buffers.saved()
            self._learn(*idle(new, old), whole, StepAccumulator())
            self._buffers.put_back(before)
        if self.strategy.learns_gradient:
            self.update.unscale()
            self.strategy.transform_gradients(self.update.scaler.get_scale())
        return accumulated

    def _learn(self, new: Examples, old: Sequence[Examples], whole: StepWeights, accumulated: StepAccumulator) -> None:
        def run(new: Examples, old: Sequence[Examples]) -> MicroBatchLoss:
            if self._embedding is not None:
                self._embedding.capture_next()
            with self._precision.autocast(self.device):
                loss = self.strategy.loss(lambda features: forward(self._trained, features), new, old, whole)
            if self.strategy.learns_gradient:
                self.strategy.backward(loss, self.update.scaler.scale)
            return loss

        loss = self._stand_in.run(run, new, old)
        embedding_N: Tensor | None = None
        if self._embedding is not None:
            try:
                embedding_N = self._embedding.captured()
            except Exception as exc:  # the user's own code may raise anything
                if not self._stand_in.recorded(exc):
                    raise
        accumulated.add(loss, embedding_N)

    def _numbers(
        self, accumulated: StepAccumulator, new: Examples, rows: int, before: Saved
    ) -> tuple[float, float, bool, float, float]:
        """Clip the gradient, and read back the numbers that settle the step.

        Returns:
            The loss, the gradient's norm, whether running statistics that were finite `before` no longer are (an
            overflow can spoil them while loss and gradient are finite), score and loss of the first `rows` events;
            over all ranks.

        Raises:
            RankRaisedError: the model raised on one of them.
        """
        norm = self.update.gradients.clip()
        with torch.no_grad():
            output_B, label_B = cat(accumulated.output)[:rows], new.label_B[:rows]
            try:
                loss_B = cat(accumulated.new)[:rows] if accumulated.new else self.task.loss(output_B, label_B)
                score, loss_new = self.task.score(output_B, label_B).sum(), loss_B.sum()
            except Exception as exc:  # the user's own code may raise anything
                if not self._stand_in.recorded(exc):
                    raise
                score = loss_new = norm.new_zeros(())
            numbers = [reduce(torch.add, accumulated.total), norm, score, loss_new, *self._buffers.spoiled(before)]
            if self._ranks.size == 1 and self.device.type == "cpu":
                total_, norm_, score_, loss_, *spoiled = [each.item() for each in numbers]
                return total_, norm_, any(spoiled), score_, loss_
            numbers.append(norm.new_full((), self._stand_in.error is not None))
            together = torch.stack([each.float() for each in numbers])
            self._ranks.average([together])
            # The one wait for the device in a step: whether its events were learned is settled before the next.
            total_, norm_, score_, loss_, *spoiled, raised = together.tolist()
        if raised:
            raise RankRaisedError
        return total_, norm_, any(spoiled), score_ * self._ranks.size, loss_ * self._ranks.size

    def snapshot(self) -> dict[str, Tensor]:
        """Copy the weights and buffers as they are now, on the device; later steps do not change the copy."""
        return self._ranks.weights.full_copy(self.model.state_dict())

    def optimizer_state(self) -> dict[str, Tensor]:
        """Copy the optimizer's tensors, on the device; later steps do not change the copy."""
        return self.update.optimizer_state()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Copy the tensors of model, optimizer and strategy on the device, for a checkpoint."""
        strategy = self.strategy.tensors()
        tensors = {"model": self.snapshot(), "optimizer": self.optimizer_state()}
        return tensors | ({"strategy": strategy} if strategy else {})

    def state(self) -> dict[str, Any]:
        """Return the state of optimizer, scaler and strategy besides tensors, as JSON values, for a checkpoint."""
        strategy = {"class": type(self.strategy).__name__, **self.strategy.state()}
        return {**self.update.state(self._steps), "strategy": strategy}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Restore the weights and the optimizer of a checkpoint.

        Settings of the optimizer, such as the learning rate, stay those of the config, so that the user's changes
        between two starts apply.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer.
        """
        try:
            self.model.load_state_dict(self._ranks.weights.shard_like(tensors["model"], self.model.state_dict()))
            self._steps = self.update.restore(tensors["optimizer"], state)
            self._restore_strategy(tensors.get("strategy", {}), state.get("strategy", {}))
        except (RuntimeError, KeyError, ValueError) as exc:
            if isinstance(exc, RuntimeError) and out_of_memory(exc):
                raise
            raise CheckpointError(
                "the newest checkpoint does not fit the model or optimizer of the config; put those back, or begin "
                "anew by "
                f"moving the checkpoints away: {_first_clause(exc)}"
            ) from exc

    def generators(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the states of all random generators, as tensors and as JSON values, for a checkpoint."""
        return rng_tensors(), rng_values()

    def restore_generators(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the states of all random generators; called after `restore`."""
        restore_rng(tensors, values)

    def _restore_strategy(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Restore the strategy, unless the checkpoint is of another strategy."""
        now, before = type(self.strategy).__name__, state.get("class")
        if before == now:
            self.strategy.restore(tensors, state)
        elif before is not None:
            log.info("the checkpoint was made under the strategy %s: %s begins with nothing of its own", before, now)

    def _embed(self, features: Tensors) -> tuple[Tensor, Tensor]:
        """Return the embeddings of events and the model's output."""
        assert self._embedding is not None
        self._embedding.capture_next()
        output = forward(self.model, features)
        return self._embedding.captured(), output

    def _parts(self, examples: Examples) -> list[Examples]:
        return [part for part, _ in micro_batches(examples, (), self.micro_batch_size)]


def _first_clause(error: Exception) -> str:
    """Return the first item of torch's error message, which lists one per line below a headline."""
    headline, *clauses = str(error).splitlines() or [""]
    return (clauses[0] if clauses else headline).strip()


def _probe(schema: Schema, device: torch.device) -> dict[str, Tensor]:
    """Return features of a few made-up events, which differ where their dtype allows."""
    generator = torch.Generator().manual_seed(0)
    features = {}
    for feature in schema.features:
        dtype, shape = tensor_dtype(feature.dtype.name), (_PROBES, *feature.shape)
        noise = torch.randn(shape, generator=generator) if dtype.is_floating_point else torch.zeros(shape)
        features[feature.name] = noise.to(device, dtype)
    return features


LaunchContext = Callable[[], contextlib.AbstractContextManager[object]]
"""Returns the context manager under which device work is launched."""
