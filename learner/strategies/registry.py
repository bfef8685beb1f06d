"""Strategies by the names that `learner.strategy` takes."""

import inspect
import math
from typing import Any

from anabranch.core.errors import SettingsError
from learner.config import ModelSettings, StrategySettings
from learner.model.task import TASKS, Embeds, Task
from learner.strategies.agem import ProjectedGradient
from learner.strategies.base import Strategy
from learner.strategies.der import DarkReplay, DarkReplayPlus
from learner.strategies.er import ExperienceReplay, NoReplay
from learner.strategies.er_ace import AsymmetricReplay
from learner.strategies.ewc import ElasticWeights
from learner.strategies.growing.experts import Experts
from learner.strategies.growing.progressive import Progressive
from learner.strategies.lwf import Distillation
from learner.strategies.mir import InterferedReplay
from learner.strategies.ncm import NearestClassMean
from learner.strategies.slda import StreamingDiscriminant

STRATEGIES: dict[str, type[Strategy]] = {
    "none": NoReplay,
    "er": ExperienceReplay,
    "er-ace": AsymmetricReplay,
    "der": DarkReplay,
    "der++": DarkReplayPlus,
    "mir": InterferedReplay,
    "agem": ProjectedGradient,
    "ewc": ElasticWeights,
    "lwf": Distillation,
    "slda": StreamingDiscriminant,
    "ncm": NearestClassMean,
    "experts": Experts,
    "progressive": Progressive,
}
"""To add a strategy, write a class in a new module and add a line here."""


def build_strategy(settings: StrategySettings, model: ModelSettings, task: Task) -> Strategy:
    """Build the strategy with its arguments, and check that it supports the model.

    Raises:
        SettingsError: it has no such argument, refuses a value, or does not support the model.
    """
    name, kind = settings.name, STRATEGIES[settings.name]
    if kind.tasks and not any(isinstance(task, TASKS[each]) for each in kind.tasks):
        raise SettingsError(
            f'learner.strategy = "{name}" is made for model.task = "{", ".join(sorted(kind.tasks))}", and that is '
            f'"{model.task}"; take "er", which works for any'
        )
    if kind.embeds and not model.embedding and not isinstance(task, Embeds):
        raise SettingsError(
            f'learner.strategy = "{name}" compares embeddings, and model.embedding is ""; set it to the name of the '
            "module before the last"
        )
    arguments: dict[str, Any] = settings.model_extra or {}
    parameters = {each.name: each for each in inspect.signature(kind).parameters.values()}
    for argument, value in arguments.items():
        if argument not in parameters:
            takes = f"it takes {', '.join(parameters)}" if parameters else "it takes no arguments"
            raise SettingsError(f"learner.strategy: {name} has no {argument!r}; {takes}")
        _check(name, argument, value, parameters[argument].default)
    try:
        return kind(**arguments)
    except ValueError as exc:
        raise SettingsError(f"learner.strategy: {name} refuses {arguments}: {exc}") from exc


def _check(name: str, argument: str, value: object, default: object) -> None:
    """Raise SettingsError unless the value is of the default's kind: a name, a count from 1, or a number from 0."""
    kinds = {
        str: (isinstance(value, str), "a string"),
        int: (type(value) is int and value >= 1, "a whole number of at least 1"),
        float: (type(value) in (int, float) and 0 <= value < math.inf, "a number of at least 0"),  # type: ignore[operator]
    }
    fits, needed = kinds[type(default)]
    if not fits:
        raise SettingsError(f"learner.strategy: {name} refuses {argument} = {value!r}: it has to be {needed}")
