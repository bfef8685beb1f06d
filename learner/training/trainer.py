"""One step: test, then train.

Legend: B new events.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anabranch.core.failures import out_of_memory
from ingest.events.block import Array
from ingest.events.schema import Schema
from learner.config import LearnerSettings
from learner.device_memory.host_staging import HostStaging
from learner.errors import CheckpointError, RankTooLargeError
from learner.model.adapter import adapter_scale
from learner.model.device import Precision
from learner.model.embedding import Embeddings
from learner.model.factory import forward, sample
from learner.model.faulty_events import error_of, may_be_of_events, raising
from learner.model.features.learned import Columns, features_of
from learner.model.features.row_tables import row_tables
from learner.model.growing.parts import grow
from learner.model.rng import restore_rng, rng_tensors, rng_values
from learner.model.task import Task
from learner.model.trained_set import load_trained, trained_state
from learner.state_dir.search.control import SearchReport
from learner.strategies.base import Strategy, StrategyContext, eval_mode
from learner.strategies.early_negatives import EARLY
from learner.strategies.examples import TEACHER, Examples, Tensors, pad_single
from learner.strategies.teacher_loss import TeacherLoss
from learner.training.activation_checkpointing import checkpoint_activations
from learner.training.compile import compiled
from learner.training.host_to_device import Transfer
from learner.training.optimizer_step import OptimizerStep
from learner.training.out_of_memory import halve_micro_batch
from learner.training.parallelism import Ranks, SingleRank
from learner.training.passes import Passes, StepHooks
from learner.training.pipelined.passes import PipelinedPasses
from learner.training.pipelined.search import PipelinedSearch
from learner.training.raising_search import RaisingSearch
from learner.training.rank_fallback import RankFallback, RankRaisedError
from learner.training.step_result import StepOutputs, StepResult
from learner.training.step_snapshot import StepSnapshot

_PROBES = 3

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
        hooks: StepHooks | None = None,
        warning: str | None = None,
        teaching: TeacherLoss | None = None,
    ) -> None:
        """Prepare the model for training.

        Args:
            model: on the device.
            task: the meaning of its output.
            strategy: not used by another trainer.
            schema: of the events.
            settings: of optimizer, schedule, micro-batches and others.
            device: of the model and all examples.
            precision: of the forward pass.
            embedding: where strategy or store need embeddings.
            ranks: those that train together; None: this one alone.
            hooks: where device sharing takes part in a step.
            warning: a sentence on micro-batches that were made smaller before the start.
            teaching: adds the teacher's part to the loss, where events have its outputs; None: there is no teacher.
        """
        self.model = model.train()
        self.task = task
        self.device = device
        self.strategy = strategy
        hooks = hooks or StepHooks()
        self._launch_context = hooks.launch_context
        self._transfer = Transfer(device)
        self.staging = HostStaging(device)
        """Makes the copies that versions and checkpoints are written from."""
        self._steps = 0
        self._embedding = embedding
        self._features = [feature.name for feature in schema.features]
        self._ranks = ranks or SingleRank()
        self._fallback = RankFallback(self._ranks)
        probe = _probe(schema, device)
        self._learned = features_of(model)
        self._row_tables = {} if self._learned is None else row_tables(model, self._learned, sample(schema, 2, device))
        self._ranks.weights.split(model, partial(_evaluated, model, probe, device))
        self.update = OptimizerStep(settings, model, precision, device, self._ranks)
        checkpoint_activations(self.model, settings.activation_checkpointing)
        self.trained_module = self._ranks.wrap(self.model)
        """The model as steps run it: in a group of ranks, or compiled."""
        if settings.compile:
            self.trained_module = compiled(self.trained_module, schema, device, precision, self._ranks)
        pipelined = self._ranks.pipeline is not None
        self._passes = (PipelinedPasses if pipelined else Passes)(
            model,
            self.trained_module,
            task,
            strategy,
            settings,
            classes=schema.label.one_of,
            device=device,
            precision=precision,
            embedding=embedding,
            ranks=self._ranks,
            fallback=self._fallback,
            update=self.update,
            hooks=hooks,
            warning=warning,
            teaching=teaching,
        )
        search = PipelinedSearch if pipelined else RaisingSearch
        self._search = search(self._passes, schema, self._fallback)
        strategy.setup(
            StrategyContext(
                model=model,
                task=task,
                reduce=self._fallback.average,
                rate=self.update.rate,
                parts=self._passes.parts,
                probe=probe,
                embed=None if embedding is None else self._embed,
                ranks=self._ranks.size,
                reset_optimizer=self._reset_optimizer,
            )
        )

    def _reset_optimizer(self) -> None:
        self.update.reset()
        self._ranks.reset_comm_state()

    @property
    def micro_batch_size(self) -> int | None:
        """Most events of a micro-batch; None: all of a step."""
        return self._passes.micro_batch_size

    @property
    def warning(self) -> str | None:
        """One sentence when micro-batches were made smaller after running out of memory, or of the strategy."""
        return self._passes.warning or self.strategy.warning

    @property
    def found(self) -> Mapping[str, float]:
        """The settings that a search has found, by key, which replace those of the config; empty without a search."""
        return {}

    @property
    def search_report(self) -> SearchReport | None:
        """The state of the search; None without one."""
        return None

    @property
    def sent_bytes(self) -> int | None:
        """Bytes that this rank has sent to average gradients and other tensors; None: it does not count them."""
        return self._ranks.sent_bytes

    def set_micro_batch_size(self, rows: int | None) -> None:
        """Set the most events of a micro-batch from the next step on; None: all of a step."""
        self._passes.micro_batch_size = rows

    def set_before_wait(self, call: Callable[[], object]) -> None:
        """Set what is called in each step while the device computes it; on a CPU nothing is."""
        if overlaps(self.device):
            self._passes.before_wait = call

    def set_losses_needed(self, *, needed: bool) -> None:
        """Set whether the losses of old events are used; other ranks need not send them otherwise."""

    def send_keepalive(self) -> None:
        """Show other ranks that this one is alive, where there are any; called between steps."""

    def examples(self, columns: Mapping[str, Array]) -> Examples:
        """Return the columns of B events as tensors on the device; columns `early` and `teacher` are taken where they
        are. All events have a label unless there is a column `teacher`."""
        optional = {"early_B": columns[EARLY]} if EARLY in columns else {}
        label, weight = columns["label"], columns["weight"]
        if TEACHER in columns:
            labelled = columns["labelled"].astype(np.bool_)
            optional |= {"teacher_B": columns[TEACHER], "taught_B": weight, "labelled_B": labelled}
            weight = np.where(labelled, weight, np.float32(0))
            label = np.where(labelled.reshape(-1, *[1] * (label.ndim - 1)), label, np.zeros_like(label))
        arrays = [*(columns[f"feature.{name}"] for name in self._features), label, weight, *optional.values()]
        tensors = iter(self._transfer(arrays))
        features = {name: next(tensors) for name in self._features}
        required = next(tensors), next(tensors)
        return Examples(features, *required, **dict(zip(optional, tensors, strict=True)))

    def probe(self, old: Examples) -> tuple[int, float]:
        """Score old events in evaluation mode, without training on them.

        Waits for the device: the score decides how much the next step replays.

        Returns:
            How many events have a label, and that many times their mean score, weighted by importance.

        Raises:
            RaisingEventsError: model or task raises on some of them.
        """
        self._passes.begin()
        with self._launch_context(), self._passes.snapshots.taken() as before:
            labelled, score, weight = self._probe_scores(old, before)
        mean = score / weight.clamp_min(torch.finfo(torch.float32).tiny)
        rows, mean_score = torch.stack([labelled, mean]).tolist()
        return int(rows), mean_score * rows

    def _probe_scores(self, old: Examples, before: StepSnapshot) -> Tensor:
        """Return the sums of `_scored`, or raise RaisingEventsError with the events on which model or task raises."""

        def scored(part: Examples) -> Tensor:
            self.model.eval()
            try:
                with torch.no_grad(), self._passes.autocast():
                    return self._passes.fitting(partial(self._scored, part), [[part]], before)
            finally:
                self.model.train()

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
        for part in self._passes.parts(old):
            score_B, weight_B = self.task.score(forward(self.model, part.features), part.label_B), part.weight_B
            sums = (weight_B > 0).sum(), (score_B * weight_B).sum(), weight_B.sum()
            totals.append(torch.stack([value.float() for value in sums]))
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
        self._passes.begin()
        with self._launch_context(), self._passes.snapshots.taken() as before:
            return self._step(new, old, rows, before)

    def learn_features(self, columns: Columns) -> None:
        """Learn features from the new events of a finite step, after it: it was scored without them, as serving would.

        Rows of embeddings begin again whose value is another one now. `columns` are those of all ranks.
        """
        if self._learned is None or not len(columns["label"]):
            return
        for name, restarted in self._learned.observe(columns).items():
            rows, like = (torch.from_numpy(each).to(self.device) for each in restarted)
            for table in self._row_tables[name]:
                self.update.restart_rows(table.weight, rows, like)

    def _step(self, new: Examples, old: Sequence[Examples], rows: int | None, before: StepSnapshot) -> StepResult:
        count, *sampled = map(len, (new, *old))
        rows, events = count if rows is None else rows, (new, *old)
        if count == 1 and not sum(sampled):
            # Batch norm needs two events: the second is a copy of weight 0.
            new = pad_single(new)
        self.update.begin(self._steps)
        try:
            outputs: StepOutputs | None = self._passes.run(new, old, rows, before)
        except RankRaisedError as exc:
            self._ranks.reset_comm_state()
            self._search.undo(before)
            error, too_large = self._fallback.take_error(), self._fallback.take_too_large()
            if not exc.out_of_memory:
                self._search.raise_named(error, events, before)
                assert error is not None
                raise error from None
            self._shrink(too_large, error)
            outputs = None  # the step is repeated after the handler, since the errors reference tensors
        except Exception as exc:  # the user's own code may raise anything
            if self._ranks.world > 1 or not may_be_of_events(exc):
                raise
            self._search.raise_named(exc, events, before)
            raise
        if outputs is None:
            return self._step(new, old, rows, before)
        self._steps += 1
        if outputs.finite:
            self.strategy.after_step(new, outputs.output_B)
        return outputs.result(rows, sampled)

    def _shrink(self, rows: int, error: Exception | None) -> None:
        """Halve micro-batches after `rows` events of one ran out of memory on this rank; 0: on another rank."""
        passes = self._passes
        if not rows:
            passes.warning = passes.warning or "another replica ran out of memory, and runs fewer events at once"
            return
        try:
            halve_micro_batch(
                rows, passes.micro_batch_size, self.device, self._ranks.world, " ".join(str(error).split())
            )
        except RankTooLargeError as exc:
            log.error("%s", exc)  # noqa: TRY400 the sentence says all
            passes.micro_batch_size, passes.warning = exc.rows, str(exc)

    def on_drift(self) -> None:
        """Apply a change of the stream: restart the schedule where `restart` says so, and consolidate the strategy."""
        self.update.schedule.on_drift(self._steps)
        self.strategy.on_drift()

    def snapshot(self) -> Mapping[str, Tensor]:
        """Copy the trained set as it is now; later steps do not change the copy. See `HostStaging`."""
        return self._copied(trained_state(self.model))

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """Copy the optimizer's tensors; later steps do not change the copy."""
        return self._copied(*self.update.tensors())

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Copy the tensors of model, optimizer and strategy, for a checkpoint."""
        tensors = {"model": self.snapshot(), "optimizer": self.optimizer_state()}
        strategy = self.strategy.tensors()
        return tensors | ({"strategy": self.staging.copy(strategy.items())} if strategy else {})

    def _copied(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        weights = self._ranks.weights
        return self.staging.copy(weights.full_tensors(tensors, like), gathered=weights.sharded)

    def state(self) -> dict[str, Any]:
        """Return the state of optimizer, scaler and strategy besides tensors, as JSON values, for a checkpoint."""
        strategy = {"class": type(self.strategy).__name__, **self.strategy.state()}
        return {**self.update.state(self._steps), "strategy": strategy, "adapter_scale": adapter_scale(self.model)}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Restore the weights and the optimizer of a checkpoint.

        Settings of the optimizer, such as the learning rate, stay those of the config, so that the user's changes
        between two starts apply.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer.
        """
        scale = adapter_scale(self.model)
        if state.get("adapter_scale") != scale:
            raise CheckpointError(
                f"the newest checkpoint has adapters with alpha / rank = {state.get('adapter_scale')}, and "
                f"[model.adapter] has {scale}; put model.adapter.alpha back, or begin again by moving the checkpoints "
                "away"
            )
        try:
            grow(self.model, tensors["model"])
            load_trained(self.model, self._ranks.weights.shard_like(tensors["model"], trained_state(self.model)))
            self._steps = self.update.restore(tensors["optimizer"], state)
            self._restore_strategy(tensors.get("strategy", {}), state.get("strategy", {}))
        except (RuntimeError, KeyError, ValueError) as exc:
            if isinstance(exc, RuntimeError) and out_of_memory(exc):
                raise
            raise CheckpointError(
                "the newest checkpoint does not fit the model or optimizer of the config; put those back, or begin "
                f"again by moving the checkpoints away: {_first_clause(exc)}"
            ) from exc

    def generators(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the states of all random generators, as tensors and as JSON values, for a checkpoint."""
        return rng_tensors(self.device), rng_values()

    def restore_generators(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the states of all random generators; called after `restore`."""
        restore_rng(tensors, values, self.device)

    def _restore_strategy(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Restore the strategy, unless the checkpoint is of another strategy."""
        now, before = type(self.strategy).__name__, state.get("class")
        if before == now:
            self.strategy.restore(tensors, state)
        elif before is not None:
            log.info("the checkpoint was made under the strategy %s: %s starts without state", before, now)

    def _embed(self, features: Tensors) -> tuple[Tensor, Tensor]:
        """Return the embeddings of events and the model's output."""
        assert self._embedding is not None
        self._embedding.capture_next()
        output = forward(self.model, features)
        return self._passes.captured(), output


def overlaps(device: torch.device) -> bool:
    """Return whether the host can work while a device computes."""
    return device.type == "cuda"


def _first_clause(error: Exception) -> str:
    """Return the first item of torch's error message, which lists one per line below a headline."""
    headline, *clauses = str(error).splitlines() or [""]
    return (clauses[0] if clauses else headline).strip()


def _evaluated(model: nn.Module, features: Tensors, device: torch.device) -> Tensor:
    """Return the output for features in evaluation mode; random generators are unchanged afterwards."""
    states = rng_tensors(device), rng_values()
    try:
        with eval_mode(model):
            return forward(model, features)
    finally:
        restore_rng(*states, device)


def _probe(schema: Schema, device: torch.device) -> dict[str, Tensor]:
    """Return features of a few made-up events, which differ where their dtype allows."""
    generator = torch.Generator().manual_seed(0)
    features = {}
    for feature in schema.features:
        values = torch.from_numpy(feature.example(_PROBES))
        if values.is_floating_point():
            values = torch.randn(values.shape, generator=generator).to(values.dtype)
        features[feature.name] = values.to(device)
    return features
