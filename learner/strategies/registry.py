"""Strategies by the names that `learner.strategy` takes."""

from anabranch.core.errors import SettingsError
from anabranch.core.users_code import build
from anabranch.learner.model.task import TASKS, Embeds, Task
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.strategies import STRATEGY, StrategySettings
from anabranch.learner.strategies.agem import ProjectedGradient
from anabranch.learner.strategies.base import Strategy
from anabranch.learner.strategies.der import DarkReplay, DarkReplayPlus
from anabranch.learner.strategies.er import AsymmetricReplay, ExperienceReplay, NoReplay
from anabranch.learner.strategies.ewc import ElasticWeights
from anabranch.learner.strategies.experts import Experts
from anabranch.learner.strategies.growing import Progressive
from anabranch.learner.strategies.lwf import Distillation
from anabranch.learner.strategies.mir import InterferedReplay
from anabranch.learner.strategies.ncm import NearestClassMean, StreamingDiscriminant

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
"""Ours; others have import strings."""


def build_strategy(settings: StrategySettings, model: ModelSettings, task: Task) -> Strategy:
    """Build the strategy with its arguments, and check that it supports the model.

    Raises:
        SettingsError: it has no such argument, refuses a value, or does not support the model.
    """
    name = settings.name
    kind = STRATEGIES[name] if name in STRATEGIES else STRATEGY.find(name)
    if kind.tasks and not any(isinstance(task, TASKS[each]) for each in kind.tasks):
        raise SettingsError(
            f'learner.strategy = "{name}" is made for model.task = "{", ".join(sorted(kind.tasks))}", and that is '
            f'"{model.task}"; take "er", which works for any'
        )
    if settings.kind.embeds and not model.embedding and not isinstance(task, Embeds):
        raise SettingsError(
            f'learner.strategy = "{name}" compares embeddings, and model.embedding is ""; set it to the name of the '
            "module before the last"
        )
    strategy: Strategy = build("learner.strategy", name, kind, settings.model_extra or {})
    return strategy
