"""A model that learns: its steps, its optimizer and strategy, and what versions and checkpoints copy of them.

Legend: B new events.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.core.failures import out_of_memory
from anabranch.ingest.events.block import Array
from anabranch.learner.device.host_staging import HostStaging
from anabranch.learner.errors import CheckpointError
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.examples import Examples, Tensors, Transfer
from anabranch.learner.model.factory import eval_mode, forward, made_up_features
from anabranch.learner.model.growing.pool import grow
from anabranch.learner.model.rng import restore_rng, rng_tensors, rng_values
from anabranch.learner.model.trained_set import constants, load_trained, trained_state
from anabranch.learner.strategies.base import StrategyContext, restore_strategy, saved_state
from anabranch.learner.train.converters import Compilation, Recomputation
from anabranch.learner.train.micro_batches import StepHooks
from anabranch.learner.train.optimizer_step import OptimizerStep
from anabranch.learner.train.parallelism import Ranks
from anabranch.learner.train.pipelined_runner import PipelinedRunner
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.step_result import RoundEvents, StepResult
from anabranch.learner.train.step_runner import StepRunner
from anabranch.learner.train.step_wrapper import FeatureTraining, StepWrapper, TakeStep


class Trainer:
    """Owns the model, its optimizer and the loss scaler. Used by one thread."""

    def __init__(
        self,
        setup: TrainingSetup,
        *,
        ranks: Ranks | None = None,
        hooks: StepHooks | None = None,
        warning: str | None = None,
        wrappers: Sequence[StepWrapper] = (),
    ) -> None:
        """Prepare the model for training.

        Args:
            setup: what each rank trains with.
            ranks: those that train together; None: this one alone.
            hooks: where device sharing takes part in a step.
            warning: a sentence on micro-batches that were made smaller before the start.
            wrappers: what else takes part in each step, the outermost first.
        """
        model, schema, settings, device = setup.model, setup.schema, setup.settings, setup.device
        ranks, hooks = ranks or Ranks(), hooks or StepHooks()
        probe = made_up_features(schema, device)
        self.model, self.task, self.strategy, self.device = model, setup.task, setup.strategy, device
        self.features = FeatureTraining(setup, wrappers)
        ranks.weights.split(model, partial(_evaluated, model, probe, device))
        self.update = self.features.update = OptimizerStep(settings, model, setup.precision, device, ranks)
        self.staging = HostStaging(device, hooks.before_chunk)
        """Makes the copies that versions and checkpoints are written from."""
        self._steps = 0
        self.examples = Transfer([feature.name for feature in schema.features], device)
        """Copies the columns of new events to the device."""
        self._embedding = setup.embedding
        self._ranks = ranks
        context = ModelContext(device, schema)
        recomputed = Recomputation(settings.activation_checkpointing).convert(model, context)
        compilation = Compilation(setup.precision, ranks, enabled=settings.compile is True)
        self.trained_module = compilation.convert(ranks.wrap(recomputed), context)
        """The model as steps run it: in a group of ranks, or compiled."""
        kind = StepRunner if ranks.pipeline is None else PipelinedRunner
        self.runner = kind(setup, self.trained_module, ranks, self.update, hooks, warning=warning)
        self.probe = self.runner.probe
        """Scores old events in evaluation mode, without training on them."""
        self.wrappers = wrappers
        self._run_step: TakeStep = self._take_step
        for wrapper in reversed(wrappers):
            self._run_step = partial(wrapper.step, self._run_step)
        setup.strategy.setup(self._context(probe, adds_old=settings.replay_ratio == "auto"))
        for wrapper in wrappers:
            wrapper.attach(self)

    def _context(self, probe: Tensors, *, adds_old: bool) -> StrategyContext:
        """Return the parts that the strategy may use; `probe`: features of a few made-up events."""
        return StrategyContext(
            model=self.model,
            task=self.task,
            reduce=self.runner.fallback.average,
            rate=self.update.rate,
            parts=self.runner.parts,
            probe=probe,
            embed=None if self._embedding is None else self._embed,
            ranks=self._ranks.size,
            reset_optimizer=self._reset_optimizer,
            adds_old=adds_old,
        )

    def _reset_optimizer(self) -> Callable[[], None]:
        self._ranks.exchange.reset()
        self.runner.discard_graphs()
        return self.update.reset()

    @property
    def warning(self) -> str | None:
        """One sentence when micro-batches were made smaller after running out of memory, or of the strategy."""
        return self.runner.warning or self.strategy.warning

    @property
    def found(self) -> Mapping[str, float]:
        """The settings that a search has found, by key, which replace those of the config; empty without a search."""
        return next(filter(None, (wrapper.found for wrapper in self.wrappers)), {})

    def step(
        self, new: Examples, old: Sequence[Examples] = (), columns: Mapping[str, Array] | None = None
    ) -> StepResult:
        """Score the new events, train on new and old, and learn features from the new ones of a finite step.

        `columns`: of the new events, on the host; needed where features are learned. Features come last, so that events
        are scored as serving would have scored them.

        Raises what `step_without_features` raises.
        """
        result = self.step_without_features(new, old)
        if self.features.learned is not None and result.finite:
            assert columns is not None
            self.features.learn_step(columns, result.output_B)
        return result

    def step_without_features(self, new: Examples, old: Sequence[Examples] = (), rows: int | None = None) -> StepResult:
        """Score the new events, then train on new and old: the part of a step that a rank takes by itself.

        For `rows` and errors see `StepRunner.step`.
        """
        return self._run_step(new, old, rows)

    def steps(self, events: RoundEvents) -> Sequence[StepResult] | None:
        """Take the steps of a round, each by one launch, with one wait for all: see `StepRunner.steps`.

        None, and nothing was done, where `step` has to take each: also where something follows each on the host.
        """
        if self.wrappers or self.features.learned is not None:
            return None
        results = self.runner.steps(events, self._steps)
        if results is not None:
            self._steps += len(results)
        return results

    def _take_step(self, new: Examples, old: Sequence[Examples], rows: int | None) -> StepResult:
        result = self.runner.step(new, old, rows, self._steps)
        self._steps += 1
        return result

    def on_drift(self) -> None:
        """Apply a change of the stream: restart the schedule where `restart` says so, and consolidate the strategy."""
        for wrapper in self.wrappers:
            wrapper.on_drift()
        self.update.schedule.on_drift(self._steps)
        self.strategy.on_drift()

    def _embed(self, features: Tensors) -> tuple[Tensor, Tensor]:
        """Return the embeddings of events and the model's output."""
        assert self._embedding is not None
        self._embedding.capture_next()
        output = forward(self.model, features)
        return self.runner.captured(), output

    # What versions and checkpoints copy.

    def snapshot(self) -> Mapping[str, Tensor]:
        """Copy the trained set as it is now; later steps do not change the copy. See `HostStaging`."""
        for wrapper in self.wrappers:
            wrapper.before_copy(optimizer=False)
        return self._copied(trained_state(self.model))

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Copy the tensors of model, optimizer and strategy, for a checkpoint; later steps do not change the copies."""
        others = [wrapper.tensors() for wrapper in self.wrappers]
        tensors = {"model": self.snapshot()}
        for wrapper in self.wrappers:
            wrapper.before_copy(optimizer=True)
        tensors["optimizer"] = self._copied(*self.update.tensors())
        if strategy := self.strategy.tensors():
            tensors["strategy"] = self.staging.copy(strategy.items())
        for each in others:
            tensors |= each
        return tensors

    def _copied(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        weights = self._ranks.weights
        return self.staging.copy(weights.full_tensors(tensors, like), gathered=weights.sharded)

    def state(self, *, wrapped: bool = True) -> dict[str, Any]:
        """Return the state of optimizer, scaler and strategy besides tensors, as JSON values, for a checkpoint.

        `wrapped`: whether that of wrappers is in it.
        """
        others = [wrapper.state() for wrapper in self.wrappers] if wrapped else []
        state = {
            **self.update.state(self._steps),
            "strategy": saved_state(self.strategy),
            "constants": constants(self.model),
        }
        for each in others:
            state |= each
        return state

    def restore(
        self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], *, wrapped: bool = True
    ) -> None:
        """Restore the weights and the optimizer of a checkpoint; `wrapped`: and the wrappers.

        Settings of the optimizer, such as the learning rate, stay those of the config, so that the user's changes
        between two starts apply.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer, or the strategy refuses its state.
        """
        before, now = state.get("constants", {}), constants(self.model)
        if different := [name for name in before | now if before.get(name) != now.get(name)]:
            name = different[0]
            raise CheckpointError(
                f"the newest checkpoint was made with {name} = {before.get(name, 'none')}, and that is "
                f"{now.get(name, 'none')} now; put it back, or begin again by moving the checkpoints away"
            )
        self.runner.discard_graphs()
        try:
            grow(self.model, tensors["model"])
            load_trained(self.model, self._ranks.weights.shard_like(tensors["model"], trained_state(self.model)))
            self._steps = self.update.restore(tensors["optimizer"], state)
            restore_strategy(self.strategy, tensors.get("strategy", {}), state.get("strategy", {}))
        except (RuntimeError, KeyError, ValueError) as exc:
            if isinstance(exc, RuntimeError) and out_of_memory(exc):
                raise
            raise CheckpointError(
                "the newest checkpoint does not fit the model, optimizer or strategy of the config; put those back, or "
                f"begin again by moving the checkpoints away: {_first_clause(exc)}"
            ) from exc
        for wrapper in self.wrappers if wrapped else ():
            wrapper.restore(tensors, state)

    def generators(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the states of all random generators, as tensors and as JSON values, for a checkpoint."""
        tensors = rng_tensors(self.device)
        for wrapper in self.wrappers:
            tensors |= wrapper.generators()
        return tensors, rng_values()

    def restore_generators(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the states of all random generators; called after `restore`."""
        restore_rng(tensors, values, self.device)
        for wrapper in self.wrappers:
            wrapper.restore_generators(tensors, values)


def overlaps(device: torch.device) -> bool:
    """Return whether the host can work while a device computes."""
    return device.type == "cuda"


def _evaluated(model: nn.Module, features: Tensors, device: torch.device) -> Tensor:
    """Return the output for features in evaluation mode; random generators are unchanged afterwards."""
    states = rng_tensors(device), rng_values()
    try:
        with eval_mode(model):
            return forward(model, features)
    finally:
        restore_rng(*states, device)


def _first_clause(error: Exception) -> str:
    """Return the first item of torch's error message, which lists one per line below a headline."""
    headline, *clauses = str(error).splitlines() or [""]
    return (clauses[0] if clauses else headline).strip()
