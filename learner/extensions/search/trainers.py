"""The trainers of challengers: copies of the model, and networks that are built with other arguments of the factory."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anabranch.core.errors import SettingsError
from anabranch.core.failures import Failure, failure_of, out_of_memory
from anabranch.core.users_code import in_one_line
from anabranch.learner.errors import MemoryShortageError, ModelError
from anabranch.learner.extensions.search.networks import NetworkSpec, taught
from anabranch.learner.extensions.search.pool import Challenger
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.faulty_events import RaisingEventsError, may_be_of_events
from anabranch.learner.model.rng import GeneratorStates, seed_rng
from anabranch.learner.model.trained_set import base_names, copy_sharing_base, trained_state
from anabranch.learner.settings.search import ARGS, MAX_GRAD_NORM, TUNABLE, SearchSettings, arguments_of
from anabranch.learner.status.report import Judged
from anabranch.learner.strategies.base import Strategy
from anabranch.learner.train.micro_batches import StepHooks
from anabranch.learner.train.parallelism import Ranks
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.step_result import StepResult
from anabranch.learner.train.trainer import Trainer

log = logging.getLogger(__name__)

_OF_OPTIMIZER = "learner.optimizer."
COPY, NETWORK = "challenger-", "network-"
"""What the parts of a checkpoint with a challenger's tensors begin with, as it is a copy or has its own network."""
_FAILURES: Sequence[Judged | None] = (None, "not_finite", "raised", "too_slow", "no_memory")
"""How a challenger fails on a rank, the worst last; None: it does not."""


