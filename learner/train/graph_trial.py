"""Whether steps can run as CUDA graphs, by a trial at start: steps of two copies of the model, one of them by graphs.

A graph repeats the kernels of one step. It must not be used where a step reads values on the host, counts in Python, or
takes random numbers that a replay would repeat: all of these show when the same steps are taken as they are.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anabranch.core.errors import SettingsError
from anabranch.core.failures import out_of_memory
from anabranch.core.users_code import in_one_line
from anabranch.learner.device.out_of_memory import free_cached_memory
from anabranch.learner.model.embedding import Embeddings
from anabranch.learner.model.rng import GeneratorStates
from anabranch.learner.model.trained_set import copy_sharing_base, trained_state
from anabranch.learner.settings.compatibility import facts, obstacle
from anabranch.learner.settings.learner import ScheduleSettings
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.strategies.base import Strategy
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.step_graphs import FIRST_CALLS
from anabranch.learner.train.step_result import StepResult
from anabranch.learner.train.trainer import Trainer
from anabranch.learner.train.trial import first_label, made_up_columns, made_up_step

_STEPS = FIRST_CALLS + 4
_POISONED = FIRST_CALLS + 2
"""The step whose loss is not finite, which a graph has to skip: the third that it takes."""
_FULL, _HALF = 1e-3, 2e-2
"""The largest difference between what graphs and plain steps have learned, as a part of it, in full precision and in 16
bits: kernels that add in any order differ less, and random numbers that a replay repeats differ far more."""

log = logging.getLogger(__name__)


def choose_graphs(
    pipeline: PipelineSettings,
    setup: TrainingSetup,
    make_strategy: Callable[[], Strategy],
    make_embedding: Callable[[nn.Module], Embeddings | None],
) -> TrainingSetup:
    """Return the setup with the decision of `learner.graphs`; the model and the random generators are unchanged.

    Raises:
        SettingsError: `learner.graphs = true`, and steps cannot run as CUDA graphs.
    """
    choice, device = setup.settings.graphs, setup.device
    if choice is False or (choice == "auto" and device.type != "cuda"):
        return setup
    if device.type != "cuda":
        why: str | None = f"the device is {device}, and not a CUDA device"
    elif setup.precision.scaled:
        why = "with fp16 the host decides whether to repeat a step with a smaller loss scale"
    else:
        why = obstacle(facts(pipeline), "learner.graphs") or try_graphs(setup, make_strategy, make_embedding)
    if why is None:
        return replace(setup, graphs=True)
    if choice is True:
        raise SettingsError(f'learner.graphs = true: {why}; write "auto" or false')
    sentence = f"steps run without CUDA graphs: {why}"
    log.info("%s", sentence)
    return replace(setup, no_graphs=sentence)


class _Outcome(NamedTuple):
    """What the steps of a trial have learned; `why`: why graphs cannot take them, as far as these steps show."""

    results: list[StepResult]
    learned: Mapping[str, Tensor]
    why: str | None


def try_graphs(
    setup: TrainingSetup,
    make_strategy: Callable[[], Strategy],
    make_embedding: Callable[[nn.Module], Embeddings | None],
) -> str | None:
    """Take the same steps on two copies of the model, as they are and by graphs; return why graphs cannot be used.

    The steps are full, each has other events, and one is not finite.
    """
    generators = GeneratorStates(setup.device)

    def outcome(*, graphs: bool) -> _Outcome:
        copied = copy_sharing_base(setup.model)
        settings = setup.settings.model_copy(update={"compile": False, "schedule": ScheduleSettings()})
        own = replace(setup, model=copied, settings=settings, embedding=make_embedding(copied), graphs=graphs)
        return _outcome(Trainer(replace(own, strategy=make_strategy())), own)

    try:
        plain = outcome(graphs=False)
        if plain.why is not None:
            return plain.why
        generators.restore()
        graphed = outcome(graphs=True)
        return graphed.why or _difference(setup, plain, graphed)
    except Exception as exc:  # noqa: BLE001 the user's own code may raise anything, of events that are made up
        return f"{setup.device} has no memory for a trial" if out_of_memory(exc) else in_one_line(exc)
    finally:
        generators.restore()
        free_cached_memory(setup.device)


def _outcome(trainer: Trainer, setup: TrainingSetup) -> _Outcome:
    schema, settings, runner = setup.schema, setup.settings, trainer.runner
    if not runner.runs_on_device:
        name = f'learner.optimizer = "{settings.optimizer.name}" and learner.strategy = "{settings.strategy.name}"'
        return _Outcome([], {}, f"{name} need the host in each step")
    label, before = first_label(trainer, schema), _attributes(trainer.model)
    rows = settings.batch_size
    samples = trainer.strategy.samples(int(rows * (1 if settings.replay_ratio == "auto" else settings.replay_ratio)))
    results = []
    for step in range(_STEPS):
        columns = made_up_columns(schema, max([rows, *samples]), label, step)
        everything, old = made_up_step(trainer, columns, samples)
        new = everything[:rows]
        if step == _POISONED:
            new = replace(new, weight_B=torch.full_like(new.weight_B, math.nan))
        results.append(trainer.step(new, old, {name: column[:rows] for name, column in columns.items()}))
    learned = {name: value.detach().clone() for name, value in trained_state(trainer.model).items()}
    why = None
    if setup.graphs:
        assert runner.graphs is not None
        if not runner.graphs.recorded or runner.graphs.refused is not None:
            why = runner.graphs.refused or "learner.micro_batch_size divides a step"
    elif changed := [name for name, value in _attributes(trainer.model).items() if before.get(name) != value]:
        why = f"the model changes its attribute {changed[0]} in Python in a step"
    elif (waits := _waits(lambda: runner.step_on_device(new, old))) is not None:
        why = f"a step waits for the device: {waits}"
    return _Outcome(results, learned, why)


def _attributes(model: nn.Module) -> dict[str, object]:
    """Return the plain attributes of all modules, such as a count of calls."""
    return {
        f"{name}.{attribute}".removeprefix("."): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    }


def _waits(work: Callable[[], object]) -> str | None:
    """Run work on the device; return the error of the first operation for which the host has to wait."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except Exception as exc:
        if out_of_memory(exc):
            raise
        return in_one_line(exc)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return None


def _difference(setup: TrainingSetup, plain: _Outcome, graphed: _Outcome) -> str | None:
    """Return how steps by graphs have learned something else; None: they have learned the same."""
    allowed = _HALF if setup.precision.dtype is not None else _FULL
    if setup.settings.deterministic:
        allowed = 0.0
    if [each.finite for each in plain.results] != [each.finite for each in graphed.results]:
        return "they decide otherwise whether a step is finite"
    for expected, found in zip(plain.results, graphed.results, strict=True):
        if expected.finite:
            for name in ("loss", "loss_new"):
                one, other = getattr(expected, name), getattr(found, name)
                if abs(one - other) > allowed * max(abs(one), 1e-6):
                    return f"they compute other losses: {other:g} instead of {one:g}"
    start = trained_state(setup.model)
    far, moved = _distance(graphed.learned, plain.learned), _distance(plain.learned, start)
    return f"they learn something else, by {far / moved:.2g} of what is learned" if not far <= allowed * moved else None


def _distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of all values; those that are equal differ by 0, also where infinite."""
    squares = [
        torch.where(value == other[name], 0.0, value.double() - other[name].double()).square().sum()
        for name, value in one.items()
    ]
    return math.sqrt(torch.stack(squares).sum().item())
