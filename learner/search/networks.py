"""Challengers with their own network: built with other arguments of the factory, and taught by the model.

Legend: B events.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anabranch.core.errors import SettingsError
from anabranch.core.failures import Failure, failure_of
from learner.errors import ModelError
from learner.model.factory import in_one_line
from learner.model.rng import GeneratorStates, seed_rng
from learner.model.trained_set import base_names, trained_state
from learner.search.challenger import Challenger
from learner.search.latency import LatencyBound
from learner.sections.search import arguments_of
from learner.state_dir.search.control import Judged
from learner.strategies.base import eval_mode
from learner.strategies.examples import Examples
from learner.strategies.teacher_loss import TeacherLoss
from learner.training.passes import Passes
from learner.training.trainer import Trainer

NETWORK_TEACHING = 0.5, 2.0
"""Weight of the model's output against the label, and temperature: the defaults of `[model.teacher]`."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NetworkSpec:
    """How networks with other arguments of the factory are built, taught and judged by their latency.

    Attributes:
        args: `model.args`.
        build: builds the network of other arguments on the device; raises ModelError where it does not fit the task.
        teaching: the teacher's part of the loss, where the model is the teacher.
        latency: decides which networks are too slow; None: none is.
    """

    args: Mapping[str, Any]
    build: Callable[[Mapping[str, Any]], nn.Module]
    teaching: TeacherLoss
    latency: LatencyBound | None = None


class Networks:
    """The trainers of challengers with their own networks. Used by the thread of the model's trainer.

    Neither the model nor a random generator is changed by any of this.
    """

    def __init__(
        self, spec: NetworkSpec, seed: int, model: nn.Module, make_trainer: Callable[[nn.Module], Trainer]
    ) -> None:
        """Start without any; `make_trainer` returns a trainer that has `spec.teaching`.

        Raises:
            ModelError: the model has frozen weights.
        """
        if base_names(model):
            raise ModelError(
                "search.space has arguments of model.factory, and the model has frozen weights, which a checkpoint "
                "would not have of another network; take those keys out of search.space"
            )
        self._spec, self._seed, self._model, self._make_trainer = spec, seed, model, make_trainer
        self._trainers: dict[int, Trainer] = {}

    def __getitem__(self, challenger: Challenger) -> Trainer:
        return self._trainers[challenger.number]

    def __iter__(self) -> Iterator[Trainer]:
        return iter(self._trainers.values())

    def has(self, challenger: Challenger) -> bool:
        """Return whether the network of a challenger is built."""
        return challenger.number in self._trainers

    def keep(self, challengers: Collection[Challenger]) -> None:
        """Discard the networks of all other challengers."""
        numbers = {each.number for each in challengers}
        self._trainers = {number: each for number, each in self._trainers.items() if number in numbers}

    def begin(self, challenger: Challenger, before_pass: Callable[[], object]) -> Judged | None:
        """Build a network, with the model's tensors where it has some of the same name and shape.

        Returns why it cannot be a challenger; None if it is one. `before_pass`: called before each timed pass.
        """

        def prepare(trainer: Trainer) -> Judged | None:
            _take_over(self._model, trainer.model)
            latency, modules = self._spec.latency, (self._model, trainer.model)
            slower = None if latency is None else latency.exceeded(*modules, trainer.device, before_pass)
            if slower is None:
                return None
            log.info("challenger %d: %s", challenger.number, slower)
            return "too_slow"

        return self._build(challenger, prepare)

    def restore(
        self, challenger: Challenger, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
    ) -> Judged | None:
        """Build a network again, with the state that a checkpoint has of its trainer; return as `begin` does."""
        return self._build(challenger, lambda trainer: trainer.restore(tensors, state))

    def _build(self, challenger: Challenger, prepare: Callable[[Trainer], Judged | None]) -> Judged | None:
        """Build a network, prepare its trainer, and keep it unless that has a problem; return as `begin` does."""
        states = GeneratorStates(next(self._model.parameters()).device)
        try:
            words = np.random.SeedSequence([self._seed, challenger.number]).generate_state(1)
            seed_rng(int(words[0]), python=True)
            arguments = {name: int(value) for name, value in arguments_of(challenger.values).items()}
            trainer = self._make_trainer(self._spec.build({**self._spec.args, **arguments}))
            if base_names(trainer.model):
                raise ModelError(f"the network of {arguments} has frozen weights")
            problem = prepare(trainer)
        except (SettingsError, RuntimeError, MemoryError) as exc:
            failure = failure_of(exc)
            if failure is Failure.DEVICE or (failure is not Failure.MEMORY and not isinstance(exc, SettingsError)):
                raise
            log.info("challenger %d: %s", challenger.number, in_one_line(exc))
            return "no_memory" if failure is Failure.MEMORY else "raised"
        finally:
            states.restore()
        if problem is None:
            self._trainers[challenger.number] = trainer
        return problem


def _take_over(source: nn.Module, target: nn.Module) -> None:
    """Copy the tensors of a module into another one that has some of the same name, shape and type."""
    own = trained_state(target)
    with torch.no_grad():
        for name, value in trained_state(source).items():
            there = own.get(name)
            if there is not None and (there.shape, there.dtype) == (value.shape, value.dtype):
                there.copy_(value)


def taught(events: Examples, model: nn.Module, passes: Passes) -> Examples:
    """Return events with the outputs of the model, in evaluation mode, as those of a teacher."""
    outputs = []
    with passes.snapshots.taken() as before, eval_mode(model), torch.no_grad(), passes.autocast():
        for part in passes.parts(events):
            outputs.append(passes.forward(part.features).float())
        before.restore_buffers()
    labelled_B = torch.ones(len(events), dtype=torch.bool, device=events.weight_B.device)
    return replace(events, teacher_B=torch.cat(outputs), taught_B=events.weight_B, labelled_B=labelled_B)