class ChallengerTrainers:
    """The trainers of challengers. Used by the thread of the model's trainer; all ranks make the same calls.

    A challenger that fails on one rank ends on all of them. None of this changes the model or a random generator.
    """

    def __init__(
        self,
        search: SearchSettings,
        seed: int,
        setup: TrainingSetup,
        make_strategy: Callable[[], Strategy],
        networks: NetworkSpec | None,
        hooks: StepHooks | None,
        ranks: Ranks,
    ) -> None:
        """Copy the model, which the trainer takes next; for the arguments see `ChallengerSearch`."""
        copied = search.challengers if any(key in TUNABLE for key in search.space) else 0
        # Now: later the model may hold tensors that cannot be copied.
        self._models = [copy_sharing_base(setup.model) for _ in range(copied)]
        self._setup, self._make_strategy, self._hooks, self._ranks = setup, make_strategy, hooks, ranks
        self._spec, self._seed = networks, seed
        self._built: dict[int, Trainer] = {}
        """Those with their own network, by the challenger's number."""

    def attach(self, trainer: Trainer) -> None:
        """Take the trainer of the model.

        Raises:
            ModelError: the model has frozen weights, and challengers have their own networks.
        """
        if self._spec is not None and base_names(trainer.model):
            raise ModelError(
                "search.space has arguments of model.factory, and the model has frozen weights, which a checkpoint "
                "would not have of another network; take those keys out of search.space"
            )
        self._model = trainer
        self._rows = trainer.runner.micro_batch_size
        self._copies = [self._make_trainer(model) for model in self._models]

    def _make_trainer(self, model: nn.Module) -> Trainer:
        wrappers = [*self._setup.loss_wrappers, *([] if self._spec is None else [self._spec.teaching])]
        strategy = self._make_strategy()
        setup = replace(self._setup, model=model, strategy=strategy, embedding=None, loss_wrappers=wrappers)
        trainer = Trainer(setup, ranks=self._ranks, hooks=self._hooks)
        trainer.runner.raises_without_memory = self._ranks.world > 1
        return trainer

    def __getitem__(self, challenger: Challenger) -> Trainer:
        if challenger.network:
            return self._built[challenger.number]
        assert challenger.slot is not None
        return self._copies[challenger.slot]

    def __iter__(self) -> Iterator[Trainer]:
        return iter([*self._copies, *self._built.values()])

    def has(self, challenger: Challenger) -> bool:
        """Return whether a challenger has weights: a copy while it trains, a network from its first lease on."""
        return challenger.number in self._built if challenger.network else challenger.slot is not None

    def keep(self, challengers: Collection[Challenger]) -> None:
        """Discard the networks of all other challengers."""
        numbers = {each.number for each in challengers}
        self._built = {number: each for number, each in self._built.items() if number in numbers}

    def agreed(self, failure: Judged | None) -> Judged | None:
        """Return the worst failure of a challenger on any rank; called by every rank."""
        return _FAILURES[self._ranks.most(_FAILURES.index(failure))]

    def begin(self, challenger: Challenger) -> Judged | None:
        """Copy the model for a challenger, or build its network, and set its settings; return why that fails."""
        if not challenger.network:
            failure = self._copy(self._model, self[challenger])
        elif self.has(challenger):
            failure = None
        else:
            with self._model.runner.launch_context():
                failure = self._build(challenger, self._take_over)
        if (failure := self.agreed(failure)) is None:
            self._configure(challenger)
        return failure

    def step(
        self, challenger: Challenger, new: Examples, old: Sequence[Examples], rows: int | None
    ) -> StepResult | Judged:
        """Let a challenger score and train on a step's events; return the result, or why that fails."""
        if self._model.runner.micro_batch_size != self._rows:
            self._rows = self._model.runner.micro_batch_size
            for each in self:
                each.runner.micro_batch_size = self._rows
        trainer, failure, result = self[challenger], None, None
        trainer.update.schedule.scale = self._model.update.schedule.scale
        try:
            if challenger.has_teacher:
                new, old = self._taught(new, old)
            result = trainer.step_without_features(new, old, rows)
        except Exception as exc:  # the user's own code may raise anything, and at weights of a challenger alone
            if (failure := self._failure(exc)) is None:
                raise
            log.info("challenger %d: %s", challenger.number, in_one_line(exc))
        else:
            trainer.update.gradients.clear()  # their memory is for the next challenger
        failure = self.agreed(failure)
        if failure is None:
            assert result is not None
            return result
        return failure

    def _failure(self, error: Exception) -> Judged | None:
        """Return how a challenger ends whose step raised; None where that has another cause.

        Also None where other ranks, in the middle of the step, still wait for this one: all ranks start again then.
        """
        if self._ranks.world > 1 and not isinstance(error, RaisingEventsError | MemoryShortageError | SettingsError):
            return None
        if out_of_memory(error) or isinstance(error, MemoryShortageError | SettingsError):
            return "no_memory"
        return "raised" if isinstance(error, RaisingEventsError) or may_be_of_events(error) else None

    def _taught(self, new: Examples, old: Sequence[Examples]) -> tuple[Examples, Sequence[Examples]]:
        """Return the events of a step with the model's outputs, for those that a teacher's part of the loss is for."""
        model, runner = self._model.model, self._model.runner
        with runner.launch_context():
            if runner.strategy.teaches_old:
                old = [taught(each, model, runner) for each in old]
            return taught(new, model, runner), old

    def promote(self, challenger: Challenger) -> Judged | None:
        """Let the model have the weights and optimizer of a challenger; return why that fails.

        Raises:
            MemoryShortageError: it fails on some ranks, which would train different models from now on.
        """
        failure = self.agreed(self._copy(self[challenger], self._model))
        if failure is not None and self._ranks.world > 1:
            said = f"a rank has no memory to take the weights of challenger {challenger.number}"
            raise MemoryShortageError(said, undone=False)
        return failure

    def configure(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Give a trainer values by the keys of the config."""
        arguments = {
            key.removeprefix(_OF_OPTIMIZER): value for key, value in values.items() if key.startswith(_OF_OPTIMIZER)
        }
        trainer.update.configure(arguments, values.get(MAX_GRAD_NORM, self._setup.settings.max_grad_norm))

    def _configure(self, challenger: Challenger) -> None:
        trainer = self[challenger]
        self.configure(trainer, challenger.values)
        trainer.runner.micro_batch_size = self._model.runner.micro_batch_size

    def value_of(self, key: str) -> float:
        """Return the model's value of a key of the config, from the optimizer where the config has none."""
        if key.startswith(ARGS):
            assert self._spec is not None
            return float(self._spec.args[key.removeprefix(ARGS)])
        group = self._model.update.optimizer.param_groups[0]
        settings = self._setup.settings
        return settings.max_grad_norm if key == MAX_GRAD_NORM else float(group[key.removeprefix(_OF_OPTIMIZER)])

    def _copy(self, source: Trainer, target: Trainer) -> Judged | None:
        try:
            copy_trainer(source, target)
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            return "no_memory"
        return None

    def _take_over(self, challenger: Challenger, trainer: Trainer) -> Judged | None:
        """Give a network the model's tensors where it has some of the same name, shape and type, and time it."""
        own = trained_state(trainer.model)
        with torch.no_grad():
            for name, value in trained_state(self._model.model).items():
                there = own.get(name)
                if there is not None and (there.shape, there.dtype) == (value.shape, value.dtype):
                    there.copy_(value)
        assert self._spec is not None
        if (latency := self._spec.latency) is None:
            return None
        before_pass = self._model.runner.before_pass
        slower = latency.exceeded(self._model.model, trainer.model, trainer.device, before_pass)
        if slower is None:
            return None
        log.info("challenger %d: %s", challenger.number, slower)
        return "too_slow"

    def _build(self, challenger: Challenger, prepare: Callable[[Challenger, Trainer], Judged | None]) -> Judged | None:
        """Build a network, prepare its trainer, and keep it unless that fails; return why it does."""
        assert self._spec is not None
        states = GeneratorStates(self._model.device)
        try:
            words = np.random.SeedSequence([self._seed, challenger.number]).generate_state(1)
            seed_rng(int(words[0]), python=True)
            arguments = {name: int(value) for name, value in arguments_of(challenger.values).items()}
            trainer = self._make_trainer(self._spec.build({**self._spec.args, **arguments}))
            if base_names(trainer.model):
                raise ModelError(f"the network of {arguments} has frozen weights")
            failure = prepare(challenger, trainer)
        except (SettingsError, RuntimeError, MemoryError) as exc:
            kind = failure_of(exc)
            if kind is Failure.DEVICE or (kind is not Failure.MEMORY and not isinstance(exc, SettingsError)):
                raise
            log.info("challenger %d: %s", challenger.number, in_one_line(exc))
            return "no_memory" if kind is Failure.MEMORY else "raised"
        finally:
            states.restore()
        if failure is None:
            self._built[challenger.number] = trainer
        return failure

    # Checkpoints.

    def tensors(self, challengers: Sequence[Challenger]) -> dict[str, Mapping[str, Tensor]]:
        """Copy the tensors of the challengers that have weights, by the names of their parts of a checkpoint."""
        copied: dict[str, Mapping[str, Tensor]] = {}
        for challenger in filter(self.has, challengers):
            its = self[challenger]
            for name, each in {"model": trained_state(its.model), "optimizer": its.update.tensors()[0]}.items():
                copied[_part_of(challenger, name)] = self._model.staging.copy(each.items())
        return copied

    def state(self, challengers: Sequence[Challenger]) -> dict[str, Any]:
        """Return what a checkpoint has of them besides tensors, as JSON values."""
        return {_key_of(each): self[each].state() for each in filter(self.has, challengers)}

    def restore(
        self, challenger: Challenger, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
    ) -> Judged | None:
        """Restore a challenger, if a checkpoint has its weights; return why that fails."""
        if (its := state.get(_key_of(challenger))) is None:
            return None
        parts = {name: tensors[_part_of(challenger, name)] for name in ("model", "optimizer")}
        failure: Judged | None = None
        if challenger.network:
            failure = self._build(challenger, lambda _, trainer: trainer.restore(parts, its))
        else:
            self[challenger].restore(parts, its)
        if (failure := self.agreed(failure)) is None:
            self._configure(challenger)
        return failure


def copy_trainer(source: Trainer, target: Trainer) -> None:
    """Copy weights and optimizer from one trainer to another."""
    optimizer = {name: value.clone() for name, value in source.update.tensors()[0].items()}
    weights = {"model": trained_state(source.model), "optimizer": optimizer}
    target.restore(weights, source.state(wrapped=False), wrapped=False)
    target.update.schedule.scale = source.update.schedule.scale


def _part_of(challenger: Challenger, name: str) -> str:
    number = f"{NETWORK}{challenger.number}" if challenger.network else f"{COPY}{challenger.slot}"
    return f"{number}-{name}"


def _key_of(challenger: Challenger) -> str:
    """Return what a checkpoint has the state of a challenger's trainer under."""
    return f"{NETWORK}{challenger.number}" if challenger.network else str(challenger.slot)
