"""Strategies by name: what else than the new events a step learns from.

To add one, write a class in a file of its own and add a line here.
"""

from learner.strategies.der import DarkReplay, DarkReplayPlus
from learner.strategies.er_ace import AsymmetricReplay
from learner.strategy import ExperienceReplay, NoReplay, Strategy

STRATEGIES: dict[str, type[Strategy]] = {
    "none": NoReplay,
    "er": ExperienceReplay,
    "er-ace": AsymmetricReplay,
    "der": DarkReplay,
    "der++": DarkReplayPlus,
}
