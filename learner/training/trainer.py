"""One step: test, then train.

Legend: B new events.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ingest.events.block import Array
from ingest.events.schema import Schema
from learner.config import LearnerSettings
from learner.device_health.sniff_test import time_product
from learner.device_memory.host_staging import HostStaging
from learner.errors import RankTooLargeError
from learner.model.device import Precision
from learner.model.embedding import Embeddings
from learner.model.factory import forward, made_up_features, sample
from learner.model.faulty_events import may_be_of_events
from learner.model.features.intercept import residual_of
from learner.model.features.learned import Columns, features_of
from learner.model.features.row_tables import row_tables
from learner.model.features.vocabulary import Restarted
from learner.model.task import Task
from learner.strategies.base import Strategy, StrategyContext, overrides
from learner.strategies.early_negatives import EARLY, Early, trained_first
from learner.strategies.examples import TEACHER, Examples, Tensors, pad_single
from learner.strategies.teacher_loss import TeacherLoss
from learner.training.activation_checkpointing import checkpoint_activations
from learner.training.compile import compiled
from learner.training.eval_passes import OldEventScores, evaluated
from learner.training.host_to_device import Transfer
from learner.training.micro_batches import StepHooks
from learner.training.optimizer_step import OptimizerStep
from learner.training.out_of_memory import halve_micro_batch
from learner.training.parallelism import Ranks, SingleRank
from learner.training.passes import Passes
from learner.training.pipelined.passes import PipelinedPasses
from learner.training.pipelined.search import PipelinedSearch
from learner.training.raising.rank_fallback import RankFallback, RankRaisedError
from learner.training.raising.search import RaisingSearch
from learner.training.step_result import StepOutputs, StepResult
from learner.training.step_snapshot import StepSnapshot
from learner.training.trainer_state import TrainerState

log = logging.getLogger(__name__)


class Trainer(TrainerState):
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
        ranks, hooks = ranks or SingleRank(), hooks or StepHooks()
        probe = made_up_features(schema, device)
        self._learned = features_of(model.train())
        self._row_tables = {} if self._learned is None else row_tables(model, self._learned, sample(schema, 2, device))
        ranks.weights.split(model, partial(evaluated, model, probe, device))
        update = OptimizerStep(settings, model, precision, device, ranks)
        super().__init__(model, strategy, update, ranks.weights, HostStaging(device, hooks.before_chunk))
        self.task = task
        self._after_step = overrides(strategy, "after_step")
        self._launch_context = hooks.launch_context
        self._transfer = Transfer(device)
        self._embedding = embedding
        self._features = [feature.name for feature in schema.features]
        self._ranks, self._fallback = ranks, RankFallback(ranks)
        checkpoint_activations(model, settings.activation_checkpointing)
        wrapped = ranks.wrap(model)
        self.trained_module = compiled(wrapped, schema, device, precision, ranks) if settings.compile else wrapped
        """The model as steps run it: in a group of ranks, or compiled."""
        pipelined = ranks.pipeline is not None
        self._passes = (PipelinedPasses if pipelined else Passes)(
            *(model, self.trained_module, task, strategy, settings, schema.label.one_of, device, precision, embedding),
            *(ranks, self._fallback, update, hooks, warning, teaching),
        )
        self._search = (PipelinedSearch if pipelined else RaisingSearch)(self._passes, schema, self._fallback)
        self.probe = OldEventScores(model, self._passes, hooks.launch_context)
        """Scores old events in evaluation mode, without training on them."""
        strategy.setup(self._context(probe, adds_old=settings.replay_ratio == "auto"))

    def _context(self, probe: Tensors, *, adds_old: bool) -> StrategyContext:
        """Return the parts that the strategy may use; `probe`: features of a few made-up events."""
        return StrategyContext(
            model=self.model,
            task=self.task,
            reduce=self._fallback.average,
            rate=self.update.rate,
            parts=self._passes.parts,
            probe=probe,
            embed=None if self._embedding is None else self._embed,
            ranks=self._ranks.size,
            reset_optimizer=self._reset_optimizer,
            adds_old=adds_old,
        )

    def _reset_optimizer(self) -> Callable[[], None]:
        self._ranks.reset_comm_state()
        return self.update.reset()

    @property
    def micro_batch_size(self) -> int | None:
        """Most events of a micro-batch; None: all of a step."""
        return self._passes.micro_batch_size

    @property
    def warning(self) -> str | None:
        """One sentence when micro-batches were made smaller after running out of memory, or of the strategy."""
        return self._passes.warning or self.strategy.warning

    @property
    def sent_bytes(self) -> int | None:
        """Bytes that this rank has sent to average gradients and other tensors; None: it does not count them."""
        return self._ranks.sent_bytes

    def set_micro_batch_size(self, rows: int | None) -> None:
        """Set the most events of a micro-batch from the next step on; None: all of a step."""
        self._passes.micro_batch_size = rows

    def set_before_wait(self, call: Callable[[], object]) -> bool:
        """Set what is called in each step while the device computes it, and return whether it is: not on a CPU.

        Later than in the constructor, since it makes the examples of the next step with this trainer.
        """
        if not overlaps(self.device):
            return False
        self._passes.before_wait = call
        return True

    def set_losses_needed(self, *, needed: bool) -> None:
        """Set whether the losses of old events are used; other ranks need not send them otherwise."""

    def set_is_behind(self, is_behind: Callable[[], bool]) -> None:
        """Set what returns whether the learner is behind the stream, whose reader is built after the trainer; a search
        begins no leases then."""

    def sniff(self) -> Mapping[str, float]:
        """Run the sniff test; return the seconds by device, and with several ranks by rank."""
        return {str(self.device): time_product(self.device)}

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
        features = dict(zip(self._features, tensors, strict=False))
        required = next(tensors), next(tensors)
        return Examples(features, *required, **dict(zip(optional, tensors, strict=True)))

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the config's learning rate by a factor, from the next step on."""
        self.update.schedule.scale = factor

    def step(self, new: Examples, old: Sequence[Examples] = (), columns: Columns | None = None) -> StepResult:
        """Score the new events, train on new and old, and learn features from the new ones of a finite step.

        `columns`: of the new events, on the host; needed where features are learned. Features come last, so that events
        are scored as serving would have scored them.

        Raises what `step_without_features` raises.
        """
        result = self.step_without_features(new, old)
        if self._learned is not None and result.finite:
            assert columns is not None
            self.learn_features(*trained_first(columns, result.output_B))
            if EARLY in columns and (taken_back := columns[EARLY] == Early.TAKEN_BACK).any():
                self._learned.take_back({name: column[taken_back] for name, column in columns.items()})
        return result

    def step_without_features(self, new: Examples, old: Sequence[Examples] = (), rows: int | None = None) -> StepResult:
        """Score the new events, then train on new and old: the part of a step that a rank takes by itself.

        Only the first `rows` new events count, or all for None: a rank without new events has one of weight 0.

        The scored predictions come from the forward pass of the gradient: the model has not trained on the events yet,
        and a second pass would cost a third of the step. So dropout is on, if the model has it.

        Raises:
            RaisingEventsError: model or task raises on some of the events; nothing has changed, so that the caller may
                step again without them. Any other error has another cause. With several ranks each rank raises this,
                and names its own events, of which there may be none.
        """
        with self._launch_context():
            return self._step(new, old, rows, self._passes.begin())

    def learn_features(self, columns: Columns, output_B: Tensor | None = None) -> None:
        """Learn features from new events; `step` calls it, and a follower does when its leader has.

        Rows of embeddings begin again whose value is another one now. `columns` are those of all ranks; `output_B`, the
        step's output for the same events, is what intercepts learn from.
        """
        if self._learned is None or not len(columns["label"]):
            return
        residual = None
        if self._learned.intercepts:
            assert output_B is not None
            residual = residual_of(self.task, output_B, torch.from_numpy(columns["label"]).to(self.device))
        self._restart_rows(self._learned.observe(columns, residual))

    def erase_features(self, keys: NDArray[np.uint64], seed: int) -> None:
        """Erase what features have learned of the events of these keys alone, by their hashes; `seed` is secret."""
        if self._learned is not None:
            self.erase_owners(self._learned.owners_of(keys), seed)

    def erase_owners(self, owners: NDArray[np.int64], seed: int) -> None:
        """Erase what features have learned of owners alone; `erase_features` calls it, and a follower does."""
        assert self._learned is not None
        self._restart_rows(self._learned.erase(owners, seed))

    def _restart_rows(self, restarted_by_name: Mapping[str, Restarted]) -> None:
        for name, restarted in restarted_by_name.items():
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
        if outputs.finite and self._after_step:
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

    def _embed(self, features: Tensors) -> tuple[Tensor, Tensor]:
        """Return the embeddings of events and the model's output."""
        assert self._embedding is not None
        self._embedding.capture_next()
        output = forward(self.model, features)
        return self._passes.captured(), output


def overlaps(device: torch.device) -> bool:
    """Return whether the host can work while a device computes."""
    return device.type == "cuda"
