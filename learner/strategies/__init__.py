"""Strategies by name: what else than the new events a step learns from.

To add one, write a class in a file of its own and add a line here.
"""

from learner.strategies.agem import ProjectedGradient
from learner.strategies.class_means import NearestClassMean
from learner.strategies.der import DarkReplay, DarkReplayPlus
from learner.strategies.er_ace import AsymmetricReplay
from learner.strategies.ewc import ElasticWeights
from learner.strategies.lwf import Distillation
from learner.strategies.mir import InterferedReplay
from learner.strategies.slda import StreamingDiscriminant
from learner.strategy import ExperienceReplay, NoReplay, Strategy

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
}
