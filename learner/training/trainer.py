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
from learner.training.step_result import StepAccumulator, StepResult, cat, dealt

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
        self.give_way: Callable[[int], None] | None = None
        """Called before each micro-batch of a pass, with its place there; may take its time."""
        self.lane: LaunchContext = contextlib.nullcontext
        """What a step gives the device is given in it."""
        self.warning: str | None = None
        """One sentence when micro-batches were made smaller for want of memory."""
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
                *(model, task, self._stand_in.average, self.update.rate, self._parts, _probe(schema, device)),
                None if embedding is None else self._embed,
                self._ranks.size,
            )
        )

    def examples(self, columns: Mapping[str, Array]) -> Examples:
        """Move the columns of B labelled events to the device."""
        return Examples(
            {name: self._transfer(columns[f"feature.{name}"]) for name in self._features},
            self._transfer(columns["label"]),
            self._transfer(columns["weight"]),
        )

    def probe(self, old: Examples) -> tuple[int, float]:
        """Score old events in evaluation mode; nothing is learned from them.

        Waits for the device: how much is forgotten decides how much the next step replays.

        Returns:
            How many have a label, and so many times their mean score, each counted by its importance.

        Raises:
            RaisingEventsError: model or task raises on some of them.
        """
        before, dice = self._buffers.saved(), RngSnapshot(self.device)

        def scored(part: Examples) -> Tensor:
            self.model.eval()
            try:
                with torch.no_grad(), self._precision.autocast(self.device):
                    return self._fitting(lambda: self._scored(part), len(part), before, dice)
            finally:
                self.model.train()

        try:
            labelled, score, weight = scored(old)
        except Exception as exc:  # the user's own code may raise anything
            if not may_be_of_events(exc):
                raise
            self._buffers.put_back(before)
            dice.put_back()
            if found := raising(len(old), lambda begin, end: scored(old[begin:end])):
                raise error_of(found) from exc
            raise
        mean = score / weight.clamp_min(torch.finfo(torch.float32).tiny)
        rows, mean_score = torch.stack([labelled, mean]).tolist()
        return int(rows), mean_score * rows

    def _scored(self, old: Examples) -> Tensor:
        """Return how many events have a label, the sum of their weighted scores, and that of their weights."""
        found = []
        for part in self._parts(old):
            score_B, weight_B = self.task.score(forward(self.model, part.features), part.label_B), part.weight_B
            sums = (weight_B > 0).sum(), (score_B * weight_B).sum(), weight_B.sum()
            found.append(torch.stack([each.float() for each in sums]))
        return reduce(torch.add, found)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the config's learning rate by a factor, from the next step on."""
        self.update.schedule.scale = factor

    def step(self, new: Examples, old: Sequence[Examples] = (), rows: int | None = None) -> StepResult:
        """Score the new events, then train on new and old.

        Of the new ones only the first `rows` count, None being all: a rank without new events has one of no weight.

        The predictions that are scored are those of the forward pass that the gradient comes from: the model has not
        seen the events before it, and a second pass would cost a third of the step. So dropout, where the model has
        it, is on.

        Raises:
            RaisingEventsError: model or task raises on some of the events; nothing has changed, so that the caller may
                step again without them. Any other error that they raise is none of these events'. Of several ranks
                each raises this, and names those of its own, which may be none.
        """
        with self.lane():
            return self._step(new, old, rows)

    def _step(self, new: Examples, old: Sequence[Examples], rows: int | None) -> StepResult:
        rows, sampled = len(new) if rows is None else rows, [len(each) for each in old]
        given = new, *old
        if len(new) == 1 and not sum(sampled):
            # Batch norm needs two: the event stands for another one of no weight.
            new = pad_single(new)
        self.update.begin(self._steps)
        before, dice = self._buffers.saved(), RngSnapshot(self.device)
        self._stand_in.begin()
        try:
            found = self._passes(new, old, rows, before, dice)
        except RankRaisedError as exc:
            self._ranks.start_afresh()
            self._undo(before, dice)
            error = self._stand_in.error
            if error is None:
                raise RaisingEventsError((), "") from exc
            self._name_events(error, given, before, dice)
            raise error from None
        except Exception as exc:  # the user's own code may raise anything
            if self._ranks.size > 1 or not may_be_of_events(exc):
                raise
            self._name_events(exc, given, before, dice)
            raise
        heard, picked, finite, (total, score, loss_new) = found
        self._steps += 1
        output_B = cat(heard.output)
        if finite:
            self.strategy.after_step(new, output_B)
        old_R, embedding_N = dealt(heard, sampled, picked, rows)
        replayed = sum(sampled) if picked is None else sum(map(len, picked))
        return StepResult(finite, total, score, loss_new, old_R, embedding_N, output_B[:rows], replayed)

    def _passes(
        self, new: Examples, old: Sequence[Examples], rows: int, before: Saved, dice: RngSnapshot
    ) -> tuple[StepAccumulator, Sequence[Tensor] | None, bool, tuple[float, float, float]]:
        """Compute the gradient of a step and, if all is finite, change the weights; nothing else of it lasts.

        Returns:
            What the micro-batches said, which old events were picked, whether all is finite, and the loss of the step,
            the score and the loss of the new events.
        """
        picked = self._pick(new, old, before, dice)
        if picked is not None:
            old, dice = [each[places] for each, places in zip(old, picked, strict=True)], RngSnapshot(self.device)
        taken, whole = old, self._whole(new, old)
        scaler = self.update.scaler
        # fp16 waits for the device here and where scaled: the scale before says what an overflow is to be blamed on.
        scale, scaled = scaler.get_scale(), self._precision.scaled and self.strategy.learns_gradient
        for attempt in range(_SCALE_RETRIES if scaled else 1):
            dice = RngSnapshot(self.device) if attempt else dice
            backward = lambda: self._backward(new, taken, whole)  # noqa: E731
            heard = self._fitting(backward, len(new) + sum(map(len, taken)), before, dice)
            total, norm, spoiled, score, loss_new = self._numbers(heard, new, rows, before)
            finite = math.isfinite(total) and math.isfinite(norm) and not spoiled
            if not finite:
                self._buffers.put_back(before)
                self._ranks.start_afresh()
            elif self.strategy.learns_gradient:
                self.update.apply()
            if scaled:
                self.update.rescale()
            if finite or not math.isfinite(total):
                break
        if not finite and scaled:
            # The events are to blame, not the scale.
            self.update.rescale(scale)
        return heard, picked, finite, (total, score, loss_new)

    def _name_events(self, error: Exception, given: Sequence[Examples], before: Saved, dice: RngSnapshot) -> None:
        """Undo a step that raised, and find the events that raise, by passes of parts of it that learn nothing.

        Raises:
            RaisingEventsError: these are the events.
            Exception: they raise in none of these passes, or all do and so do events of zeros: it is not the events.
        """
        traceback.clear_frames(error.__traceback__)  # which hold on to what the pass had made
        release(self.device)
        everything = concat(given)

        def learn(events: Examples) -> None:
            try:
                self._try(pad_single(events) if len(events) == 1 else events)
            finally:
                self._undo(before, dice)

        def learn_zeros(features: Tensors, label_B: Tensor) -> None:
            learn(Examples(dict(features), label_B, torch.ones(len(label_B), device=self.device)))

        self._undo(before, dice)
        found = raising(len(everything), lambda begin, end: learn(everything[begin:end]))
        if found and (len(found) < len(everything) or works_on_zeros(learn_zeros, self._schema, self.device)):
            raise error_of(found) from error

    def _undo(self, before: Saved, dice: RngSnapshot) -> None:
        """Leave no trace of a pass."""
        self.update.give_up()
        self._buffers.put_back(before)
        dice.put_back()

    def _try(self, events: Examples) -> None:
        """Compute the gradient and the score of events, as of new ones, on this rank alone and without the compiler."""

        def backward() -> None:
            self.update.gradients.clear()
            self.strategy.on_step_start()
            weight, present = events.weight_B.sum(), self._present(events)
            for part in self._parts(events):
                if self._embedding is not None:
                    self._embedding.listen()
                with self._precision.autocast(self.device):
                    loss = self.strategy.loss(
                        lambda features: forward(self.model, features), part, [], StepWeights(weight, [], present)
                    )
                if self.strategy.learns_gradient:
                    self.strategy.backward(loss, self.update.scaler.scale)
                if self._embedding is not None:
                    self._embedding.heard()
                with torch.no_grad():
                    self.task.score(loss.output_B, part.label_B)

        self._fitting(backward, len(events), self._buffers.saved(), RngSnapshot(self.device))

    def _pick(
        self, new: Examples, old: Sequence[Examples], before: Saved, dice: RngSnapshot
    ) -> Sequence[Tensor] | None:
        """Let the strategy choose among the old events, which leaves the model as it was."""
        if not self.strategy.picks or not any(map(len, old)):
            return None

        def pick(new: Examples, old: Sequence[Examples]) -> Sequence[Tensor] | None:
            with self._precision.autocast(self.device):
                return self.strategy.select(lambda features: forward(self.model, features), new, old)

        picked = self._fitting(lambda: self._stand_in.instead(pick, new, old), max(map(len, (new, *old))), before, dice)
        if picked is not None:
            self._buffers.put_back(before)
        return picked

    def _whole(self, new: Examples, old: Sequence[Examples]) -> StepWeights:
        """Add up the weights of all ranks."""
        weights = [each.weight_B.sum() for each in (new, *old)]
        if self._ranks.size > 1:
            together = torch.stack(weights)
            self._ranks.average([together])
            weights = list(together)
        present = self._present(new)
        return StepWeights(weights[0], weights[1:], None if present is None else self._ranks.any(present))

    def _present(self, new: Examples) -> Tensor | None:
        """Return which classes are among new events of this rank, bool `[C]`, where the strategy looks at that."""
        if self._classes is None or not self.strategy.sees_classes:
            return None
        # One place more takes the labels that do not count: to leave them out would be to wait for the device.
        found = torch.zeros(self._classes + 1, dtype=torch.bool, device=self.device)
        found.index_fill_(0, torch.where(new.weight_B > 0, new.label_B, self._classes), True)
        return found[: self._classes]

    def _fitting(self, passes: Callable[[], _T], rows: int, before: Saved, dice: RngSnapshot) -> _T:
        """Run passes of at most so many rows, in smaller micro-batches where memory runs out, as if so from the start.

        The strategy leaves the weights as they were when one of its passes fails. `dice` are those before it.
        """
        while True:
            try:
                return passes()
            except RuntimeError as exc:
                if not out_of_memory(exc) or self._fixed:
                    raise
                said = " ".join(str(exc).split())
            # Past the handler, since the error holds on to what the pass had made.
            self.update.give_up()
            release(self.device)
            self.micro_batch_size = halve_micro_batch(rows, self.micro_batch_size, self.device, self._ranks.size, said)
            self.warning = oom_warning(self.device, self.micro_batch_size)
            self._buffers.put_back(before)
            dice.put_back()

    def on_drift(self) -> None:
        """Hear that the stream has changed: the learning rate begins again where the schedule says so, and a strategy
        that looks back from time to time does so now.
        """
        self.update.schedule.on_drift(self._steps)
        self.strategy.on_drift()

    def _backward(self, new: Examples, old: Sequence[Examples], whole: StepWeights) -> StepAccumulator:
        """Compute the gradient of the whole step, as the strategy wants it."""
        self.update.gradients.clear()
        self.strategy.on_step_start()
        heard = StepAccumulator()
        parts = micro_batches(new, old, self.micro_batch_size)
        rounds = self._ranks.weights.rounds(len(parts))
        for place, (some_new, some_old) in enumerate(parts):
            if self.give_way is not None:
                self.give_way(place)
            with self._ranks.apart() if place < len(parts) - 1 else contextlib.nullcontext():
                self._learn(some_new, some_old, whole, heard)
        for _ in range(len(parts), rounds):
            before = self._buffers.saved()
            self._learn(*idle(new, old), whole, StepAccumulator())
            self._buffers.put_back(before)
        if self.strategy.learns_gradient:
            self.update.unscale()
            self.strategy.transform_gradients(self.update.scaler.get_scale())
        return heard

    def _learn(self, new: Examples, old: Sequence[Examples], whole: StepWeights, heard: StepAccumulator) -> None:
        def run(new: Examples, old: Sequence[Examples]) -> MicroBatchLoss:
            if self._embedding is not None:
                self._embedding.listen()
            with self._precision.autocast(self.device):
                loss = self.strategy.loss(lambda features: forward(self._trained, features), new, old, whole)
            if self.strategy.learns_gradient:
                self.strategy.backward(loss, self.update.scaler.scale)
            return loss

        loss = self._stand_in.instead(run, new, old)
        embedding_N: Tensor | None = None
        if self._embedding is not None:
            try:
                embedding_N = self._embedding.heard()
            except Exception as exc:  # the user's own code may raise anything
                if not self._stand_in.noted(exc):
                    raise
        heard.add(loss, embedding_N)

    def _numbers(
        self, heard: StepAccumulator, new: Examples, rows: int, before: Saved
    ) -> tuple[float, float, bool, float, float]:
        """Clip the gradient, and read back what settles the step.

        Returns:
            The loss, the gradient's norm, whether running statistics that were finite `before` no longer are (an
            overflow can spoil them while loss and gradient look well), score and loss of the first `rows` events; of
            all ranks.

        Raises:
            RankRaisedError: the model raised on one of them.
        """
        norm = self.update.gradients.clip()
        with torch.no_grad():
            output_B, label_B = cat(heard.output)[:rows], new.label_B[:rows]
            try:
                loss_B = cat(heard.new)[:rows] if heard.new else self.task.loss(output_B, label_B)
                score, loss_new = self.task.score(output_B, label_B).sum(), loss_B.sum()
            except Exception as exc:  # the user's own code may raise anything
                if not self._stand_in.noted(exc):
                    raise
                score = loss_new = norm.new_zeros(())
            told = [reduce(torch.add, heard.total), norm, score, loss_new, *self._buffers.spoiled(before)]
            if self._ranks.size == 1 and self.device.type == "cpu":
                total_, norm_, score_, loss_, *spoiled = [each.item() for each in told]
                return total_, norm_, any(spoiled), score_, loss_
            told.append(norm.new_full((), self._stand_in.error is not None))
            together = torch.stack([each.float() for each in told])
            self._ranks.average([together])
            # The one wait for the device in a step: whether its events were learned is settled before the next.
            total_, norm_, score_, loss_, *spoiled, raised = together.tolist()
        if raised:
            raise RankRaisedError
        return total_, norm_, any(spoiled), score_ * self._ranks.size, loss_ * self._ranks.size

    def snapshot(self) -> dict[str, Tensor]:
        """Copy the weights and buffers as they are now, on the device; later steps do not change the copy."""
        return self._ranks.weights.whole(self.model.state_dict())

    def optimizer_state(self) -> dict[str, Tensor]:
        """Copy the optimizer's tensors likewise."""
        return self.update.optimizer_state()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Weights and the optimizer's tensors, copied on the device, for a checkpoint."""
        strategy = self.strategy.tensors()
        found = {"model": self.snapshot(), "optimizer": self.optimizer_state()}
        return found | ({"strategy": strategy} if strategy else {})

    def state(self) -> dict[str, Any]:
        """What optimizer and scaler have beside tensors, as JSON values, for a checkpoint."""
        strategy = {"class": type(self.strategy).__name__, **self.strategy.state()}
        return {**self.update.state(self._steps), "strategy": strategy}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Take up the weights and the optimizer of a checkpoint.

        The settings of the optimizer (learning rate and so on) stay those of the config: what the user changed between
        two starts is to hold.

        Raises:
            CheckpointError: they are of another model or optimizer.
        """
        try:
            self.model.load_state_dict(self._ranks.weights.mine(tensors["model"], self.model.state_dict()))
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
        """Put all random generators back, after `restore`."""
        restore_rng(tensors, values)

    def _restore_strategy(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Let the strategy go on, unless the checkpoint is of another, which says nothing to this one."""
        now, before = type(self.strategy).__name__, state.get("class")
        if before == now:
            self.strategy.restore(tensors, state)
        elif before is not None:
            log.info("the checkpoint was made under the strategy %s: %s begins with nothing of its own", before, now)

    def _embed(self, features: Tensors) -> tuple[Tensor, Tensor]:
        """Return the embeddings of events, by the module that is named, and the model's output."""
        assert self._embedding is not None
        self._embedding.listen()
        output = forward(self.model, features)
        return self._embedding.heard(), output

    def _parts(self, examples: Examples) -> list[Examples]:
        return [part for part, _ in micro_batches(examples, (), self.micro_batch_size)]


def _first_clause(error: Exception) -> str:
    """Return the first of what torch lists a line each, below a headline."""
    headline, *clauses = str(error).splitlines() or [""]
    return (clauses[0] if clauses else headline).strip()


def _probe(schema: Schema, device: torch.device) -> dict[str, Tensor]:
    """Return features of a few events, of numbers that differ where they may."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for feature in schema.features:
        dtype, shape = tensor_dtype(feature.dtype.name), (_PROBES, *feature.shape)
        noise = torch.randn(shape, generator=generator) if dtype.is_floating_point else torch.zeros(shape)
        found[feature.name] = noise.to(device, dtype)
    return found


LaunchContext = Callable[[], contextlib.AbstractContextManager[object]]
"""Returns what work for the device is given in."""
